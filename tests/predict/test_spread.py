"""How sure a plan's memory is: the interval, the probability that a run fits, and what they are held against."""

from __future__ import annotations

import csv
import itertools
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oomph
from oomph.config import from_dict
from oomph.devices import custom
from oomph.predict.spread import COMPILED, COMPILED_OTHERS, EAGER, UNVERIFIED, Likely, spread_of

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sizes = st.floats(1.0, 1e6)
SPREADS = st.sampled_from([COMPILED, COMPILED_OTHERS, EAGER, UNVERIFIED])


@st.composite
def predictions(draw: st.DrawFn) -> Likely:
    allocated = draw(sizes)
    return Likely(draw(st.floats(0, 2000)), allocated, allocated + draw(st.floats(0, 1e5)), draw(SPREADS))


@given(predictions())
def test_an_interval_contains_the_prediction(likely: Likely) -> None:
    total = likely.context_mib + likely.reserved_mib
    assert 0 <= likely.low_mib <= total <= likely.high_mib


@given(predictions(), st.lists(st.tuples(st.floats(1, 2e6), st.booleans()), min_size=2, max_size=8))
def test_a_probability_rises_with_capacity(likely: Likely, cases: list[tuple[float, bool]]) -> None:
    edge = min((capacity for capacity, fits in cases if fits), default=float("inf"))
    p = [likely.p_fits(capacity, capacity >= edge) for capacity, _ in sorted(cases)]
    assert all(0 <= each <= 1 for each in p)
    assert all(before <= after for before, after in itertools.pairwise(p))


@given(predictions(), st.floats(1, 2e6), st.booleans())
def test_a_probability_is_on_the_verdicts_side(likely: Likely, capacity: float, fits: bool) -> None:
    p = likely.p_fits(capacity, fits)
    assert p >= 0.5 if fits else p <= 0.5


@given(predictions())
def test_far_from_the_need_nothing_is_in_doubt(likely: Likely) -> None:
    width = likely.high_mib - likely.low_mib + likely.reserved_mib - likely.allocated_mib
    assert likely.p_fits(likely.high_mib + width, True) > 0.97
    assert likely.p_fits(likely.low_mib - width, False) < 0.03


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["nanogpt", "oomph", "hf", "torch"]),
    st.booleans(),
    st.integers(1, 16),
    st.lists(st.integers(1000, 40_000), min_size=2, max_size=5),
)
def test_plans_are_surer_on_larger_cards(trainer: str, compiled: bool, batch: int, cards: list[int]) -> None:
    config: dict[str, Any] = {
        "trainer": trainer, "n_layer": 4, "batch_size": batch, "gradient_accumulation_steps": 1, "block_size": 256,
        "compile": compiled and trainer in ("nanogpt", "oomph"),
    }  # fmt: skip
    p = []
    for mib in sorted(cards):
        memory = oomph.plan(config, custom(mib=mib)).memory
        assert memory.low_mib <= memory.total_mib <= memory.high_mib
        assert memory.p_fits is not None and 0 <= memory.p_fits <= 1
        assert (memory.p_fits >= 0.5) == memory.fits or memory.p_fits == 0.5
        p.append(memory.p_fits)
    assert p == sorted(p)


def test_the_spread_follows_what_is_known() -> None:
    def of(device_kind: str = "cuda", source: str = "described", **keys: Any) -> Any:
        return spread_of(from_dict(keys).config, device_kind, source)

    assert of() == COMPILED
    assert of(compile=False) == EAGER
    assert of(compile=False, source="traced") == EAGER
    assert of(source="a compiled trace") == COMPILED_OTHERS
    assert of(trainer="hf", compile=True) == COMPILED_OTHERS
    assert of(trainer="oomph") == COMPILED_OTHERS
    assert of(trainer="nanochat") == COMPILED_OTHERS
    assert of(device_kind="rocm") == UNVERIFIED
    assert of(trainer="hf", transformers_version="4.30") == UNVERIFIED


# --- the published rows -------------------------------------------------------------------------------------------


def outcomes(**columns: str) -> list[Any]:
    """Memory's rows of the same program, with their predictions: those with these values."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import accuracy
    finally:
        sys.path.remove(str(BENCHMARKS))
    rows = [row for row in accuracy.rows_of(*accuracy.MEMORY) if columns.items() <= row.items()]
    return [each for each in accuracy.outcomes(rows) if each.counts]


@pytest.fixture(scope="module")
def published() -> list[Any]:
    return outcomes()


@pytest.mark.slow
def test_95_of_100_published_rows_lie_inside(published: list[Any]) -> None:
    assert len(published) >= 40
    assert sum(each.inside for each in published) >= 0.95 * len(published)


@pytest.mark.slow
def test_an_interval_says_something(published: list[Any]) -> None:
    assert median((each.high - each.low) / each.predicted for each in published) <= 0.10


@pytest.mark.slow
def test_rows_of_tier_a_are_predicted_well(published: list[Any]) -> None:
    errors = [abs(each.error) for each in published if each.row["tier"] == "A"]
    assert median(errors) <= 0.03
    assert max(errors) <= 0.10


def test_nanogpts_rows_are_predicted_as_well_as_ever() -> None:
    errors = [abs(each.error) for each in outcomes(**{"class": "nanoGPT"})]
    assert len(errors) == 29
    assert median(errors) < 0.0025
    assert max(errors) < 0.011


def test_every_row_has_its_source() -> None:
    with (BENCHMARKS / "published.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(row["source"] and row["tier"] in "ABC" and row["program"] in ("same", "near") for row in rows)
