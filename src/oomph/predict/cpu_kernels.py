"""Seconds of one operation on this machine's CPU, from rates measured on it.

A CPU differs from a card in what it waits for: exponentials and error functions cost more than the bytes they read,
tensors that fit its caches move faster than its memory, and a large new tensor is paid for page by page.
"""

from __future__ import annotations

from oomph.devices.rates import CpuRates
from oomph.step.ops import Kernel, Op, Phase

MIB = 2**20
CACHED_BYTES, STREAMED_BYTES = (
    8 * MIB,
    64 * MIB,
)  # what one operation moves: within a core's share of cache, far past it
# glibc serves smaller buffers from memory it keeps; from here on it asks the system for new pages each time
# (mallopt(3), M_MMAP_THRESHOLD: at most 32 MiB on 64-bit systems).
NEW_PAGES_BYTES = 32 * MIB
ATTENTION_PRODUCTS = 0.65  # of the matrix products' rate, for the small blocks of torch's CPU flash attention
BACKWARD_SCORES = 2.7  # work on one attention score besides its products, backward against forward
DISPATCHES = 7  # an operator in a module under autograd (about 10 µs) against a bare one: Python, graph node, engine


def cpu_op_seconds(op: Op, rates: CpuRates, flops_per_s: float) -> float:
    """Time of one operation. `flops_per_s` is the rate of its matrix products."""
    new_bytes = sum(buffer.bytes for buffer in op.allocates if buffer.bytes >= NEW_PAGES_BYTES)
    seconds = DISPATCHES * rates.dispatch_s + new_bytes * rates.page_s_per_byte
    if op.kernel is Kernel.GEMM and op.flops:
        return seconds + op.flops / flops_per_s
    if op.kernel is Kernel.ATTENTION and op.flops:
        return seconds + attention_s(op, rates, flops_per_s)
    if op.kernel is Kernel.REDUCTION or "gelu" in op.name:
        return seconds + op.bytes_moved / (rates.math_gbs * 1e9)
    return seconds + op.bytes_moved / (stream_gbs(op.bytes_moved, rates) * 1e9)


def stream_gbs(moved_bytes: int, rates: CpuRates) -> float:
    """GB/s of an operation that only moves bytes, by how many: from the caches, from memory, or partly both."""
    over = min(max(moved_bytes - CACHED_BYTES, 0) / (STREAMED_BYTES - CACHED_BYTES), 1.0)
    return rates.cached_gbs + (rates.copy_gbs - rates.cached_gbs) * over


def attention_s(op: Op, rates: CpuRates, flops_per_s: float) -> float:
    """Fused causal attention: products over the blocks that hold a score, then an exponential for each score."""
    batch, heads, tokens, _ = op.shape
    scores = attention_scores(tokens)
    computed = scores / (tokens * (tokens + 1) / 2)  # the diagonal's blocks are computed whole
    work = BACKWARD_SCORES if op.phase is Phase.BACKWARD else 1.0
    products_s = op.flops * computed / (flops_per_s * ATTENTION_PRODUCTS)
    return products_s + batch * heads * scores * work * rates.score_s


def attention_scores(tokens: int) -> float:
    """Scores that torch's CPU kernel computes for one head: blocks of queries, each up to its last key."""
    block = min(tokens, 256 if tokens >= 768 else 64 if tokens >= 192 else 32)
    return tokens * (tokens + block) / 2
