"""The CPU's clock: what its operations wait for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import oomph
from oomph.devices.cpu_rates import CpuRates, attention_scores
from oomph.predict.cpu_kernels import KEPT_BYTES, OOMPH_KEPT_BYTES, cpu_op_seconds, stream_gbs
from oomph.step import build as steps
from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase

RATES = CpuRates(
    tflops_fp32=0.09,
    tflops_bf16=0.02,
    copy_gbs=20.0,
    cached_gbs=55.0,
    math_gbs=9.0,
    page_s_per_byte=6e-10,
    dispatch_s=1.2e-5,
    score_s=1.8e-9,
    long_score_s=0.8e-9,
    random_s=7e-9,
)
RATE = RATES.tflops_fp32 * 1e12


def moving(name: str, moved_bytes: int, new_bytes: int = 0) -> Op:
    made = (Buffer(name, new_bytes, Kind.ACTIVATIONS),) if new_bytes else ()
    return Op(name, Phase.FORWARD, allocates=made, kernel=Kernel.POINTWISE, bytes_moved=moved_bytes)


@given(st.integers(0, 2**40))
def test_bytes_move_no_faster_than_in_the_caches_and_no_slower_than_in_memory(moved_bytes: int) -> None:
    assert RATES.copy_gbs <= stream_gbs(moved_bytes, RATES) <= RATES.cached_gbs
    assert stream_gbs(moved_bytes, RATES) >= stream_gbs(moved_bytes + 2**20, RATES)


def test_an_activation_with_an_error_function_takes_longer_than_an_addition_of_as_many_bytes() -> None:
    add, gelu = (cpu_op_seconds(moving(name, 2**24), RATES, RATE) for name in ("h.0.add", "h.0.mlp.gelu"))
    assert gelu > 2 * add


def test_a_large_new_tensor_is_paid_for_page_by_page_and_a_small_one_is_not() -> None:
    size = OOMPH_KEPT_BYTES
    kept = cpu_op_seconds(moving("add", 2**20, size), RATES, RATE, KEPT_BYTES)
    returned = cpu_op_seconds(moving("add", 2**20, size), RATES, RATE, OOMPH_KEPT_BYTES)
    assert returned - kept == pytest.approx(size * RATES.page_s_per_byte)


def test_what_is_written_without_being_read_is_read_first() -> None:
    in_place, anew = (cpu_op_seconds(moving("add", 2**20, size), RATES, RATE) for size in (0, 2**20))
    assert anew - in_place == pytest.approx(2**20 / (RATES.cached_gbs * 1e9))


def test_random_numbers_take_longer_than_the_bytes_they_fill() -> None:
    mask, noise = (cpu_op_seconds(moving(name, 2**20, 2**20), RATES, RATE) for name in ("drop.out", "drop.noise"))
    assert noise - mask == pytest.approx(2**18 * RATES.random_s)


def test_a_product_packs_its_operands_besides() -> None:
    flops = 2 * 64**3
    product = Op("mm", Phase.FORWARD, kernel=Kernel.GEMM, shape=(1, 64, 64, 64), flops=flops, bytes_moved=2**20)
    bare = Op("mm", Phase.FORWARD, kernel=Kernel.GEMM, shape=(1, 64, 64, 64), flops=flops)
    packing_s = cpu_op_seconds(product, RATES, RATE) - cpu_op_seconds(bare, RATES, RATE)
    assert packing_s == pytest.approx(2**20 / (RATES.copy_gbs * 1e9))


def test_an_operation_on_nothing_still_takes_its_dispatch() -> None:
    assert cpu_op_seconds(moving("add", 0), RATES, RATE) == RATES.dispatch_s


@given(st.integers(1, 5000))
def test_attention_computes_at_least_the_causal_scores_and_at_most_all(tokens: int) -> None:
    assert tokens * (tokens + 1) / 2 <= attention_scores(tokens) <= tokens**2


def test_attention_backward_takes_longer_than_forward() -> None:
    flops = 4 * 32 * 16 * 64 * 65 // 2
    shape = (4, 4, 64, 32)
    forward, backward = (
        cpu_op_seconds(Op("sdpa", phase, kernel=Kernel.ATTENTION, shape=shape, flops=count), RATES, RATE)
        for phase, count in ((Phase.FORWARD, flops), (Phase.BACKWARD, flops * 5 // 2))
    )
    assert 2 * forward < backward < 4 * forward


def test_the_backward_of_gelu_waits_for_arithmetic_too() -> None:
    config = oomph.plan({"n_layer": 1, "n_head": 1, "n_embd": 64, "trainer": "oomph", "compile": False}).config
    step = steps.build(config, cuda=False, first=False)
    names = {op.name for section in step.sections for op in section.ops if op.phase is Phase.BACKWARD}
    assert [name for name in names if name.endswith("mlp.gelu.dx")]
