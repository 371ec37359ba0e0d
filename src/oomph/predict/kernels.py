"""Seconds of one operation on one device, from the shape of its work.

Three kinds of work: matrix products, which fill multiprocessors tile by tile and wave by wave; attention, which
alternates small products with exponentials; and everything else, which moves bytes. The constants below hold for
all cards; what differs between cards stands in the catalogue.
"""

from __future__ import annotations

import msgspec

from oomph.devices import RATES, Device
from oomph.step.ops import Kernel, Op, Phase


class Assumptions(msgspec.Struct, frozen=True):
    """What is not known exactly: one set for the best, the likely and the worst case."""

    geforce_ratio: float  # measured matrix-product rate over rated peak, for cards nobody has measured
    other_ratio: float
    measured: float  # where between the lowest (0) and the highest (1) measurement of the card itself
    bandwidth_share: float  # of the rated bandwidth that streaming kernels reach
    tile_latency_s: float  # filling and draining one tile: a load from memory, a store to it
    kernel_gap_s: float  # between the end of one kernel and the first work of the next
    softmax_ops: float  # floating-point operations for one attention score besides its products and exponential
    eager_host_s: float  # the host's work for one kernel, PyTorch's dispatch and autograd included
    compiled_host_s: float  # the same in a compiled graph
    cpu_ratio: float  # of the rate measured on this CPU with large square matrices


# Sources. Ratios: measured over rated in the catalogue (GeForce RTX 3080 1.08, 3090 1.07, 4090 1.03, 5070 1.05;
# A4000 0.84, A100 0.83, H100 0.81, L40S 0.72): GeForce boards run above their rated clock, the others against
# their power limit. Where the card itself was measured, published figures are the best of many sizes in a short
# run; a day of training holds the lowest of them. Bandwidth: copy kernels reach 0.86 to 0.93 of the rated figure on
# GDDR6X and HBM alike. Tile latency: one trip to device memory takes 0.5 to 0.7 µs on Volta to Hopper (Jia et al.,
# arXiv 1804.06826; Luo et al., arXiv 2402.13499), and a tile makes two. Softmax: scale, subtract, maximum, sum,
# rescale, convert. Host: eager PyTorch spends about 10 µs on an operator (PyTorch's CUDA-graphs post, 2021), and a
# training step under autocast and autograd runs two or three operators for one kernel.
BEST = Assumptions(1.08, 0.86, 1.0, 0.94, 1.0e-6, 1.0e-6, 6, 10e-6, 4e-6, 1.0)
LIKELY = Assumptions(1.05, 0.80, 0.0, 0.90, 1.5e-6, 1.5e-6, 8, 20e-6, 7e-6, 0.9)
WORST = Assumptions(0.92, 0.65, -0.5, 0.80, 3.0e-6, 3.0e-6, 12, 35e-6, 12e-6, 0.7)
MEASURED_SPREAD = 0.1  # of a card measured only once, taken as the width of the range

# Output tiles that cuBLAS and CUTLASS choose among, and the share of the full rate a multiprocessor reaches on one:
# smaller tiles load more bytes for each product (NVIDIA, "Matrix Multiplication Background User's Guide").
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.97), (128, 64, 0.85), (64, 64, 0.70))
SPLITS = (1, 2, 4, 8, 16)  # how many multiprocessors may share the inner dimension of one tile
ALIGNED = 8  # elements: 16 bytes of half precision; below that, loads are not vectorised
UNALIGNED_SHARE = 0.6
EXPONENTIALS_PER_CLOCK = 16  # a multiprocessor's special-function units, Volta to Blackwell (CUDA programming guide)
BACKWARD_SOFTMAX = 2.0  # the backward recomputes the scores and forms their gradient: twice the pointwise work
EFFICIENT_SLOWDOWN = 1.7  # memory-efficient attention against flash (PyTorch blog on nanoGPT, March 2023: A100)
FALLBACK_ATTENTION_SHARE = 0.5  # of the products' rate, on devices whose clocks and lanes are not known


class Program(msgspec.Struct, frozen=True):
    """What the program decides about its kernels."""

    allow_tf32: bool  # float32 products on tensor cores
    efficient: bool  # the memory-efficient attention kernel instead of flash
    pads: bool  # the compiler pads matrices to aligned extents


def op_seconds(op: Op, device: Device, program: Program, assume: Assumptions) -> float:
    """Device time of one operation."""
    if op.kernel is Kernel.NONE:
        return 0.0
    seconds = op.bytes_moved / bytes_per_s(device, assume)
    if op.kernel is Kernel.GEMM and op.flops:
        seconds = max(seconds, gemm_seconds(op.shape, op.dtype, device, program, assume))
    elif op.kernel is Kernel.ATTENTION and op.flops:
        slower = EFFICIENT_SLOWDOWN if program.efficient else 1.0
        seconds = max(seconds, slower * attention_seconds(op, device, program, assume))
    return seconds if device.kind == "cpu" else seconds + assume.kernel_gap_s


def bytes_per_s(device: Device, assume: Assumptions) -> float:
    """The memory bandwidth that kernels reach. A CPU's was measured, so it needs no share."""
    share = 1.0 if device.kind == "cpu" else assume.bandwidth_share
    return (device.bandwidth_gbs or 0.0) * 1e9 * share


def flops_per_s(device: Device, dtype: str, assume: Assumptions, allow_tf32: bool) -> float:
    """The rate of large matrix products in this precision."""
    peak = (device.peak_tflops(dtype, allow_tf32) or device.tflops_fp32 or 0.0) * 1e12
    if device.kind == "cpu":
        return peak * assume.cpu_ratio
    if device.gemm_tflops_low and device.gemm_tflops_high and device.tflops_fp16:
        low = device.gemm_tflops_low
        spread = max(device.gemm_tflops_high - low, MEASURED_SPREAD * low)
        return peak * (low + spread * assume.measured) / device.tflops_fp16
    return peak * (assume.geforce_ratio if device.name.startswith("GeForce") else assume.other_ratio)


def gemm_seconds(shape: tuple[int, ...], dtype: str, device: Device, program: Program, assume: Assumptions) -> float:
    """A matrix product: whole tiles in whole waves over the multiprocessors, in the best of the shapes on offer."""
    batch, m, n, k = shape
    rate = flops_per_s(device, dtype, assume, program.allow_tf32)
    if device.kind == "cpu" or device.sm_count is None:
        return 2 * batch * m * n * k / rate
    if dtype != "float32" and not program.pads and any(extent % ALIGNED for extent in (m, n, k)):
        rate *= UNALIGNED_SHARE
    sm_count, best = device.sm_count, float("inf")
    for rows, columns, share in TILES:
        tiles = batch * -(-m // rows) * -(-n // columns)
        for split in SPLITS:
            if split > 1 and tiles * split > 4 * sm_count:
                break  # enough tiles to fill the card: splitting only adds work
            waves = -(-tiles * split // sm_count)
            tile_s = 2 * rows * columns * -(-k // split) * sm_count / (rate * share) + assume.tile_latency_s
            merge_s = (
                8 * split * batch * m * n / bytes_per_s(device, assume) if split > 1 else 0.0
            )  # float32, out and in
            best = min(best, waves * tile_s + merge_s)
    return best


def attention_seconds(op: Op, device: Device, program: Program, assume: Assumptions) -> float:
    """Fused attention: for each score, its share of the products, then an exponential and some arithmetic."""
    lanes = RATES.get(device.rate_class or "")
    if lanes is None or not device.sm_count or not device.boost_mhz or device.kind == "cpu":
        return op.flops / (flops_per_s(device, op.dtype, assume, program.allow_tf32) * FALLBACK_ATTENTION_SHARE)
    batch, heads, tokens, _ = op.shape
    scores = batch * heads * tokens * (tokens + 1) / 2
    product_s = op.flops / flops_per_s(device, op.dtype, assume, program.allow_tf32)
    clocks = 1 / EXPONENTIALS_PER_CLOCK + assume.softmax_ops / lanes.fp32
    if op.phase is Phase.BACKWARD:
        clocks *= BACKWARD_SOFTMAX
    return product_s + scores * clocks / (device.sm_count * device.boost_mhz * 1e6)
