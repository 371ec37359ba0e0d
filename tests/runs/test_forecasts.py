"""Fits to a run's curve, their bounds, and published scaling laws."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomph.runs.curves import FARTHEST, fit_power_law, forecast, perplexity
from oomph.runs.findings.training import HOFFMANN, effective_tokens, expected_loss

Points = list[tuple[float, float]]


def curve(floor: float, scale: float, exponent: float, noise: float = 0.0, last: int = 10_000) -> Points:
    draw = random.Random(1)
    return [(s, floor + scale * s**-exponent + draw.gauss(0, noise)) for s in range(250, last + 1, 250)]


@settings(deadline=None, max_examples=30)
@given(st.floats(1.5, 3.0), st.floats(5, 50), st.floats(0.2, 0.9))
def test_a_clean_power_law_is_followed_closely(floor: float, scale: float, exponent: float) -> None:
    found = forecast(curve(floor, scale, exponent), 20_000)
    assert found is not None
    truth = floor + scale * 20_000**-exponent
    assert abs(found.loss - truth) < 0.05
    assert found.low <= truth <= found.high


def test_nine_of_ten_bounds_hold_the_truth() -> None:
    draw = random.Random(5)
    held = 0
    for _ in range(40):
        floor, scale, exponent = draw.uniform(1.5, 3), draw.uniform(5, 60), draw.uniform(0.2, 0.7)
        noise = draw.choice((0.002, 0.01, 0.03))
        points = [(s, floor + scale * s**-exponent + draw.gauss(0, noise)) for s in range(250, 10_001, 250)]
        found = forecast(points, 20_000)
        assert found is not None
        held += found.low <= floor + scale * 20_000**-exponent <= found.high
    assert held >= 36


def test_bounds_widen_with_distance_and_noise() -> None:
    noisy = curve(2.5, 30, 0.4, noise=0.02)
    near, far = forecast(noisy, 10_500), forecast(noisy, 20_000)
    assert near is not None
    assert far is not None
    assert near.high - near.low < far.high - far.low
    calm = forecast(curve(2.5, 30, 0.4, noise=0.001), 20_000)
    assert calm is not None
    assert calm.high - calm.low < far.high - far.low


def test_nothing_is_said_past_twice_the_data() -> None:
    points = curve(2.5, 30, 0.4)
    assert forecast(points, FARTHEST * 10_000) is not None
    assert forecast(points, FARTHEST * 10_000 + 1) is None


def test_too_few_points_or_a_rising_curve_give_no_forecast() -> None:
    assert fit_power_law([(500.0, 5.5), (1000.0, 4.5)]) is None
    assert fit_power_law([(float(s), float(s)) for s in range(1, 20)]) is None


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(0, 20)), max_size=30), st.floats(1, 1e6))
def test_no_points_make_it_fail(points: Points, step: float) -> None:
    found = forecast(sorted(points), step)
    if found is not None:
        assert found.low <= found.loss <= found.high
        assert math.isfinite(found.high)


def test_a_perplexity_of_22_is_a_loss_of_3_1() -> None:
    assert perplexity(3.1) == pytest.approx(22.2, abs=0.05)


def test_chinchillas_own_run_has_the_loss_that_its_law_says() -> None:
    assert HOFFMANN.loss(70e9, 1.4e12) == pytest.approx(1.937, abs=0.002)


def test_run_b_is_expected_near_3_4_after_2_85_passes() -> None:
    found = expected_loss(40.56e6, 10.486e9, 3.68e9)
    assert 3.3 < found.low <= found.high < 3.5
    assert found.tokens_per_parameter == pytest.approx(258.5, abs=0.1)
    assert 3.68e9 < effective_tokens(10.486e9, 3.68e9) < 10.486e9


@given(st.floats(1e6, 1e12), st.floats(1e6, 1e12))
def test_repeated_tokens_are_worth_less_and_never_nothing(tokens: float, dataset: float) -> None:
    worth = effective_tokens(tokens, dataset)
    assert min(tokens, dataset) <= worth * (1 + 1e-9)
    assert worth <= tokens * (1 + 1e-9)
