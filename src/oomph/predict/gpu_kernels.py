"""Seconds of one operation on a GPU, from the shape of its work.

Three kinds of work: matrix products, which fill multiprocessors tile by tile and wave by wave; attention, which
alternates small products with exponentials; and everything else, which moves bytes. The constants below hold for
all cards; what differs between cards is in the catalogue.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from oomph.devices import RATES, Device
from oomph.predict.cpu_kernels import KEPT_BYTES, cpu_op_seconds
from oomph.step.ops import COLLECTIVES, Kernel, Op, Phase


class Assumptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is not known exactly: one set each for the best, the likely and the worst case."""

    geforce_ratio: float  # measured matrix-product rate over rated peak, for unmeasured cards
    other_ratio: float  # the same for boards at their power limit, and GeForce boards with little power
    starved_ratio: float  # the same for other boards with little power
    measured: float  # position between the lowest (0) and the highest (1) measurement of the card itself
    limited: float  # the same for a board at its power limit
    throttling: float  # share of the rate that a board at its power limit loses in a hot case
    bandwidth_share: float  # share of the rated bandwidth that streaming kernels reach
    in_flight_bytes: float  # bytes that a multiprocessor's loads keep in flight
    tile_latency_s: float  # filling and draining one tile: a load from memory, a store to it
    kernel_gap_s: float  # between the end of one kernel and the first work of the next
    softmax_ops: float  # floating-point operations for one attention score besides its products and exponential
    eager_host_s: float  # the host's work for one kernel, PyTorch's dispatch and autograd included
    compiled_host_s: float  # the same in a compiled graph
    sample_host_s: float  # the host's work to cut one row of tokens out of the data, in nanoGPT's get_batch
    cpu_ratio: float  # of the rates measured on this CPU, by the median run


# Sources. Ratios: measured over rated in the catalogue (GeForce RTX 3080 1.08, 3080 Ti 1.11 to 1.15, 4070 SUPER 1.02 to
# 1.07, 5070 1.0 to 1.09; A4000 0.84, A100 0.83, H100 0.81, L40S 0.72): GeForce boards run above their rated clock (1.05
# on average of those measured), the others against their power limit; with little power (STARVED_WATTS) they hold 0.38
# to 0.66 (T4, A10, L4, A100 PCIe 40GB; L40S, RTX 6000 Ada, L40 as the catalogue derives it). Where the card itself was
# measured, published figures are the best of many sizes in a short run; a board at its power limit holds the lowest
# of them through a day of training. Throttling: boards of one kind differ by as much between machines (L4 53 to 91
# TFLOPS, T4 25 to 43). Bandwidth: copy kernels reach 0.86 to 0.93 of the rated figure on GDDR6X and HBM alike; but
# bytes in flight are bandwidth times latency, and a multiprocessor holds only so many: 32 KiB of plain loads reach 6.6
# of a B200's 8 TB/s (SemiAnalysis, "Dissecting Nvidia Blackwell", 2026); code from torch.compile holds fewer and
# reaches 2.0 to 2.7 of an H100's 3.35 (QuACK, 2025; PyTorch, "SOTA Normalization Performance with torch.compile").
# Tile latency: one trip to device memory takes 0.5 to 0.8 µs on Volta to Hopper (Jia et al., arXiv 1804.06826; Luo et
# al., arXiv 2402.13499), and a tile makes two, which a second tile on the same multiprocessor may hide: of 0.5 to 1.5
# µs the shorter fits products of 2048 to 8192 on 13 cards a little better (docs/accuracy.md). Softmax: scale,
# subtract, maximum, sum, rescale, convert. Host: an eager operator takes at least 10 µs (PyTorch's CUDA-graphs post,
# 2021). Qwen's table of fine-tuning has 125, 150 and 200 ms for micro-steps of 6,400, 8,500 and 10,600 kernels, at 256
# tokens: 18 to 20 µs each on one A100's host (torch 2.0, LoRA under autocast); a small model took 18 ms for 300 (A800,
# torch 2.0), or 40 ms for 200 (nanoGPT pull request 392, a slow host). Turning a slice of a
# numpy.memmap into a tensor takes 15 to 60 µs.
BEST = Assumptions(
    geforce_ratio=1.15,
    other_ratio=0.86,
    starved_ratio=0.76,
    measured=1.0,
    limited=1.0,
    throttling=0.0,
    bandwidth_share=0.94,
    in_flight_bytes=28e3,
    tile_latency_s=0.5e-6,
    kernel_gap_s=1.0e-6,
    softmax_ops=6,
    eager_host_s=15e-6,
    compiled_host_s=4e-6,
    sample_host_s=10e-6,
    cpu_ratio=1.1,
)
LIKELY = Assumptions(
    geforce_ratio=1.05,
    other_ratio=0.80,
    starved_ratio=0.52,
    measured=0.5,
    limited=0.0,
    throttling=0.0,
    bandwidth_share=0.90,
    in_flight_bytes=20e3,
    tile_latency_s=1.0e-6,
    kernel_gap_s=1.5e-6,
    softmax_ops=8,
    eager_host_s=20e-6,
    compiled_host_s=10e-6,
    sample_host_s=20e-6,
    cpu_ratio=1.0,
)
WORST = Assumptions(
    geforce_ratio=0.92,
    other_ratio=0.65,
    starved_ratio=0.30,
    measured=-0.5,
    limited=-0.5,
    throttling=0.35,
    bandwidth_share=0.80,
    in_flight_bytes=14e3,
    tile_latency_s=3.0e-6,
    kernel_gap_s=3.0e-6,
    softmax_ops=12,
    eager_host_s=150e-6,
    compiled_host_s=20e-6,
    sample_host_s=60e-6,
    cpu_ratio=0.7,
)
# The first releases of torch.compile launched each kernel through layers of Python. Steps of small models took 80 to
# 160 µs per kernel on any card: 22 ms for 160 (nanoGPT pull request 392), 22 and 40 ms for 250 (issue 178, request
# 225; one of them slower compiled than another machine was eager). Two of these are rows of docs/accuracy.md.
EARLY_COMPILED = 10.0
MEASURED_SPREAD = 0.1  # width of the range assumed for a card measured only once
POWER_LIMITED = 0.9  # a board that never exceeds this share of its rated peak in large products is at its power limit
# Watts of board power per multiprocessor, up to which it cannot hold its clock in matrix products: boards that can have
# at least 2.8 (A100 PCIe 80GB, A6000 3.6, RTX 4090 3.5), those that vary with their cooling 1.2 to 2.5 (L4, T4, A10,
# L40S).
STARVED_WATTS = 2.5
# Share of the rated peak that float32 products without tensor cores reach, by lanes per multiprocessor: less where
# 128 share issue slots with integers (torch.matmul: A100 18 to 19 of 19.5, V100 14 of 15.7; 3090 24 of 35.6, 4090 46 to
# 56 of 82.6, RTX PRO 6000 79 of 126; github.com/zzc0721/torch-performance-test-data).
PLAIN_FP32 = {64: 0.9, 128: 0.65}
MEMORY_LATENCY_S = 0.75e-6  # a load from device memory under traffic; sources as for tiles
ECC_SHARE = 15 / 16  # share of GDDR memory's capacity and traffic left by inline error correction

# Output tiles that cuBLAS and CUTLASS choose among, and the share of the full rate a multiprocessor reaches on one:
# smaller tiles load more bytes for each product (NVIDIA, "Matrix Multiplication Background User's Guide"). Products of
# 2048 to 8192 on 13 cards show no loss at 128 × 128 (docs/accuracy.md); the shares of smaller ones are assumed.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 1.0), (128, 64, 0.85), (64, 64, 0.70))
SPLITS = (1, 2, 4, 8, 16)  # how many multiprocessors may share the inner dimension of one tile
# Share of the full rate if rows begin at even addresses that are not multiples of 16 bytes: assumed, between the odd
# extents below and the full rate (an RTX 4090 runs odd ones at 0.7, pytorch issue 181718, an A100 ran them at 0.3).
UNALIGNED_SHARE = 0.6
# Share of the full rate if an extent is odd, so that loads are two bytes wide. The PyTorch blog on nanoGPT (March 2023)
# took 113 ms with a vocabulary of 50257 and 87 with 50304: the head's three products went from 11 to 37 ms.
ODD_SHARE = 0.3
UNCOMPILED = "loss.chunk_"  # products that the chunked loss calls from Python, never compiled
INTEGERS_PER_CLOCK = 64  # 32-bit multiplications and selections of a multiprocessor, Volta to Hopper (the same guide)
EXPONENTIALS_PER_CLOCK = 16  # a multiprocessor's special-function units, Volta to Blackwell (CUDA programming guide)
BACKWARD_SOFTMAX = 2.0  # the backward recomputes the scores and forms their gradient: twice the pointwise work
# FlashAttention-2 is written with Ampere's instructions. A Hopper multiprocessor runs those at 63 % of its full rate
# (Luo et al., arXiv 2402.13499), and nothing suggests more for its successor.
AMPERE_PRODUCTS_PER_CLOCK = 1290
EFFICIENT_SLOWDOWN = 1.7  # memory-efficient attention against flash (PyTorch blog on nanoGPT, March 2023: A100)
FLASH_1_SLOWDOWN = 2.0  # FlashAttention against FlashAttention-2 (Dao, arXiv 2307.08691)
FALLBACK_ATTENTION_SHARE = 0.5  # share of the products' rate, on devices whose clocks and lanes are unknown


BESIDE = COLLECTIVES | {Kernel.WAIT, Kernel.NONE}  # operations that take no device time of their own


class KernelOptions(msgspec.Struct, frozen=True):
    """What the training program and the version of torch determine about kernels."""

    allow_tf32: bool  # float32 products on tensor cores
    attention_slowdown: float  # of the attention kernel in use, relative to FlashAttention-2
    pads: bool  # the compiler pads matrices to aligned extents
    kept_bytes: int = KEPT_BYTES  # on a CPU: larger buffers are made of new pages
    rows: int = 0  # tokens of a micro-batch


def op_seconds(op: Op, device: Device, options: KernelOptions, assume: Assumptions) -> float:
    """Seconds of one operation on the device."""
    if op.kernel in BESIDE:
        return 0.0
    if device.cpu_rates is not None:
        rate = flops_per_s(device, op.dtype, assume, options.allow_tf32)
        return cpu_op_seconds(op, device.cpu_rates, rate, options.kept_bytes) / assume.cpu_ratio
    seconds = op.bytes_moved / bytes_per_s(device, assume)
    if op.kernel is Kernel.GEMM and op.flops:
        own = replace(options, pads=False) if options.pads and op.name.startswith(UNCOMPILED) else options
        seconds = max(seconds, gemm_seconds(op.shape, op.dtype, device, own, assume))
    elif op.kernel is Kernel.ATTENTION and op.flops:
        seconds = max(seconds, options.attention_slowdown * attention_seconds(op, device, options, assume))
    elif op.kernel is Kernel.INTEGER and device.sm_count and device.boost_mhz:
        count, instructions = op.shape
        seconds = max(
            seconds, count * instructions / (device.sm_count * INTEGERS_PER_CLOCK * _clock_hz(device, assume))
        )
    return seconds if device.kind == "cpu" else seconds + assume.kernel_gap_s


def _clock_hz(device: Device, assume: Assumptions) -> float:
    """The sustained clock: a power limit lowers it for all units."""
    return (device.boost_mhz or 0) * 1e6 * min(1.0, half_ratio(device, assume))


def bytes_per_s(device: Device, assume: Assumptions) -> float:
    """Bytes per second that kernels reach: limited by the memory, or by the loads that multiprocessors keep in flight.

    A CPU's measured rate is used as it is.
    """
    rated = (device.bandwidth_gbs or 0.0) * 1e9
    if device.kind == "cpu":
        return rated
    given = rated * assume.bandwidth_share * (ECC_SHARE if has_inline_ecc(device) else 1.0)
    if device.sm_count is None or device.kind != "cuda":
        return given
    asked = device.sm_count * assume.in_flight_bytes / MEMORY_LATENCY_S
    return float((given**-3 + asked**-3) ** (-1 / 3))  # near the knee neither limit is reached


def has_inline_ecc(device: Device) -> bool:
    """Whether ECC check bits take a sixteenth of the memory: 23034 MiB of 24 GiB. HBM stores them separately."""
    nominal_gib = max(1, round(device.memory_mib / 1024 / ECC_SHARE / 8)) * 8
    return device.kind == "cuda" and abs(device.memory_mib / (nominal_gib * 1024 * ECC_SHARE) - 1) < 0.003


def flops_per_s(device: Device, dtype: str, assume: Assumptions, allow_tf32: bool) -> float:
    """FLOPs per second of large matrix products in this precision."""
    peak = (device.peak_tflops(dtype, allow_tf32) or device.tflops_fp32 or 0.0) * 1e12
    if device.kind == "cpu":
        return peak
    spread = 1 + MEASURED_SPREAD * (assume.measured - LIKELY.measured)
    if dtype == "bfloat16" and device.bf16_emulated_tflops is not None:
        return peak * spread  # `peak` is itself a measurement
    lanes = RATES.get(device.rate_class or "")
    if lanes is not None and is_plain(dtype, device, allow_tf32):
        held = assume.starved_ratio / assume.other_ratio if is_starved(device) else 1.0  # as with tensor cores
        return peak * PLAIN_FP32[lanes.fp32] * held * spread
    return peak * half_ratio(device, assume)


def is_plain(dtype: str, device: Device, allow_tf32: bool) -> bool:
    """Whether products run without tensor cores: float32 if tf32 is off, or the card has none."""
    lanes = RATES.get(device.rate_class or "")
    return dtype in ("float32", "tf32") and not (allow_tf32 and lanes is not None and lanes.tf32)


def half_ratio(device: Device, assume: Assumptions) -> float:
    """The share of the rated tensor-core peak that large products sustain."""
    starved = is_starved(device)
    if not (device.gemm_tflops_low and device.gemm_tflops_high and device.tflops_fp16):
        if device.name.startswith("GeForce"):
            return assume.other_ratio if starved else assume.geforce_ratio
        return assume.starved_ratio if starved else assume.other_ratio
    low, high = device.gemm_tflops_low / device.tflops_fp16, device.gemm_tflops_high / device.tflops_fp16
    if high < (1 + MEASURED_SPREAD) * low:  # measured once: it may be a high or a low one
        middle = (low + high) / 2
        low, high = middle * (1 - MEASURED_SPREAD / 2), middle * (1 + MEASURED_SPREAD / 2)
    if high < POWER_LIMITED or starved:
        return (low + (high - low) * assume.limited) * (1 - assume.throttling)
    return low + (high - low) * assume.measured


def is_starved(device: Device) -> bool:
    """Whether the board has too little power for its multiprocessors to hold their clock in matrix products."""
    if device.kind != "cuda" or device.watts is None or not device.sm_count:
        return False
    return device.watts / device.sm_count <= STARVED_WATTS


def gemm_seconds(
    shape: tuple[int, ...], dtype: str, device: Device, options: KernelOptions, assume: Assumptions
) -> float:
    """Seconds of a matrix product: whole tiles in whole waves over the multiprocessors, in the best tile shape."""
    batch, m, n, k = shape
    rate = flops_per_s(device, dtype, assume, options.allow_tf32)
    if device.kind == "cpu" or device.sm_count is None:
        return 2 * batch * m * n * k / rate
    if not options.pads and not is_plain(dtype, device, options.allow_tf32):
        # Tokens are rows of activations. What has to be aligned is where a row begins, so not their number (cuBLAS's
        # documentation, "Tensor Core Usage"); scores, whose rows are tokens long, are batched products.
        extents = [extent for extent in (m, n, k) if batch > 1 or extent != options.rows]
        rate *= alignment_share(*extents, aligned=4 if dtype in ("float32", "tf32") else 8)
    sm_count, best, moved_per_s = device.sm_count, float("inf"), bytes_per_s(device, assume)
    for rows, columns, share in TILES:
        tiles = batch * -(-m // rows) * -(-n // columns)
        for split in SPLITS:
            if split > 1 and tiles * split > 4 * sm_count:
                break  # enough tiles to fill the card: splitting only adds work
            waves = -(-tiles * split // sm_count)
            tile_s = 2 * rows * columns * -(-k // split) * sm_count / (rate * share) + assume.tile_latency_s
            merge_s = 8 * split * batch * m * n / moved_per_s if split > 1 else 0.0  # float32, written and read
            best = min(best, waves * tile_s + merge_s)
    return best


def alignment_share(*extents: int, aligned: int = 8) -> float:
    """The share of the full rate that products of these extents reach. `aligned`: elements in 16 bytes."""
    if any(extent % 2 for extent in extents):
        return ODD_SHARE
    return UNALIGNED_SHARE if any(extent % aligned for extent in extents) else 1.0


def attention_seconds(op: Op, device: Device, options: KernelOptions, assume: Assumptions) -> float:
    """Seconds of fused attention: each score's share of the products, then an exponential and some arithmetic."""
    lanes = RATES.get(device.rate_class or "")
    if lanes is None or not device.sm_count or not device.boost_mhz or device.kind == "cpu":
        return op.flops / (flops_per_s(device, op.dtype, assume, options.allow_tf32) * FALLBACK_ATTENTION_SHARE)
    batch, heads, tokens, size = op.shape
    products = 10 if op.phase is Phase.BACKWARD else 4  # FLOPs per score and element of a head
    scores = max(batch * heads * tokens * (tokens + 1) / 2, op.flops / (products * size))  # more without a causal mask
    share = min(1.0, AMPERE_PRODUCTS_PER_CLOCK / lanes.half) if lanes.half else 1.0
    product_s = op.flops / (flops_per_s(device, op.dtype, assume, options.allow_tf32) * share)
    clocks = 1 / EXPONENTIALS_PER_CLOCK + assume.softmax_ops / lanes.fp32
    if op.phase is Phase.BACKWARD:
        clocks *= BACKWARD_SOFTMAX
    return product_s + scores * clocks / (device.sm_count * _clock_hz(device, assume))
