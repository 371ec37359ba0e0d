"""What this CPU does per second: measured once with torch, in a separate process, then kept in the user's cache.

The measuring process imports torch, which takes longer than everything else oomph does. It runs each piece of work many
times for a short while and takes the median of the processor time: time that other programs take does not
count, and a step is made of typical runs, not of the quickest ones.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import msgspec

from oomph.errors import InputError
from oomph.files import cache_folder, write_whole
from oomph.units import MIB

BUSY = 0.1  # discard the measurement if threads waited for the CPU for a larger share of the time
ATTENTION_PRODUCTS = 0.65  # of the matrix products' rate, for the small blocks of torch's CPU flash attention
# Its query blocks are 256 from 768 tokens on, 64 from 192 on, else 32 (torch's FlashAttentionKernel.cpp).
LONG_TOKENS, MIDDLE_TOKENS = 768, 192
SIZE = 512  # a product of this size runs at the full rate, in a few milliseconds
COPY_FLOATS = 2**24  # 64 MiB: well past a thread's caches, and large enough that each new tensor gets new pages
CACHED_FLOATS = 2**18  # 1 MiB; a small model's tensors are a few MiB
POOL = 48  # tensors of that size used in turn: a step returns to one after some 48 MiB of others, not at once
HEADS, HEAD_SIZE = 4, 32
SHORT, LONG = 128, 1024  # tokens
CHILD = "from oomph.devices.cpu_rates import print_rates; print_rates()"


class CpuRates(msgspec.Struct, frozen=True):
    """Rates of this CPU, measured with as many threads as a run has."""

    tflops_fp32: float
    tflops_bf16: float  # far below fp32 on CPUs without bf16 instructions; Muon computes in it anyway
    copy_gbs: float  # to and from memory; a written cache line is read first, and counts twice
    cached_gbs: float  # the same between tensors of 1 MiB, which come from a cache that the step does not fill
    math_gbs: float  # of gelu, softmax and layer norm, which are limited by arithmetic
    page_s_per_byte: float  # to allocate the pages of a large new tensor
    dispatch_s: float  # overhead of one operation: Python, autograd's graph, its engine
    score_s: float  # one attention score, besides its matrix products, in a short sequence
    long_score_s: float  # the same in a long one, whose blocks are larger
    random_s: float  # one of dropout's random numbers
    process_mib: float | None = None  # Python and torch before any tensor; None if the system does not report it
    optimizer_mib: float | None = None  # what the imports of a torch.optim optimizer add
    transformers_mib: float | None = None  # and what those of a transformers model add to that
    waited: float = 0.0  # share of the measuring time in which threads waited for other programs


def attention_scores(tokens: int) -> float:
    """Scores that torch's CPU kernel computes for one head: for each block of queries, all keys up to its last."""
    block = min(tokens, 256 if tokens >= LONG_TOKENS else 64 if tokens >= MIDDLE_TOKENS else 32)
    return tokens * (tokens + block) / 2


def cpu_rates(cpu_name: str, threads: int, measure: bool = True) -> CpuRates | None:
    """This CPU's rates from the cache, else measured if `measure`; None without torch, or if measuring fails."""
    version = torch_version()
    if version is None:
        return None
    key = f"{cpu_name}, {threads} threads, torch {version}, median"  # earlier releases took the quickest run
    kept = _load(rates_file())
    if key not in kept:
        measured = _measure() if measure else None
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
    """The version of the installed torch, without importing it; None if there is none."""
    from importlib import metadata, util

    if util.find_spec("torch") is None:
        return None
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "unknown"


def child_environment() -> dict[str, str]:
    """The environment for a Python child process that can import what this one can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def _load(path: Path) -> dict[str, CpuRates]:
    """The cached rates; empty if the file is missing or damaged."""
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


def _measure() -> CpuRates | None:
    import subprocess

    command = [sys.executable, "-c", CHILD]
    environment = child_environment()
    if is_shared():
        let_threads_sleep(environment)
    try:
        run = subprocess.run(command, capture_output=True, timeout=120, check=True, env=environment)
        return msgspec.json.decode(run.stdout, type=CpuRates)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError):
        return None


# --- in the measuring process ------------------------------------------------------------------------


def print_rates() -> None:
    """Measure, and print the rates as JSON. Called in the process that `cpu_rates` starts."""
    print(msgspec.json.encode(measure()).decode())


def usual_s(work: Callable[[], object], budget_s: float) -> float:
    """Seconds of processor time of the median run within the budget, after a warm-up run."""
    work()
    begun = time.perf_counter()
    runs: list[float] = []
    while not runs or time.perf_counter() - begun < budget_s:
        start = processor_s()
        work()
        runs.append(processor_s() - start)
    return sorted(runs)[len(runs) // 2]


def processor_s() -> float:
    """Processor time of this thread, which takes part in every parallel region of torch from its start to its end.

    Wall-clock time if the system counts a thread's time in whole ticks (Windows: 16 ms).
    """
    return time.thread_time() if _THREAD_TIME else time.perf_counter()


_THREAD_TIME = time.get_clock_info("thread_time").resolution < 1e-5


def resident_mib() -> float | None:
    """This process's resident memory on Linux; None elsewhere."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / MIB
    except (OSError, ValueError):
        return None


def measure(budget_s: float = 0.2) -> dict[str, float | None]:
    """The fields of `CpuRates`, each piece of work run for `budget_s` or less."""
    from itertools import cycle

    import torch
    from torch.nn import functional

    process_mib, optimizer_mib, transformers_mib = _process_mib()  # before any large tensor
    waits, begun = waits_s(), time.perf_counter()

    def gemm_tflops(dtype: torch.dtype) -> float:
        a, b = torch.randn(SIZE, SIZE).to(dtype), torch.randn(SIZE, SIZE).to(dtype)
        out = torch.empty(SIZE, SIZE, dtype=dtype)
        return 2 * SIZE**3 / usual_s(lambda: torch.mm(a, b, out=out), budget_s) / 1e12

    def sum_gbs(floats: int, tensors: int) -> float:
        turn = cycle([torch.ones(floats) for _ in range(tensors)])
        # two read, and one that is read and then written
        return 16 * floats / usual_s(lambda: torch.add(next(turn), next(turn), out=next(turn)), budget_s) / 1e9

    rows = torch.randn(CACHED_FLOATS // 256, 256)
    turn = cycle([rows.clone() for _ in range(POOL)])
    math_s = [
        usual_s(lambda: functional.gelu(next(turn)), budget_s / 2),
        usual_s(lambda: functional.log_softmax(next(turn), 1), budget_s / 2),
        usual_s(lambda: functional.layer_norm(next(turn), (256,)), budget_s / 2),
    ]
    large = torch.empty(COPY_FLOATS)
    new_s = usual_s(lambda: torch.empty(COPY_FLOATS).zero_(), budget_s) - usual_s(large.zero_, budget_s)
    tflops = gemm_tflops(torch.float32)
    found = {
        "process_mib": process_mib,
        "optimizer_mib": optimizer_mib,
        "transformers_mib": transformers_mib,
        "tflops_fp32": tflops,
        "tflops_bf16": gemm_tflops(torch.bfloat16),
        "copy_gbs": sum_gbs(COPY_FLOATS, 3),
        "cached_gbs": sum_gbs(CACHED_FLOATS, POOL + 2),
        "math_gbs": 8 * rows.numel() * len(math_s) / sum(math_s) / 1e9,  # one read, one written
        "page_s_per_byte": max(0.0, new_s) / (4 * COPY_FLOATS),
        "dispatch_s": _dispatch_s(budget_s),
        "score_s": _score_s(SHORT, tflops, budget_s),
        "long_score_s": _score_s(LONG, tflops, budget_s),
        "random_s": usual_s(lambda: rows.bernoulli_(0.9), budget_s / 2) / rows.numel(),
    }
    return {**found, "waited": waited_s(waits) / (time.perf_counter() - begun)}


def _process_mib() -> tuple[float | None, float | None, float | None]:
    """MiB of Python and torch with what operators load on first use; what a torch.optim optimizer adds; and what a
    transformers model then adds, if that is installed."""
    import torch
    from torch.nn import functional

    tokens, heads = torch.zeros(16, dtype=torch.int64), torch.randn(1, 2, 8, 8, requires_grad=True)
    attended = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).flatten(0, 2)
    embedding, norm, layer = torch.nn.Embedding(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
    hidden = functional.dropout(functional.gelu(layer(norm(attended + embedding(tokens)))), 0.1)
    functional.cross_entropy(hidden, tokens).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    large = torch.ones(SIZE, SIZE)
    large @ large  # makes the BLAS library allocate the buffers it keeps
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
    build: Any = LlamaForCausalLM  # its types differ between releases
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
    return usual_s(lambda: network(x).sum().backward(), budget_s / 2) / operations


def _score_s(tokens: int, tflops: float, budget_s: float) -> float:
    """Seconds per attention score besides its share of the matrix products."""
    import torch
    from torch.nn import functional

    q, k, v = (torch.randn(1, HEADS, tokens, HEAD_SIZE) for _ in range(3))
    seconds = usual_s(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True), budget_s)
    return max(0.0, seconds / (HEADS * attention_scores(tokens)) - 4 * HEAD_SIZE / (tflops * 1e12 * ATTENTION_PRODUCTS))


def is_shared(interval_s: float = 0.2) -> bool:
    """Whether other programs are using the CPUs of this process now; False if the system does not say."""
    before = _cpu_ticks()
    time.sleep(interval_s)
    after = _cpu_ticks()
    used = sum(after[cpu][0] - before[cpu][0] for cpu in after.keys() & before)
    ticks = sum(after[cpu][1] - before[cpu][1] for cpu in after.keys() & before)
    return ticks > 0 and used / ticks > BUSY


def _cpu_ticks() -> dict[str, tuple[int, int]]:
    """Ticks in use and in all, by the name of the CPU, of those that this process may use; empty except on Linux."""
    found = {}
    try:
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        for line in Path("/proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name in mine:
                ticks = [int(field) for field in fields[:8]]  # user nice system idle iowait irq softirq steal
                found[name] = (sum(ticks) - ticks[3] - ticks[4], sum(ticks))
    except (OSError, ValueError, IndexError, AttributeError):
        pass
    return found


def let_threads_sleep(environment: MutableMapping[str, str]) -> None:
    """Set the variables that make torch's threads sleep while they wait for each other, where the user has not.

    They are read when torch is imported. Without them a thread spins while its mate is kept from a core by another
    program: its processor time is then what the other program took.
    """
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # GNU's and LLVM's OpenMP
    environment.setdefault("KMP_BLOCKTIME", "0")  # Intel's


def waits_s() -> dict[str, float]:
    """Seconds that each thread of this process spent runnable but waiting for a CPU; empty except on Linux."""
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
