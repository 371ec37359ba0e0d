"""Seconds of one operation on this machine's CPU, from rates measured on it.

A CPU differs from a GPU in what takes time: exponentials and error functions cost more than the bytes they read,
tensors that fit its caches move faster than those in memory, and a large new tensor's pages have to be faulted in.
"""

from __future__ import annotations

from oomph.devices.cpu_rates import ATTENTION_PRODUCTS, LONG_TOKENS, CpuRates, attention_scores
from oomph.step.ops import Kernel, Op, Phase
from oomph.units import MIB

CACHED_BYTES, STREAMED_BYTES = 8 * MIB, 64 * MIB  # bytes moved by an operation: in a core's share of cache, far past it
# glibc serves smaller buffers from memory it keeps; for larger ones it asks the system for new pages each time
# (mallopt(3), M_MMAP_THRESHOLD: it grows by itself to at most 32 MiB on 64-bit systems; oomph's trainer sets it).
KEPT_BYTES, OOMPH_KEPT_BYTES = 32 * MIB, 16 * MIB
BACKWARD_SCORES = 2.7  # work on one attention score besides its products, backward relative to forward
NOISE = ".noise"  # the suffix of operations that draw dropout's random numbers
EXPONENTIALS = ("gelu", "softmax")  # in the names of pointwise operations that are limited by arithmetic, not by bytes


def cpu_op_seconds(op: Op, rates: CpuRates, flops_per_s: float, kept_bytes: int = KEPT_BYTES) -> float:
    """Seconds of one operation. `flops_per_s` is the rate of its matrix products; buffers of `kept_bytes` or more take
    new pages."""
    made_bytes = sum(buffer.bytes for buffer in op.allocates)
    new_bytes = sum(buffer.bytes for buffer in op.allocates if buffer.bytes >= kept_bytes)
    seconds = rates.dispatch_s + new_bytes * rates.page_s_per_byte
    if op.kernel is Kernel.ATTENTION and op.flops:
        return seconds + attention_s(op, rates, flops_per_s)
    traffic_bytes = op.bytes_moved + made_bytes  # a cache line is read before it is written, unless it was read already
    if op.kernel is Kernel.GEMM and op.flops:  # operands are packed before the product runs
        return seconds + op.flops / flops_per_s + traffic_bytes / (rates.copy_gbs * 1e9)
    if op.kernel is Kernel.REDUCTION or any(name in op.name for name in EXPONENTIALS):
        return seconds + op.bytes_moved / (rates.math_gbs * 1e9)
    if op.name.endswith(NOISE):
        seconds += made_bytes / 4 * rates.random_s
    return seconds + traffic_bytes / (stream_gbs(traffic_bytes, rates) * 1e9)


def stream_gbs(moved_bytes: int, rates: CpuRates) -> float:
    """GB/s of an operation that only moves bytes, by their number: from the caches, from memory, or in between."""
    over = min(max(moved_bytes - CACHED_BYTES, 0) / (STREAMED_BYTES - CACHED_BYTES), 1.0)
    return rates.cached_gbs + (rates.copy_gbs - rates.cached_gbs) * over


def attention_s(op: Op, rates: CpuRates, flops_per_s: float) -> float:
    """Seconds of fused causal attention: products over blocks of scores, then an exponential for each score."""
    batch, heads, tokens, _ = op.shape
    scores = attention_scores(tokens)
    computed = scores / (tokens * (tokens + 1) / 2)  # blocks on the diagonal are computed whole
    work = BACKWARD_SCORES if op.phase is Phase.BACKWARD else 1.0
    score_s = rates.long_score_s if tokens >= LONG_TOKENS else rates.score_s
    products_s = op.flops * computed / (flops_per_s * ATTENTION_PRODUCTS)
    return products_s + batch * heads * scores * work * score_s
