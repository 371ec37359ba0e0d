"""The clock: signs and bounds that physics demands, whatever the constants."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oomph
from oomph.predict.clock import predict_times
from oomph.predict.gpu_kernels import BEST, LIKELY, WORST, KernelOptions, attention_seconds, flops_per_s, gemm_seconds
from oomph.step.ops import Kernel, Op, Phase, Section, Step

CARD = oomph.find_gpu("RTX 4070")
CONFIG = oomph.TrainConfig(dtype="bfloat16")
PLAIN = KernelOptions(allow_tf32=True, attention_slowdown=1.0, pads=False)
sizes = st.integers(1, 60000)


@given(st.tuples(st.integers(1, 8), sizes, sizes, sizes), st.sampled_from([BEST, LIKELY, WORST]))
def test_no_matrix_product_beats_the_full_rate(shape: tuple[int, int, int, int], assume: object) -> None:
    batch, m, n, k = shape
    seconds = gemm_seconds(shape, "bfloat16", CARD, PLAIN, assume)
    assert 2 * batch * m * n * k / seconds <= flops_per_s(CARD, "bfloat16", assume, True)


@pytest.mark.parametrize(
    ("slower", "faster"),
    [((1, 16384, 50257, 768), (1, 16384, 50304, 768)), ((1, 16384, 2016, 504), (1, 16384, 2048, 512))],
)
def test_an_unaligned_product_is_slower_than_its_larger_aligned_neighbour(
    slower: tuple[int, ...], faster: tuple[int, ...]
) -> None:
    padded = msgspec.structs.replace(PLAIN, pads=True)
    unaligned = any(extent % 8 for extent in slower[1:])
    slow, fast = (gemm_seconds(shape, "bfloat16", CARD, PLAIN, LIKELY) for shape in (slower, faster))
    work = [extent[1] * extent[2] * extent[3] for extent in (slower, faster)]
    assert slow / work[0] > fast / work[1]
    if unaligned:
        assert gemm_seconds(slower, "bfloat16", CARD, padded, LIKELY) < slow


def test_attention_reaches_a_smaller_share_of_a_faster_tensor_core() -> None:
    """Exponentials do not get faster with the tensor cores: FlashAttention-2 reaches about 35 % of an H100's peak."""
    flops = 4 * 64 * 16 * 12 * 1024 * 1025 // 2
    op = Op("sdpa", Phase.FORWARD, kernel=Kernel.ATTENTION, shape=(16, 12, 1024, 64), dtype="bfloat16", flops=flops)
    shares = []
    for name in ("RTX 4070", "A100 SXM4 80GB", "H100 SXM5 80GB"):
        card = oomph.find_gpu(name)
        shares.append(flops / attention_seconds(op, card, PLAIN, LIKELY) / 1e12 / (card.tflops_bf16 or 1))
    assert shares == sorted(shares, reverse=True)
    assert 0.2 < shares[2] < 0.45


def test_repeats_of_a_section_take_as_many_times_as_long() -> None:
    op = Op(
        "c_fc",
        Phase.FORWARD,
        kernel=Kernel.GEMM,
        shape=(1, 4096, 3072, 768),
        dtype="bfloat16",
        flops=2 * 4096 * 3072 * 768,
    )
    once = predict_times(Step((), (Section("micro-step", (op,)),)), CONFIG, CARD)
    often = predict_times(Step((), (Section("micro-steps", (op,), times=7),)), CONFIG, CARD)
    assert once is not None
    assert often is not None
    assert often.likely.step_s == pytest.approx(7 * once.likely.step_s)
    assert once.low.step_s <= once.likely.step_s <= once.high.step_s


def test_a_step_of_many_small_kernels_waits_for_the_host_and_less_when_compiled() -> None:
    tiny = Op("add", Phase.FORWARD, kernel=Kernel.POINTWISE, bytes_moved=1024)
    step = Step((), (Section("micro-step", (tiny,) * 1000),))
    eager = predict_times(step, msgspec.structs.replace(CONFIG, compile=False), CARD)
    compiled = predict_times(step, CONFIG, CARD)
    assert eager is not None
    assert compiled is not None
    assert eager.likely.step_s > compiled.likely.step_s > 0


def test_evaluation_is_not_part_of_the_step() -> None:
    copy = Op("copy", Phase.EVAL, kernel=Kernel.POINTWISE, bytes_moved=10**9)
    times = predict_times(Step((), (Section("evaluation", (copy,)),)), CONFIG, CARD)
    assert times is not None
    assert times.likely.step_s == 0
    assert times.likely.eval_batch_s > 0
