"""Plans for several cards: how they are written, what joins them, what they need and take."""

from __future__ import annotations

from typing import Any

import pytest

import oomph
from oomph.devices import find, split_count
from oomph.devices.links import all_links, find_link, find_network, usual_link
from oomph.errors import InputError
from oomph.planning.scaling import scaling
from oomph.predict.gpu_kernels import LIKELY
from oomph.predict.links import Wires, overlapped
from oomph.report.plan import scaling_picture
from oomph.step.ops import Kernel, Op, Phase

SMALL = {
    "n_layer": 4,
    "n_embd": 256,
    "n_head": 4,
    "compile": False,
    "trainer": "torch",
    "gradient_accumulation_steps": 8,
}


@pytest.mark.parametrize(
    ("said", "name", "count"),
    [
        ("8xH100", "H100 SXM5 80GB", 8), ("4090x4", "4090", 4), ("RTX 3090 x2", "RTX 3090", 2), ("2x4090", "4090", 2),
        ("8xA100", "A100", 8),
        ("64 x H100", "H100 SXM5 80GB", 64), ("RTX 4070", "RTX 4070", None), ("GTX 1060 6GB", "GTX 1060 6GB", None),
    ],
)  # fmt: skip
def test_cards_are_counted_as_people_write_them(said: str, name: str, count: int | None) -> None:
    assert split_count(said) == (name, count)


@pytest.mark.parametrize(
    ("gpu", "keys", "cards"),
    [
        ("8xH100", {}, (8, 1)), ("8xH100", {"nodes": 4}, (32, 4)), ("64xH100", {}, (64, 8)), ("4090x12", {}, (12, 1)),
        ("8xH100", {"world_size": 4}, (4, 1)),
    ],
)  # fmt: skip
def test_a_counted_card_is_of_one_machine(gpu: str, keys: dict[str, Any], cards: tuple[int, int]) -> None:
    found = oomph.plan(SMALL, gpu, gradient_accumulation_steps=192, **keys).config
    assert (found.world_size, found.nodes) == cards


def test_more_machines_than_cards_are_refused() -> None:
    with pytest.raises(InputError, match="nodes = 4"):
        oomph.plan(SMALL, "H100 SXM5 80GB", nodes=4)


@pytest.mark.parametrize(
    ("card", "link"),
    [("H100 SXM5 80GB", "nvlink4"), ("A100 SXM4 80GB", "nvlink3"), ("RTX 4090", "host4"), ("A100 PCIe 80GB", "pcie4")],
)
def test_cards_have_the_links_that_are_on_their_boards(card: str, link: str) -> None:
    assert usual_link(find(card))[0] == link


def test_links_are_known_as_nvidia_smi_prints_them() -> None:
    card = find("RTX 3090")
    assert find_link("NV4", card).bus_gbs == pytest.approx(find_link("nvlink", card).bus_gbs)
    assert find_link("SYS", card).bus_gbs <= find_link("PIX", card).bus_gbs
    assert all(link.bus_low_gbs <= link.bus_gbs <= link.bus_high_gbs for kind in all_links().values() for link in kind)


@pytest.mark.parametrize("keys", [{"link": "nvlonk"}, {"nodes": 2, "network": "pigeons"}])
def test_a_link_that_does_not_exist_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"nvlonk|pigeons"):
        oomph.plan({**SMALL, "world_size": 8, **keys}, "H100 SXM5 80GB")


def test_collectives_are_hidden_behind_what_runs_beside_them() -> None:
    link = find_link("pcie4", find("RTX A6000"))
    joined = Wires(link, None, 2)
    work = Op("work", Phase.BACKWARD, kernel=Kernel.GEMM)
    send = Op("send", Phase.BACKWARD, kernel=Kernel.ALL_REDUCE, shape=(2, 24_000_000))
    wait = Op("send", Phase.BACKWARD, kernel=Kernel.WAIT)
    takes = joined.seconds(send, LIKELY)
    assert takes == pytest.approx(24e-6 + 24e6 / 24e9)
    for seconds, exposed in ((0.0, takes), (takes / 2, takes / 2), (2 * takes, 0.0)):
        found = overlapped([send, work, wait], joined, LIKELY, {work: seconds}, lambda op: op)
        assert found == pytest.approx((takes, exposed))


def test_machines_are_joined_by_a_port_a_card() -> None:
    link, port = find_link("nvlink4", find("H100 SXM5 80GB")), find_network("ib400")
    both = Wires(link, port, 8)
    gather = Op("gather", Phase.FORWARD, kernel=Kernel.ALL_GATHER, shape=(16, 10**9))
    assert both.seconds(gather, LIKELY) == pytest.approx(93e-6 + 1e9 * 15 / 16 / min(370e9, 8 * 47.5e9))


def test_more_cards_lower_the_memory_of_each_under_fsdp_alone() -> None:
    def total(how: str, cards: int) -> float:
        config = {**SMALL, "parallel": how, "world_size": cards, "gradient_accumulation_steps": cards}
        return oomph.plan(config, "H100 SXM5 80GB").memory.allocated_mib

    totals = {how: [total(how, cards) for cards in (2, 8)] for how in ("ddp", "fsdp")}
    assert totals["fsdp"][0] > totals["fsdp"][1]
    assert totals["ddp"][0] == totals["ddp"][1]


def test_a_slow_link_binds() -> None:
    slow, fast = (
        oomph.plan({**SMALL, "batch_size": 1, "link": link}, "8xH100 SXM5 80GB") for link in ("SYS", "nvlink")
    )
    assert slow.time is not None and fast.time is not None
    assert slow.time.exposed_ms > fast.time.exposed_ms
    points = scaling(slow)
    assert [point.cards for point in points] == [1, 2, 4, 8]
    assert points[0].communication_ms == 0 and points[0].efficiency == 1
    assert points[-1].efficiency < scaling(fast)[-1].efficiency


def test_scaling_is_drawn_beside_as_many_times_one_card() -> None:
    points = scaling(oomph.plan({**SMALL, "batch_size": 1, "link": "SYS"}, "8xH100 SXM5 80GB"))
    (chart,) = scaling_picture(points).charts
    planned, linear = (dict(line.points) for line in chart.lines)
    assert planned == {point.cards: point.tokens_per_s for point in points}
    assert linear[8] == pytest.approx(8 * planned[1])


def test_figures_are_of_one_card_or_of_all() -> None:
    found = oomph.plan(SMALL, "4xH100 SXM5 80GB").to_dict()
    assert found["time"]["tokens_per_s"] == pytest.approx(4 * found["time"]["tokens_per_s_per_gpu"])
    assert 0 <= found["time"]["exposed_ms"] <= found["time"]["communication_ms"]
    assert found["model"]["trainable_params"] == found["model"]["params"]
    assert found["config"]["link"] == "nvlink4"
