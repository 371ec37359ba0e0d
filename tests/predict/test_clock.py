"""The clock: signs and bounds that physics demands, whatever the constants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import oomph
from oomph.predict.clock import gemm_share, predict_times
from oomph.predict.cost import energy
from oomph.step.ops import Kernel, Op, Phase, Section, Step

CARD = oomph.find_gpu("RTX 4070")
sizes = st.integers(1, 60000)


@given(st.tuples(st.integers(1, 8), sizes, sizes, sizes), st.integers(1, 200))
def test_no_matrix_product_beats_the_full_rate(shape: tuple[int, int, int, int], sm_count: int) -> None:
    assert 0 < gemm_share(shape, sm_count, "bfloat16") <= 1


def test_a_vocabulary_of_50257_and_a_width_of_504_are_slower_than_their_aligned_neighbours() -> None:
    assert gemm_share((1, 16384, 50257, 768), 46, "bfloat16") < gemm_share((1, 16384, 50304, 768), 46, "bfloat16")
    assert gemm_share((1, 16384, 504, 42), 46, "bfloat16") < gemm_share((1, 16384, 512, 64), 46, "bfloat16")


def test_repeats_of_a_section_take_as_many_times_as_long() -> None:
    op = Op(
        "c_fc",
        Phase.FORWARD,
        kernel=Kernel.GEMM,
        shape=(1, 4096, 3072, 768),
        dtype="bfloat16",
        flops=2 * 4096 * 3072 * 768,
    )
    once = predict_times(Step((), (Section("micro-step", (op,)),)), CARD, compiled=True)
    often = predict_times(Step((), (Section("micro-steps", (op,), times=7),)), CARD, compiled=True)
    assert once is not None
    assert often is not None
    assert often.likely.step_s == pytest.approx(7 * once.likely.step_s)
    assert once.low.step_s <= once.likely.step_s <= once.high.step_s


def test_evaluation_is_not_part_of_the_step() -> None:
    copy = Op("copy", Phase.EVAL, kernel=Kernel.POINTWISE, bytes_moved=10**9)
    times = predict_times(Step((), (Section("evaluation", (copy,)),)), CARD, compiled=True)
    assert times is not None
    assert times.likely.step_s == 0
    assert times.likely.eval_batch_s > 0


def test_energy_is_watts_times_hours_and_money_is_energy_times_price() -> None:
    used = energy(200.0, 21.7, price_kwh=0.25, currency="EUR")
    assert used is not None
    assert used.watts == pytest.approx(180)
    assert used.kwh == pytest.approx(180 * 21.7 / 1000)
    assert used.cost == pytest.approx(used.kwh * 0.25)
    assert energy(None, 1.0) is None
