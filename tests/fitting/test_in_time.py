"""Runs that evaluate much: the fastest step does not make the shortest run, and `--hours` counts the run."""

from __future__ import annotations

import oomph
from oomph import config as configs
from oomph import devices
from oomph.fitting.cards import which_cards
from oomph.fitting.fit import fit
from oomph.fitting.grow import DepthAndWidth, Limits, Sizer
from oomph.fitting.search import Searcher
from oomph.fitting.space import batches

RUN = {
    "n_layer": 3, "n_head": 4, "n_embd": 256, "block_size": 256, "vocab_size": 8192, "batch_size": 32,
    "gradient_accumulation_steps": 1, "max_iters": 20000, "eval_interval": 20,
}  # fmt: skip
CARD = devices.custom("roomy", mib=24000, tflops=20.0, gbs=300.0, watts=None)


def hours_of(batch_size: int, micro_steps: int) -> float:
    changes = {"batch_size": batch_size, "gradient_accumulation_steps": micro_steps}
    time = oomph.plan(RUN | changes, CARD).time
    assert time is not None
    return time.hours


def fewest_hours() -> float:
    return min(hours_of(*batch) for batch in batches(configs.as_loaded(RUN).config))


def test_a_setting_in_time_is_found_where_the_fastest_step_makes_too_long_a_run() -> None:
    hours = 1.01 * fewest_hours()
    assert hours_of(32, 1) > 2 * hours
    found = fit(RUN, CARD, hours=hours)
    assert found.is_yes
    assert found.verdict.startswith("Yes")
    assert found.chosen is not None
    assert found.chosen.hours is not None
    assert found.chosen.hours <= hours


def test_a_card_is_in_time_where_a_smaller_micro_batch_makes_the_run_short_enough() -> None:
    (card,) = which_cards(RUN, cards=[CARD], hours=1.01 * fewest_hours()).cards
    assert card.in_time
    assert card.plan.config.batch_size < 32


def test_a_model_will_do_where_a_smaller_micro_batch_makes_the_run_short_enough() -> None:
    limits = Limits(hours=1.01 * fewest_hours(), tokens=None)
    sizer = Sizer(configs.as_loaded(RUN), Searcher(CARD), limits, proposing=False, tell=lambda _: None)
    assert sizer.will_do(DepthAndWidth(3, 256))


def test_nothing_is_called_in_time_that_takes_longer() -> None:
    found = fit(RUN, CARD, hours=0.5 * fewest_hours())
    assert found.verdict.startswith("Too slow")
    (card,) = which_cards(RUN, cards=[CARD], hours=0.5 * fewest_hours()).cards
    assert not card.in_time


def test_the_report_says_what_evaluations_take_and_names_the_setting_with_the_fewest_hours() -> None:
    found = fit(RUN, CARD)
    (sentence,) = (each for each in found.why if "evaluations take" in each)
    soonest = min((option for option in found.options if option.kind == "same"), key=lambda each: each.hours or 0.0)
    assert (soonest.hours or 0.0) <= fewest_hours()
    assert f"option {found.options.index(soonest) + 1}'s" in sentence
    assert "done sooner" in soonest.reason


def test_evaluations_that_take_little_are_not_spoken_of() -> None:
    assert not any("evaluations" in each for each in fit(RUN | {"eval_interval": 20000}, CARD).why)
