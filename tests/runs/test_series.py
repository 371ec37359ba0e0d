"""Series: exact totals, a bounded and fair sample."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from oomph.runs.run import HEAD, Series

losses = st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf)


@settings(deadline=None)
@given(st.lists(losses, max_size=400))
def test_totals_are_exact(values: list[float]) -> None:
    series = Series(("step", "loss"), kept=2 * HEAD)
    for step, loss in enumerate(values):
        series.append(step=step, loss=loss)
    finite = [value for value in values if math.isfinite(value)]
    total = series.totals["loss"]
    assert (series.count, total.count, total.non_finite) == (len(values), len(finite), len(values) - len(finite))
    if finite:
        assert (total.low, total.high, total.first, total.last) == (min(finite), max(finite), finite[0], finite[-1])
        assert math.isclose(total.sum, math.fsum(finite), rel_tol=1e-9, abs_tol=1e-3)
    bad = [step for step, value in enumerate(values) if not math.isfinite(value)]
    assert total.first_non_finite_key == (bad[0] if bad else None)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 20_000))
def test_the_sample_is_bounded_ordered_and_holds_the_ends(seen: int) -> None:
    series = Series(("step", "loss"), kept=256)
    for step in range(seen):
        series.append(step=step, loss=2 * step)
    kept = series.column("step")
    assert len(kept) <= 257
    assert kept == sorted(set(kept))
    assert kept[: min(HEAD, seen)] == [float(n) for n in range(min(HEAD, seen))]
    assert kept[-1] == seen - 1
    assert series.column("loss") == [2 * step for step in kept]


def test_few_rows_are_all_kept() -> None:
    series = Series(("step", "loss"))
    for step in range(3000):
        series.append(step=step, loss=1.0)
    assert series.column("step") == list(range(3000))


def test_a_regular_event_keeps_its_share_in_the_sample() -> None:
    series = Series(("step", "ms"), kept=1024)
    for step in range(200_000):
        series.append(step=step, ms=100.0 if step % 128 == 0 else 1.0)
    slow = sum(ms > 1 for ms in series.column("ms")[HEAD:])
    assert slow / len(series.column("ms")) < 4 / 128


def test_rows_may_have_different_columns() -> None:
    series = Series(("step", "loss", "ms"))
    series.append(step=0, loss=3.0)
    series.append(step=1, ms=5.0)
    series.append(step=2, loss=2.0, ms=6.0)
    assert series.curve("loss") == [(0, 3.0), (2, 2.0)]
    assert series.curve("ms") == [(1, 5.0), (2, 6.0)]
    assert (series.totals["loss"].count, series.totals["loss"].non_finite) == (2, 0)
