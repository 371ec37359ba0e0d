"""Hours, energy, money: the published run's figures, the formulas, and that the parts make the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import oomph
from oomph import devices
from oomph.predict.cost import REST_WATTS, SUPPLY_EFFICIENCY, energy
from oomph.predict.run_time import CHECKPOINT_BYTES_PER_S
from oomph.report.plan import summarise

CARD = oomph.find_gpu("RTX 4070")  # 200 W
RUN_B = {
    "n_layer": 12, "n_head": 12, "n_embd": 384, "block_size": 1024, "batch_size": 16, "gradient_accumulation_steps": 32,
    "max_iters": 20000, "dropout": 0.1,
}  # fmt: skip
STEP_MS = 3905.0  # measured: 3900 to 3920


def run_b(**keys: object) -> oomph.Plan:
    return oomph.plan(RUN_B, "RTX 4070", step_ms=STEP_MS, **keys)  # type: ignore[arg-type]


def sentences(plan: oomph.Plan, heading: str) -> str:
    return "\n".join(sentence for name, sentence in summarise([plan]).facts if name == heading)


@pytest.mark.parametrize(("watts", "kwh"), [(None, "3.9"), (180.0, "3.9"), (200.0, "4.3")])
def test_run_b_takes_21_7_hours_and_the_energy_its_card_draws_in_them(watts: float | None, kwh: str) -> None:
    plan = run_b(watts=watts)
    assert plan.time is not None
    assert plan.energy is not None
    assert f"{plan.time.train_hours:.1f}" == f"{plan.time.hours:.1f}" == "21.7"
    assert f"{plan.energy.kwh:.1f}" == kwh


def test_the_report_shows_the_formula_from_watts_to_money() -> None:
    plan = run_b(watts=200.0, price_kwh=0.30, currency="EUR", price_hour=0.25)
    said = sentences(plan, "money")
    assert "200 W (measured) × 21.7 h = 4.35 kWh × 0.3 EUR = 1.30 EUR" in said
    assert "rented: 0.25 EUR × 21.7 h = 5.44 EUR" in said


def test_a_card_that_nobody_measured_draws_nine_tenths_of_its_rating() -> None:
    used = energy(CARD, 21.7, price_kwh=0.25, currency="EUR")
    assert used is not None
    assert used.watts == pytest.approx(180)
    assert used.kwh == pytest.approx(180 * 21.7 / 1000)
    assert used.cost == pytest.approx(used.kwh * 0.25)
    assert not used.measured


@given(st.floats(1, 1000), st.floats(0.01, 1e5), st.integers(1, 64))
def test_the_machine_draws_more_than_its_cards_and_all_cards_more_than_one(
    watts: float, hours: float, cards: int
) -> None:
    one, all_of_them = (energy(CARD, hours, cards=count, watts=watts) for count in (1, cards))
    assert one is not None
    assert all_of_them is not None
    assert all_of_them.watts == pytest.approx(cards * one.watts)
    assert all_of_them.machine_watts == pytest.approx((cards * watts + REST_WATTS) / SUPPLY_EFFICIENCY)
    assert all_of_them.machine_cost > all_of_them.cost


def test_without_a_rating_or_hours_there_is_no_energy() -> None:
    unknown = devices.custom("mystery card", mib=12000, tflops=None, gbs=None, watts=None)
    assert energy(unknown, 1.0) is None
    assert energy(CARD, None) is None


def test_another_currency_needs_a_price_in_it() -> None:
    with pytest.raises(oomph.InputError, match="price_kwh"):
        oomph.plan("gpt2", "RTX 4070", currency="EUR")


def test_a_rented_card_costs_its_hours_and_without_a_price_what_the_catalogue_knows() -> None:
    given_price, known = run_b(price_hour=0.5).energy, run_b().energy
    assert given_price is not None
    assert known is not None
    assert given_price.rent == pytest.approx(0.5 * 21.75, rel=0.01)
    assert known.rent is None
    assert CARD.usd_per_hour_low is not None
    assert known.rent_usd_low == pytest.approx(CARD.usd_per_hour_low * 21.75, rel=0.01)


def test_the_whole_run_is_its_steps_evaluations_checkpoints_and_compiling() -> None:
    time = oomph.plan(RUN_B, "RTX 4070").time
    assert time is not None
    parts = time.train_hours + time.eval_hours + time.checkpoint_hours + time.compile_s / 3600
    assert time.hours == pytest.approx(parts)
    assert min(time.eval_hours, time.checkpoint_hours, time.compile_s) > 0
    assert time.low_hours < time.hours < time.high_hours


def test_a_checkpoint_is_the_weights_and_two_moments_at_the_disks_pace() -> None:
    plan = oomph.plan(RUN_B, "RTX 4070")
    assert plan.time is not None
    assert plan.time.checkpoint_mib * 2**20 == pytest.approx(12 * plan.model.params, rel=1e-3)
    seconds = plan.time.checkpoints * plan.time.checkpoint_mib * 2**20 / CHECKPOINT_BYTES_PER_S
    assert plan.time.checkpoint_hours * 3600 == pytest.approx(seconds)


def test_the_first_steps_compile_time_brackets_the_published_ones_and_eager_has_none() -> None:
    def compile_s(**keys: object) -> float:
        time = oomph.plan(RUN_B | keys, "RTX 4070").time
        assert time is not None
        return time.compile_s

    assert compile_s() == pytest.approx(32 - 3.9, rel=0.5)  # 12 layers: a first iteration of 32 s, a step in it
    assert compile_s(n_layer=4) == pytest.approx(6.8, rel=0.5)
    assert compile_s(compile=False) == 0
    assert "24 s" in sentences(oomph.plan(RUN_B, "RTX 4070"), "time")


def test_a_measured_step_time_scales_the_evaluations_with_it() -> None:
    predicted = oomph.plan(RUN_B, "RTX 4070").time
    assert predicted is not None
    twice = oomph.plan(RUN_B, "RTX 4070", step_ms=2 * predicted.step_ms).time
    assert twice is not None
    assert twice.eval_hours == pytest.approx(2 * predicted.eval_hours)
