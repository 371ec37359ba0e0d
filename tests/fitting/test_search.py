"""The search: it misses nothing, proposes nothing that does not fit, and keeps the effective batch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oomph
from oomph import config as configs
from oomph import devices
from oomph.config import TrainConfig
from oomph.fitting.estimate import Estimator, slack_of
from oomph.fitting.fit import fit
from oomph.fitting.search import LAST_RISE, OPTIMISM, Searcher, boundary
from oomph.fitting.space import Ladder, TrainingProgram, batches, divisors, ladders, programs

SMALL = {
    "n_layer": 4, "n_head": 2, "n_embd": 128, "block_size": 512, "vocab_size": 8192, "batch_size": 3,
    "gradient_accumulation_steps": 2, "max_iters": 100,
}  # fmt: skip


def card(mib: float) -> devices.Device:
    return devices.custom("a small card", mib=mib, tflops=20.0, gbs=300.0, watts=None)


@st.composite
def runs(draw: st.DrawFn) -> dict[str, object]:
    heads = draw(st.integers(1, 3))
    return {
        "n_layer": draw(st.integers(1, 6)),
        "n_head": heads,
        "n_embd": heads * draw(st.sampled_from([32, 64])),
        "block_size": draw(st.sampled_from([64, 256])),
        "vocab_size": draw(st.sampled_from([65, 5000])),
        "batch_size": draw(st.integers(1, 8)),
        "gradient_accumulation_steps": draw(st.integers(1, 6)),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
        "bias": draw(st.booleans()),
        "trainer": draw(st.sampled_from(["nanogpt", "oomph"])),
    }


def candidates(program: TrainingProgram) -> Iterator[TrainConfig]:
    """Every setting of a program, one by one."""
    for ladder in ladders(program):
        for rung in range(len(ladder.counts)):
            yield from ladder.both(rung)


def enumerate_all(program_key: str, config: dict[str, object], device: devices.Device) -> float | None:
    """The slow oracle: every candidate simulated in full, and the shortest step among those that fit."""
    program = programs(configs.as_loaded(config), device)[program_key]
    searcher = Searcher(device)
    plans = [searcher.simulate(program.loaded, each) for each in candidates(program)]
    fitting = [plan.time.step_ms for plan in plans if plan.time and plan.memory.fits and not plan.memory.retries]
    return min(fitting, default=None)


def fastest_ms(program_key: str, config: dict[str, object], device: devices.Device) -> float | None:
    program = programs(configs.as_loaded(config), device)[program_key]
    found = Searcher(device).fastest(program.loaded, ladders(program))
    return found.time.step_ms if found and found.time else None


@pytest.mark.parametrize(
    "room", [0.5, pytest.param(0.7, marks=pytest.mark.slow), pytest.param(1.0, marks=pytest.mark.slow)]
)
def test_the_search_finds_the_true_optimum_of_a_whole_grid(room: float) -> None:
    roomy = oomph.plan(SMALL | {"trainer": "oomph"}, card(10**6)).memory
    device = card(round(room * roomy.reserved_mib + roomy.context_mib) + 310)
    assert fastest_ms("oomph", SMALL, device) == enumerate_all("oomph", SMALL, device)


@given(runs(), st.floats(0.3, 1.5))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_search_finds_the_true_optimum_of_any_nanogpt_grid(config: dict[str, object], room: float) -> None:
    need = oomph.plan(config | {"trainer": "nanogpt"}, card(10**6)).memory
    device = card(max(400, round(room * need.total_mib)))
    for key in ("nanogpt", "patched"):
        assert fastest_ms(key, config, device) == enumerate_all(key, config, device)


@st.composite
def ladders_of_any_run(draw: st.DrawFn) -> Ladder:
    """Settings that differ in their checkpointed blocks, of any program, model, number format and optimizer."""
    key = draw(st.sampled_from(["nanogpt", "patched", "oomph", "oomph"]))
    config = draw(runs()) | {
        "n_layer": draw(st.integers(1, 9)),
        "block_size": draw(st.sampled_from([64, 1024, 4096])),
        "tie_weights": draw(st.booleans()),
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        "attention": draw(st.sampled_from(["flash", "efficient", "math"])),
        "trainer": "oomph" if key == "oomph" else "nanogpt",
    }
    if key == "oomph":
        config["optimizer"] = draw(st.sampled_from(["adamw", "adamw8bit", "sgd", "adafactor"]))
        config["autocast"] = draw(st.booleans())
    return draw(st.sampled_from(list(ladders(programs(configs.as_loaded(config), card(10**6))[key]))))


@pytest.mark.slow
@given(ladders_of_any_run())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_bound_is_not_above_the_peak_but_for_the_slack_that_is_allowed_for(ladder: Ladder) -> None:
    estimator = Estimator(card(10**6))
    for rung in range(len(ladder.counts)):
        config = ladder.at(rung)
        assert estimator.floor_bytes(config) <= slack_of(config) * estimator.exact(config).peak_bytes


@pytest.mark.slow
@given(ladders_of_any_run())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_within_a_strand_the_peak_sinks_and_the_last_block_raises_it_by_less_than_is_allowed_for(
    ladder: Ladder,
) -> None:
    estimator = Estimator(card(10**6))
    peaks = [estimator.exact(ladder.at(rung)).peak_bytes for rung in range(len(ladder.counts))]
    strands = ladder.strands()
    assert sorted(rung for strand in strands for rung in strand) == list(range(len(peaks)))
    for strand in strands:
        sinking = [peaks[rung] for rung in strand]
        assert sinking == sorted(sinking, reverse=True)
    assert peaks[-1] <= LAST_RISE * min(peaks)


@given(ladders_of_any_run(), st.floats(0.3, 1.2))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_rung_that_fits_lies_below_the_fewest_blocks_that_could_make_room(ladder: Ladder, room: float) -> None:
    estimator = Estimator(card(10**6))
    lowest = estimator.exact(ladder.at(0)).peak_bytes
    fewest = estimator.fewest_checkpointed(ladder.at(0), room * lowest)
    for rung, count in enumerate(ladder.counts[:-1]):
        assert count >= fewest or estimator.exact(ladder.at(rung)).peak_bytes > room * lowest


@given(st.integers(0, 40), st.data())
def test_the_last_that_passes_is_found_from_any_guess(count: int, data: st.DataObject) -> None:
    passing, guess = data.draw(st.integers(0, count)), data.draw(st.integers(0, count))
    assert boundary(range(count), guess, lambda number: number < passing) == passing


@given(ladders_of_any_run(), st.integers(0, 10**6))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_was_drawn_for_one_card_tells_the_same_of_another(ladder: Ladder, seed: int) -> None:
    config = ladder.at(seed % len(ladder.counts))
    first, second = card(4000), devices.custom("another", mib=9000, tflops=80.0, gbs=900.0, watts=None)
    before = Estimator(first)
    before.step_s(config)
    before.exact_s(config)
    shared, alone = Estimator(second, before), Estimator(second)
    assert shared.step_s(config) == alone.step_s(config)
    assert shared.exact_s(config) == alone.exact_s(config)
    assert shared.floor_bytes(config) == alone.floor_bytes(config)


@given(ladders_of_any_run(), st.integers(0, 10**6))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_time_of_a_whole_step_is_the_plans(ladder: Ladder, seed: int) -> None:
    config = ladder.at(seed % len(ladder.counts))
    planned = oomph.plan(config, card(10**6)).time
    assert planned is not None
    assert Estimator(card(10**6)).exact_s(config) == pytest.approx(planned.step_ms / 1e3, rel=1e-9)


def test_eager_steps_that_were_measured_to_be_quick_are_found() -> None:
    measured = msgspec.structs.replace(card(2000), eager_ratio=0.4, compiled_ratio=1.5)
    config = SMALL | {"batch_size": 4, "gradient_accumulation_steps": 1}
    found = fastest_ms("nanogpt", config, measured)
    assert found is not None
    assert found == enumerate_all("nanogpt", config, measured)


def test_nothing_is_found_that_takes_longer_than_a_step_may() -> None:
    program = programs(configs.as_loaded(SMALL), card(2000))["nanogpt"]
    searcher = Searcher(card(2000))
    fastest = searcher.fastest(program.loaded, ladders(program))
    assert fastest is not None
    assert fastest.time is not None
    step_s = fastest.time.step_ms / 1e3
    assert searcher.fastest(program.loaded, ladders(program), at_most_s=0.999 * step_s) is None
    assert searcher.fastest(program.loaded, ladders(program), at_most_s=1.001 * step_s) is fastest


def test_an_untied_float32_model_that_nanogpt_can_train_is_found() -> None:
    config = {
        "n_layer": 6, "n_head": 15, "n_embd": 960, "block_size": 4096, "vocab_size": 256, "dtype": "float32",
        "tie_weights": False, "batch_size": 4, "gradient_accumulation_steps": 1, "max_iters": 100,
    }  # fmt: skip
    program = programs(configs.as_loaded(config), card(3255))["nanogpt"]
    found = Searcher(card(3255)).fastest(program.loaded, ladders(program))
    assert found is not None
    assert found.config.batch_size == 1


def test_all_but_the_last_block_are_checkpointed_where_that_takes_less_than_all() -> None:
    config = {
        "n_layer": 2, "n_head": 10, "n_embd": 640, "block_size": 32768, "vocab_size": 65, "dtype": "float32",
        "attention": "efficient", "batch_size": 1, "gradient_accumulation_steps": 2, "max_iters": 100,
        "trainer": "oomph",
    }  # fmt: skip
    program = programs(configs.as_loaded(config), card(2905))["oomph"]
    found = Searcher(card(2905)).fastest(program.loaded, ladders(program))
    assert found is not None
    assert (found.config.compile, found.config.checkpoint_layers) == (True, 1)


def test_the_leanest_setting_may_be_a_lone_micro_step_that_holds_no_second_gradients() -> None:
    config = SMALL | {"n_embd": 512, "n_head": 8, "block_size": 64, "batch_size": 2, "gradient_accumulation_steps": 1}
    device = card(10**6)
    program = programs(configs.as_loaded(config), device)["oomph"]
    searcher = Searcher(device)
    leanest = searcher.roomiest(program.loaded, ladders(program))
    every = [searcher.simulate(program.loaded, each).memory.total_mib for each in candidates(program)]
    assert leanest is not None
    assert leanest.config.batch_size == 2
    assert leanest.memory.total_mib <= 1.02 * min(every)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("nanogpt", {"n_head": 3, "n_embd": 288, "block_size": 256, "vocab_size": 65, "batch_size": 1}),
        (
            "oomph",
            {"n_head": 4, "n_embd": 384, "block_size": 64, "vocab_size": 50304, "attention": "math",
             "tie_weights": False, "batch_size": 8, "gradient_accumulation_steps": 1},
        ),
    ],
)  # fmt: skip
def test_the_leanest_setting_is_found_where_fragmentation_turns_the_order(key: str, changes: dict[str, object]) -> None:
    device = card(10**6)
    program = programs(configs.as_loaded(SMALL | {"dropout": 0.1} | changes), device)[key]
    searcher = Searcher(device)
    leanest = searcher.roomiest(program.loaded, ladders(program))
    assert leanest is not None
    sizes = (1, leanest.config.batch_size)
    every = [searcher.simulate(program.loaded, each) for each in candidates(program) if each.batch_size in sizes]
    assert leanest.memory.total_mib <= 1.02 * min(plan.memory.total_mib for plan in every)


def test_a_micro_batch_beyond_any_card_is_planned_and_not_proposed() -> None:
    huge = SMALL | {"n_layer": 1, "vocab_size": 50304, "batch_size": 10_000_000, "expandable_segments": True}
    plan = oomph.plan(huge, card(1000))
    assert plan.memory.fits is False
    assert plan.memory.reserved_mib > 2**24


@given(runs(), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_the_shallow_time_is_right_to_a_percent(config: dict[str, object], seed: int) -> None:
    estimator = Estimator(card(10**6))
    program = programs(configs.as_loaded(config), estimator.device)["oomph"]
    every = list(candidates(program))
    chosen = every[seed % len(every)]
    assert estimator.step_s(chosen) * OPTIMISM <= estimator.exact_s(chosen)


@pytest.mark.slow
@given(runs(), st.integers(450, 3000))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_nothing_proposed_exceeds_the_card_and_the_batch_is_kept_to_the_sequence(
    config: dict[str, object], mib: int
) -> None:
    device = card(mib)
    found = fit(config, device)
    asked = int(str(config["batch_size"])) * int(str(config["gradient_accumulation_steps"]))
    for option in found.options:
        again = oomph.plan(option.plan.config, device).memory
        assert option.fits == again.fits
        assert not option.fits or again.total_mib <= device.usable_mib
        assert option.kind == "different" or option.sequences == asked
    for place in (found.best, found.safest):
        assert place is None or found.options[place].fits


@given(st.integers(1, 5000))
def test_divisors_are_all_of_them(number: int) -> None:
    assert divisors(number) == [n for n in range(number, 0, -1) if number % n == 0]


def test_every_divisor_of_the_batch_is_a_candidate_and_each_device_gets_whole_micro_steps() -> None:
    config = TrainConfig(batch_size=12, gradient_accumulation_steps=40)
    assert {size for size, _ in batches(config)} == set(divisors(480))
    shared = TrainConfig(batch_size=12, gradient_accumulation_steps=40, world_size=8)
    assert all(steps % 8 == 0 and size * steps == 480 for size, steps in batches(shared))
    assert len(batches(shared)) == len(divisors(60))


def test_more_than_two_thousand_candidates_are_weighed_for_a_gpt_2() -> None:
    program = programs(configs.load(["gpt2"], [("batch_size", "16", "here")]), devices.find("RTX 4070"))
    for each in program.values():
        assert len(set(candidates(each))) == sum(ladder.settings for ladder in ladders(each))
    assert sum(ladder.settings for each in program.values() for ladder in ladders(each)) >= 2000


def test_a_card_without_rates_is_still_searched() -> None:
    unknown = devices.custom("mystery card", mib=700, tflops=None, gbs=None, watts=None)
    found = fit(SMALL, unknown)
    assert found.chosen is not None
    assert found.chosen.tokens_per_s is None


def test_torch_compile_is_not_proposed_where_the_card_cannot_run_it() -> None:
    old = devices.find("GTX 1080 Ti")
    found = programs(configs.load(["gpt2"]), old)
    assert all(program.compile == (False,) for program in found.values())
