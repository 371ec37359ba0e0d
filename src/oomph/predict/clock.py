"""Seconds: a roofline over the operations of a step.

An operation takes the longer of its arithmetic at the rate the device reaches for its shape and its bytes at the
bandwidth the device reaches; never less than what launching it costs. A first, coarse version: one set of
constants for all cards, with wide bounds.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from oomph.step.ops import Kernel, Op, Phase, Step

# Measured matrix-product rate over rated peak, where no measurement of the card itself is known. Boards with a
# power limit far above need run above their rated clock (RTX 3080 1.08, 3090 1.07, 4090 1.03, 5070 1.05);
# workstation and data-centre boards are held back by theirs (A4000 0.84, A100 0.83, H100 0.81, L40S 0.72).
GEFORCE_RATIO = (0.95, 1.04, 1.08)  # low, likely, high
OTHER_RATIO = (0.70, 0.80, 0.86)
CPU_RATIO = (0.70, 0.90, 1.0)  # of the rate measured on the machine itself, with large square matrices

# Share of the rated memory bandwidth that streaming kernels reach.
BANDWIDTH_SHARE = (0.72, 0.82, 0.92)

# Attention kernels against plain matrix products: FlashAttention-2 (arXiv 2307.08691, figures 5 and 6) reaches about
# 0.5 to 0.7 of an A100's peak going forward and 0.4 to 0.6 going back, where cuBLAS reaches 0.8.
ATTENTION_SHARE = (0.45, 0.60, 0.75)

# Seconds between two kernel launches from Python, and from a compiled graph.
EAGER_LAUNCH_S = (15e-6, 8e-6, 5e-6)
COMPILED_LAUNCH_S = (8e-6, 4e-6, 2.5e-6)

# Output tiles that cuBLAS and CUTLASS choose among, and the share of the full rate a tile of that size reaches
# (NVIDIA, "Matrix Multiplication Background User's Guide", sections 3 and 4: tiles and waves).
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.96), (128, 64, 0.85), (64, 64, 0.70))
ALIGNED = 8  # elements: 16 bytes of half precision; below that, loads are not vectorised
UNALIGNED_SHARE = 0.6


_Bounds = tuple[float, float, float]  # slow, likely, fast


class Rates(Protocol):
    """What the clock asks of a device."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def sm_count(self) -> int | None: ...
    @property
    def bandwidth_gbs(self) -> float | None: ...
    @property
    def gemm_tflops_low(self) -> float | None: ...
    @property
    def gemm_tflops_high(self) -> float | None: ...
    def peak_tflops(self, dtype: str, allow_tf32: bool = True) -> float | None: ...


class Seconds(msgspec.Struct, frozen=True):
    """What one optimizer step and one evaluation batch take."""

    step_s: float
    eval_batch_s: float


class Times(msgspec.Struct, frozen=True):
    """The likely time, and an honest low and high."""

    low: Seconds
    likely: Seconds
    high: Seconds


def predict_times(step: Step, device: Rates, *, compiled: bool) -> Times | None:
    """How long the step takes on the device; None where the device's rates are not known."""
    if device.bandwidth_gbs is None or device.peak_tflops("float16") is None:
        return None
    known: dict[tuple[object, ...], _Bounds] = {}  # a model's blocks repeat: few operations are really different
    step_s, eval_s = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    for section in step.sections:
        evaluation = bool(section.ops) and section.ops[0].phase is Phase.EVAL
        sums = [0.0, 0.0, 0.0]
        for op in section.ops:
            key = (op.kernel, op.shape, op.dtype, op.flops, op.bytes_moved)
            bounds = known.get(key)
            if bounds is None:
                bounds = known[key] = _op_bounds(op, device, compiled)
            sums[0] += bounds[0]
            sums[1] += bounds[1]
            sums[2] += bounds[2]
        if evaluation:
            eval_s = sums
        else:
            step_s = [total + section.times * seconds for total, seconds in zip(step_s, sums, strict=True)]
    slow, likely, fast = (Seconds(*pair) for pair in zip(step_s, eval_s, strict=True))
    return Times(fast, likely, slow)


def _op_bounds(op: Op, device: Rates, compiled: bool) -> _Bounds:
    """Seconds at the slow, the likely and the fast end of every constant."""
    if op.kernel is Kernel.NONE:
        return 0.0, 0.0, 0.0
    slow, likely, fast = (_op_s(op, device, compiled, bound) for bound in range(3))
    return slow, likely, fast


def _op_s(op: Op, device: Rates, compiled: bool, bound: int) -> float:
    launch_s = 0.0 if device.kind == "cpu" else (COMPILED_LAUNCH_S if compiled else EAGER_LAUNCH_S)[bound]
    moving_s = op.bytes_moved / ((device.bandwidth_gbs or 0.0) * 1e9 * BANDWIDTH_SHARE[bound])
    if not op.flops or op.kernel not in (Kernel.GEMM, Kernel.ATTENTION):
        return max(moving_s, launch_s)
    if op.kernel is Kernel.ATTENTION:
        share = ATTENTION_SHARE[bound]
    else:
        share = gemm_share(op.shape, device.sm_count or 1, op.dtype) if device.kind != "cpu" else 1.0
    return max(op.flops / (_flops_per_s(device, op.dtype, bound) * share), moving_s, launch_s)


def _flops_per_s(device: Rates, dtype: str, bound: int) -> float:
    """The rate of large matrix products in this precision."""
    peak = device.peak_tflops(dtype) or device.peak_tflops("float32", allow_tf32=False) or 0.0
    half_peak = device.peak_tflops("float16") or peak
    if device.kind == "cpu":
        return peak * CPU_RATIO[bound] * 1e12
    if device.gemm_tflops_low and device.gemm_tflops_high:
        low, high = device.gemm_tflops_low / half_peak, device.gemm_tflops_high / half_peak
        ratio = (low, (low + high) / 2, high)
    else:
        ratio = GEFORCE_RATIO if device.name.startswith("GeForce") else OTHER_RATIO
    return peak * ratio[bound] * 1e12


def gemm_share(shape: tuple[int, ...], sm_count: int, dtype: str) -> float:
    """The share of the full rate that a matrix product of this shape reaches: whole tiles, whole waves, alignment."""
    batch, m, n, k = shape
    best = 0.0
    for rows, columns, rate in TILES:
        tiles = batch * -(-m // rows) * -(-n // columns)
        useful = batch * m * n / (tiles * rows * columns)
        waves = tiles / sm_count
        best = max(best, rate * useful * waves / -(-tiles // sm_count))
    aligned = all(extent % ALIGNED == 0 for extent in (m, n, k)) or dtype == "float32"
    return best if aligned else best * UNALIGNED_SHARE
