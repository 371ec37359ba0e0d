"""`python -m oomph.devices.measure_cpu [bf16]`: this CPU's rates, measured with torch in two seconds, as JSON.

A process of its own, because importing torch takes longer than everything else oomph does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

SIZE = 1024  # large enough that a product of this size runs at the full rate, small enough to repeat
COPY_FLOATS = 2**24  # 64 MiB: well past the caches of a thread


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


def measure(with_bf16: bool, budget_s: float = 0.5) -> dict[str, float | None]:
    """TFLOPS of matrix products and GB/s of copies on the threads torch uses."""
    import torch

    def gemm_tflops(dtype: torch.dtype) -> float:
        a, b = torch.randn(SIZE, SIZE).to(dtype), torch.randn(SIZE, SIZE).to(dtype)
        out = torch.empty(SIZE, SIZE, dtype=dtype)
        return 2 * SIZE**3 / best_s(lambda: torch.mm(a, b, out=out), budget_s) / 1e12

    process_mib = resident_mib()  # Python with torch imported, before any tensor of size
    source, target = torch.ones(COPY_FLOATS), torch.empty(COPY_FLOATS)
    return {
        "process_mib": process_mib,
        "tflops_fp32": gemm_tflops(torch.float32),
        "tflops_bf16": gemm_tflops(torch.bfloat16) if with_bf16 else None,
        "copy_gbs": 2 * 4 * COPY_FLOATS / best_s(lambda: target.copy_(source), budget_s) / 1e9,  # read and written
    }


if __name__ == "__main__":
    print(json.dumps(measure("bf16" in sys.argv[1:])))
