"""What this CPU does per second: measured once with torch, in a process of its own, then kept in the user's cache.

The measuring process imports torch, which takes longer than everything else oomph does. It runs each piece of work many
times for a short while and counts the quickest run: a busy machine interrupts long ones.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from oomph.errors import InputError
from oomph.files import cache_folder, write_whole
from oomph.units import MIB

BUSY = 0.1  # where threads waited for the CPU for a larger share of the time, the measurement is discarded
ATTENTION_PRODUCTS = 0.65  # of the matrix products' rate, for the small blocks of torch's CPU flash attention
# It takes queries by 256 from 768 tokens on, by 64 from 192 on, else by 32 (torch's FlashAttentionKernel.cpp).
LONG_TOKENS, MIDDLE_TOKENS = 768, 192
SIZE = 512  # a product of this size runs at the full rate, in a few milliseconds
COPY_FLOATS = 2**24  # 64 MiB: well past the caches of a thread, and enough that each new tensor is made of new pages
CACHED_FLOATS = 2**18  # 1 MiB: in a core's own cache
HEADS, HEAD_SIZE = 4, 32
SHORT, LONG = 128, 1024  # tokens
CHILD = "from oomph.devices.cpu_rates import print_rates; print_rates()"


class CpuRates(msgspec.Struct, frozen=True):
    """Rates of this CPU, measured with as many threads as a run has."""

    tflops_fp32: float
    tflops_bf16: float | None  # None where bf16 has no instructions
    copy_gbs: float  # to and from memory; a written cache line is read first, and counts twice
    cached_gbs: float  # the same in a core's own cache
    math_gbs: float  # of gelu, softmax and layer norm, which are limited by arithmetic
    page_s_per_byte: float  # to make the pages of a large new tensor
    dispatch_s: float  # overhead of one operation: Python, autograd's graph, its engine
    score_s: float  # one attention score, besides its matrix products, in a short sequence
    long_score_s: float  # the same in a long one, whose blocks are larger
    random_s: float  # one of dropout's random numbers
    process_mib: float | None = None  # Python and torch before any tensor; None where the system does not tell
    optimizer_mib: float | None = None  # what the imports of a torch.optim optimizer add
    transformers_mib: float | None = None  # and what those of a transformers model add to that
    waited: float = 0.0  # share of the measuring time in which threads waited for other programs


def attention_scores(tokens: int) -> float:
    """Scores that torch's CPU kernel computes for one head: for each block of queries, all keys up to its last."""
    block = min(tokens, 256 if tokens >= LONG_TOKENS else 64 if tokens >= MIDDLE_TOKENS else 32)
    return tokens * (tokens + block) / 2


def cpu_rates(cpu_name: str, threads: int, has_bf16: bool, measure: bool = True) -> CpuRates | None:
    """This CPU's rates from the cache, else measured if `measure`; None without torch, or where measuring fails."""
    version = torch_version()
    if version is None:
        return None
    key = f"{cpu_name}, {threads} threads, torch {version}"
    kept = _load(rates_file())
    if key not in kept:
        measured = _measure(has_bf16) if measure else None
        if measured is None:
            return None
        if measured.waited > BUSY:  # used for this plan, with a note, but not kept
            return measured
        kept[key] = measured
        _save(rates_file(), kept)
    return kept[key]


def rates_file() -> Path:
    """The cache file with the rates of every CPU measured for this user."""
    return cache_folder() / "cpu.json"


def torch_version() -> str | None:
    """The version of the installed torch, without importing it; None where there is none."""
    from importlib import metadata, util

    if util.find_spec("torch") is None:
        return None
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "unknown"


def child_environment() -> dict[str, str]:
    """The environment of a Python child process that imports what this one imports."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def _load(path: Path) -> dict[str, CpuRates]:
    """The cached rates; none where the file is missing or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, CpuRates])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def _save(path: Path, kept: dict[str, CpuRates]) -> None:
    """Write the cache; if that fails, the CPU is measured again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.format(msgspec.json.encode(kept), indent=2))
    except (OSError, InputError):
        return


def _measure(has_bf16: bool) -> CpuRates | None:
    import subprocess

    command = [sys.executable, "-c", CHILD, *(["bf16"] if has_bf16 else [])]
    try:
        run = subprocess.run(command, capture_output=True, timeout=120, check=True, env=child_environment())
        return msgspec.json.decode(run.stdout, type=CpuRates)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError):
        return None


# --- in the measuring process ------------------------------------------------------------------------


def print_rates() -> None:
    """Measure, and print the rates as JSON. Called in the process that `cpu_rates` starts, with "bf16" or nothing."""
    print(msgspec.json.encode(measure("bf16" in sys.argv[1:])).decode())


def best_s(work: Callable[[], object], budget_s: float) -> float:
    """Seconds of the fastest run within the budget, after a warm-up run."""
    work()
    best, begun = float("inf"), time.perf_counter()
    while time.perf_counter() - begun < budget_s:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def resident_mib() -> float | None:
    """This process's resident memory on Linux; None elsewhere."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / MIB
    except (OSError, ValueError):
        return None


def measure(with_bf16: bool, budget_s: float = 0.2) -> dict[str, float | None]:
    """The fields of `CpuRates`, each piece of work run for `budget_s` or less."""
    import torch
    from torch.nn import functional

    process_mib, optimizer_mib, transformers_mib = _process_mib()  # before any tensor of size
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
        "transformers_mib": transformers_mib,
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


def _process_mib() -> tuple[float | None, float | None, float | None]:
    """MiB of Python and torch with what operators load on first use; what a torch.optim optimizer adds; and what a
    transformers model then adds, where that is installed."""
    import torch
    from torch.nn import functional

    tokens, heads = torch.zeros(16, dtype=torch.int64), torch.randn(1, 2, 8, 8, requires_grad=True)
    attended = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).flatten(0, 2)
    embedding, norm, layer = torch.nn.Embedding(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
    hidden = functional.dropout(functional.gelu(layer(norm(attended + embedding(tokens)))), 0.1)
    functional.cross_entropy(hidden, tokens).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    large = torch.ones(SIZE, SIZE)
    large @ large  # the BLAS library keeps its buffers
    del large
    stepped_mib = resident_mib()
    torch.optim.AdamW(layer.parameters()).step()  # it imports torch.compile's machinery
    made_mib = resident_mib()
    if not stepped_mib or not made_mib:
        return stepped_mib, None, None
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return stepped_mib, made_mib - stepped_mib, None
    tiny = LlamaConfig(vocab_size=2, hidden_size=4, intermediate_size=2, num_hidden_layers=1, num_attention_heads=1)
    build: Any = LlamaForCausalLM  # whose types differ between releases
    build(tiny)
    return stepped_mib, made_mib - stepped_mib, (resident_mib() or made_mib) - made_mib


def _dispatch_s(budget_s: float) -> float:
    """Seconds per operation of a layer on a tiny tensor, forward and backward."""
    import torch
    from torch import nn

    layers = [(nn.LayerNorm(8, bias=False), nn.Linear(8, 8, bias=False), nn.GELU()) for _ in range(4)]
    network, x = nn.Sequential(*(layer for group in layers for layer in group)), torch.randn(8, 8, requires_grad=True)
    # forward, backward, a gradient added: three of a norm, four of a linear layer (two products), two of an activation
    operations = (3 + 4 + 2) * len(layers)
    return best_s(lambda: network(x).sum().backward(), budget_s / 2) / operations


def _score_s(tokens: int, tflops: float, budget_s: float) -> float:
    """Seconds per attention score besides its share of the matrix products."""
    import torch
    from torch.nn import functional

    q, k, v = (torch.randn(1, HEADS, tokens, HEAD_SIZE) for _ in range(3))
    seconds = best_s(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True), budget_s)
    return max(0.0, seconds / (HEADS * attention_scores(tokens)) - 4 * HEAD_SIZE / (tflops * 1e12 * ATTENTION_PRODUCTS))


def waits_s() -> dict[str, float]:
    """Seconds that each thread of this process was ready to run while another program ran; empty except on Linux."""
    waits = {}
    try:
        for thread in Path("/proc/self/task").iterdir():
            waits[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # a thread that ended meanwhile, or a kernel without schedstat
        pass
    return waits


def waited_s(before: dict[str, float]) -> float:
    """The longest wait of any thread since `before`: a step takes as long as its slowest thread."""
    return max((after - before.get(thread, 0.0) for thread, after in waits_s().items()), default=0.0)
