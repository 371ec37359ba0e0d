"""`python -m oomph.devices.measure_cpu [bf16]`: this CPU's rates, measured with torch in two seconds, as JSON.

A process of its own, because importing torch takes longer than everything else oomph does. Each piece of work is
short, and its quickest run counts: a busy machine interrupts long ones.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from oomph.devices.busy import waited_s, waits_s
from oomph.devices.rates import ATTENTION_PRODUCTS, attention_scores

SIZE = 512  # a product of this size runs at the full rate, in a few milliseconds
COPY_FLOATS = 2**24  # 64 MiB: well past the caches of a thread, and enough that each new tensor is made of new pages
CACHED_FLOATS = 2**18  # 1 MiB: in a core's own cache
HEADS, HEAD_SIZE = 4, 32
SHORT, LONG = 128, 1024  # tokens


def best_s(work: Callable[[], object], budget_s: float) -> float:
    """Seconds of the quickest run within the budget, after one run to warm up."""
    work()
    best, begun = float("inf"), time.perf_counter()
    while time.perf_counter() - begun < budget_s:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def resident_mib() -> float | None:
    """What this process holds in memory now, as Linux counts it; None elsewhere."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, ValueError):
        return None


def measure(with_bf16: bool, budget_s: float = 0.2) -> dict[str, float | None]:
    """TFLOPS of matrix products, GB/s of copies and of arithmetic on the threads torch uses."""
    import torch
    from torch.nn import functional

    process_mib, optimizer_mib = _process_mib()  # before any tensor of size
    waits, begun = waits_s(), time.perf_counter()

    def gemm_tflops(dtype: torch.dtype) -> float:
        a, b = torch.randn(SIZE, SIZE).to(dtype), torch.randn(SIZE, SIZE).to(dtype)
        out = torch.empty(SIZE, SIZE, dtype=dtype)
        return 2 * SIZE**3 / best_s(lambda: torch.mm(a, b, out=out), budget_s) / 1e12

    def sum_gbs(floats: int) -> float:
        a, b, out = torch.ones(floats), torch.ones(floats), torch.empty(floats)
        # two read, and one that is read and then written
        return 16 * floats / best_s(lambda: torch.add(a, b, out=out), budget_s) / 1e9

    rows = torch.randn(CACHED_FLOATS // 256, 256)
    math_s = [
        best_s(lambda: functional.gelu(rows), budget_s / 2),
        best_s(lambda: functional.log_softmax(rows, 1), budget_s / 2),
        best_s(lambda: functional.layer_norm(rows, (256,)), budget_s / 2),
    ]
    large = torch.empty(COPY_FLOATS)
    new_s = best_s(lambda: torch.empty(COPY_FLOATS).zero_(), budget_s) - best_s(large.zero_, budget_s)
    tflops = gemm_tflops(torch.float32)
    found = {
        "process_mib": process_mib,
        "optimizer_mib": optimizer_mib,
        "tflops_fp32": tflops,
        "tflops_bf16": gemm_tflops(torch.bfloat16) if with_bf16 else None,
        "copy_gbs": sum_gbs(COPY_FLOATS),
        "cached_gbs": sum_gbs(CACHED_FLOATS),
        "math_gbs": 8 * rows.numel() * len(math_s) / sum(math_s) / 1e9,  # one read, one written
        "page_s_per_byte": max(0.0, new_s) / (4 * COPY_FLOATS),
        "dispatch_s": _dispatch_s(budget_s),
        "score_s": _score_s(SHORT, tflops, budget_s),
        "long_score_s": _score_s(LONG, tflops, budget_s),
        "random_s": best_s(lambda: rows.bernoulli_(0.9), budget_s / 2) / rows.numel(),
    }
    return {**found, "waited": waited_s(waits) / (time.perf_counter() - begun)}


def _process_mib() -> tuple[float | None, float | None]:
    """Python and torch with what a step's operators load on first use; and what making a torch.optim optimizer adds."""
    import torch
    from torch.nn import functional

    tokens, heads = torch.zeros(16, dtype=torch.int64), torch.randn(1, 2, 8, 8, requires_grad=True)
    attended = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).flatten(0, 2)
    embedding, norm, layer = torch.nn.Embedding(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
    hidden = functional.dropout(functional.gelu(layer(norm(attended + embedding(tokens)))), 0.1)
    functional.cross_entropy(hidden, tokens).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    large = torch.ones(SIZE, SIZE)
    large @ large  # the library of matrix products keeps its buffers
    del large
    stepped_mib = resident_mib()
    torch.optim.AdamW(layer.parameters()).step()  # it imports torch.compile's machinery
    made_mib = resident_mib()
    return stepped_mib, made_mib - stepped_mib if made_mib and stepped_mib else None


def _dispatch_s(budget_s: float) -> float:
    """Seconds for an operation of a layer on next to nothing, forward and backward."""
    import torch
    from torch import nn

    layers = [(nn.LayerNorm(8, bias=False), nn.Linear(8, 8, bias=False), nn.GELU()) for _ in range(4)]
    network, x = nn.Sequential(*(layer for group in layers for layer in group)), torch.randn(8, 8, requires_grad=True)
    # forward, backward, a gradient added: three of a norm, four of a linear layer (two products), two of an activation
    operations = (3 + 4 + 2) * len(layers)
    return best_s(lambda: network(x).sum().backward(), budget_s / 2) / operations


def _score_s(tokens: int, tflops: float, budget_s: float) -> float:
    """Seconds for one attention score besides its share of the matrix products."""
    import torch
    from torch.nn import functional

    q, k, v = (torch.randn(1, HEADS, tokens, HEAD_SIZE) for _ in range(3))
    seconds = best_s(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True), budget_s)
    return max(0.0, seconds / (HEADS * attention_scores(tokens)) - 4 * HEAD_SIZE / (tflops * 1e12 * ATTENTION_PRODUCTS))


if __name__ == "__main__":
    print(json.dumps(measure("bf16" in sys.argv[1:])))
