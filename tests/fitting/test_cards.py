"""Which card would do: every card is searched as `oomph fit` searches one, and gains by what others found."""

from __future__ import annotations

import re

import msgspec
import pytest

import oomph
from oomph import devices
from oomph.fitting.cards import CardOption, Cards, which_cards
from oomph.fitting.fit import fit
from oomph.fitting.result import Fit
from oomph.report.document import Table, Text
from oomph.report.fit import THIN, cards_document
from oomph.report.markdown import to_markdown

RUN = {
    "n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 512, "vocab_size": 50304, "batch_size": 8,
    "gradient_accumulation_steps": 2, "max_iters": 1000,
}  # fmt: skip


def card(mib: float, tflops: float = 20.0) -> devices.Device:
    return devices.custom(f"{mib} MiB at {tflops}", mib=mib, tflops=tflops, gbs=15 * tflops, watts=None)


def by_name(found: Cards) -> dict[str, CardOption]:
    return {option.device.name: option for option in found.cards}


def test_a_card_on_which_only_another_program_fits_would_do_and_says_which() -> None:
    lone = RUN | {"batch_size": 1, "gradient_accumulation_steps": 1, "block_size": 4096}  # nothing smaller to try
    need = oomph.plan(lone | {"expandable_segments": True}, card(10**6)).memory.total_mib
    device = card(0.75 * need)
    found = which_cards(lone, cards=[device])
    (option,) = found.fitting
    assert not option.unchanged
    assert option.patched or option.plan.config.trainer == "oomph"
    assert option.plan.memory.total_mib <= device.usable_mib
    assert option.to_dict()["changes"] == option.changes
    assert re.search(r"\| (oomph|patched) \|", to_markdown(cards_document(found)))


@pytest.mark.parametrize("share", [0.97, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.5, 1.05))])
def test_a_card_is_in_time_where_fit_calls_it_in_time(share: float) -> None:
    cards = [card(mib, tflops) for mib, tflops in ((1400, 30.0), (2600, 20.0), (9000, 18.0), (9000, 4.0))]
    asked = oomph.plan(RUN, cards[2]).time
    assert asked is not None
    hours = share * asked.hours
    found = by_name(which_cards(RUN, hours=hours, cards=cards))
    for device in cards:
        option = found[device.name]
        assert (bool(option.plan.memory.fits) and option.in_time) == fit(RUN, device, hours=hours).is_yes


def test_the_answer_for_a_card_does_not_depend_on_the_cards_beside_it() -> None:
    cards = [card(900), card(1300), card(1700, 5.0), card(2600), oomph.find_gpu("RTX 4070"), oomph.find_gpu("T4")]
    together = by_name(which_cards(RUN, cards=cards))
    for device in cards:
        (alone,) = which_cards(RUN, cards=[device]).cards
        assert together[device.name].plan.config == alone.plan.config
        assert together[device.name].plan.memory.total_mib == alone.plan.memory.total_mib
        assert together[device.name].plan.time == alone.plan.time


def test_a_card_that_must_give_cache_back_would_still_do() -> None:
    lone = RUN | {"batch_size": 1, "gradient_accumulation_steps": 1, "compile": False}
    roomy = card(10**5)
    need = oomph.plan(lone, roomy).memory
    tight = [msgspec.structs.replace(roomy, usable_mib=int(need.total_mib) - less) for less in range(2, 60, 6)]
    for device in tight:
        if oomph.plan(lone, device).memory.fits:
            assert which_cards(lone, cards=[device]).fitting


def test_each_card_is_told_while_it_is_looked_at() -> None:
    told: list[str] = []
    which_cards(RUN, cards=[card(9000), card(8000)], progress=told.append)
    assert told == ["card 1 of 2: 9000 MiB at 20.0", "card 2 of 2: 8000 MiB at 20.0"]


def only_just() -> tuple[dict[str, int], devices.Device]:
    """A run and a card on which its leanest setting alone fits, and must give cache back."""
    run = RUN | {"n_head": 6, "n_embd": 384, "vocab_size": 5000, "batch_size": 2, "gradient_accumulation_steps": 1}
    return run, msgspec.structs.replace(card(10**6), memory_mib=498, usable_mib=498)


@pytest.fixture(scope="module")
def fitted_only_just() -> Fit:
    return fit(*only_just())


def test_a_card_on_which_the_leanest_setting_alone_fits_would_do_as_fit_says(fitted_only_just: Fit) -> None:
    run, tight = only_just()
    found = which_cards(run, cards=[tight])
    assert fitted_only_just.is_yes
    assert found.fitting
    assert "only just" in found.verdict


def test_the_verdict_says_that_a_setting_must_give_cache_back(fitted_only_just: Fit) -> None:
    found = fitted_only_just
    assert found.chosen is not None
    assert found.chosen.plan.memory.retries
    assert "give cached memory back" in found.verdict


def test_a_margin_that_a_prediction_may_miss_by_is_said_of_the_smallest_card() -> None:
    need = oomph.plan(RUN, card(10**5)).memory.total_mib
    tight, roomy = (msgspec.structs.replace(card(10**5), usable_mib=int(need) + more) for more in (20, 5000))
    found = which_cards(RUN, cards=[tight])
    assert "MiB that a prediction may miss by" in found.verdict
    assert found.to_dict()["cards"][0]["high_mib"] > tight.usable_mib
    assert "miss" not in which_cards(RUN, cards=[roomy]).verdict
    both = which_cards(RUN, cards=[tight, roomy])
    table = next(part for part in cards_document(both).parts if isinstance(part, Table))
    assert [row.cells[4].endswith("*") for _, rows in table.groups for row in rows] == [True, False]
    assert f"{THIN}." in [part.text for part in cards_document(both).parts if isinstance(part, Text)]
