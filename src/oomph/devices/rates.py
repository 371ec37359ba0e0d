"""What this CPU does per second: measured once, then kept in the user's cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from oomph.devices.busy import BUSY
from oomph.errors import InputError

ATTENTION_PRODUCTS = 0.65  # of the matrix products' rate, for the small blocks of torch's CPU flash attention
# It takes queries by 256 from 768 tokens on, by 64 from 192 on, else by 32 (torch's FlashAttentionKernel.cpp).
LONG_TOKENS, MIDDLE_TOKENS = 768, 192


class CpuRates(msgspec.Struct, frozen=True):
    """Measured on this machine, with the threads a run would have."""

    tflops_fp32: float
    tflops_bf16: float | None  # None where bf16 has no instructions
    copy_gbs: float  # to and from memory; a line that is written is read first, and counts twice
    cached_gbs: float  # the same in a core's own cache
    math_gbs: float  # of operations with an exponential or a norm: gelu, softmax, layer norm
    page_s_per_byte: float  # to make the pages of a new large tensor
    dispatch_s: float  # an operation besides its work: Python, the graph of gradients, the engine that runs it
    score_s: float  # one attention score, besides its matrix products, in a short sequence
    long_score_s: float  # the same in a long one, whose blocks are larger
    random_s: float  # one of dropout's random numbers
    process_mib: float | None = None  # Python with torch at work, before any tensor; None where the system is silent
    optimizer_mib: float | None = None  # what an optimizer of torch.optim adds: the machinery it imports
    waited: float = 0.0  # the share of the measuring in which other programs had the CPU


def attention_scores(tokens: int) -> float:
    """Scores that torch's CPU kernel computes for one head: blocks of queries, each up to its last key."""
    block = min(tokens, 256 if tokens >= LONG_TOKENS else 64 if tokens >= MIDDLE_TOKENS else 32)
    return tokens * (tokens + block) / 2


def cpu_rates(cpu_name: str, threads: int, has_bf16: bool, measure: bool = True) -> CpuRates | None:
    """The kept rates of this CPU, or freshly measured ones; None without torch, or where measuring fails.

    With `measure=False` only kept ones.
    """
    version = torch_version()
    if version is None:
        return None
    key = f"{cpu_name}, {threads} threads, torch {version}"
    kept = _load(rates_file())
    if key not in kept:
        measured = _measure(has_bf16) if measure else None
        if measured is None:
            return None
        if measured.waited > BUSY:  # good for a plan that says so, not for all that follow
            return measured
        kept[key] = measured
        _save(rates_file(), kept)
    return kept[key]


def cache_folder() -> Path:
    """Where this user's programs keep what they can compute again."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "oomph"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "oomph" / "Cache"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "oomph"


def rates_file() -> Path:
    """The file with the rates of every CPU measured for this user."""
    return cache_folder() / "cpu.json"


def torch_version() -> str | None:
    """The installed torch's version without importing it; None where there is none."""
    from importlib import metadata, util

    if util.find_spec("torch") is None:
        return None
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "unknown"


def child_environment() -> dict[str, str]:
    """Of a Python process that finds what this one finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def _load(path: Path) -> dict[str, CpuRates]:
    """What is kept; a missing or broken file counts as empty."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, CpuRates])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def _save(path: Path, kept: dict[str, CpuRates]) -> None:
    """Keep the rates; a folder that cannot be written only means measuring again next time."""
    from oomph.files import write_whole

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.format(msgspec.json.encode(kept), indent=2))
    except (OSError, InputError):
        return


def _measure(has_bf16: bool) -> CpuRates | None:
    import subprocess

    command = [sys.executable, "-m", "oomph.devices.measure_cpu", *(["bf16"] if has_bf16 else [])]
    try:
        run = subprocess.run(command, capture_output=True, timeout=120, check=True, env=child_environment())
        return msgspec.json.decode(run.stdout, type=CpuRates)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError):
        return None
