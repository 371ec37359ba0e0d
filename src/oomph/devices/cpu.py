"""The CPU of this machine as a device: its name, the threads and the memory a process may use."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

BF16_FLAGS = frozenset(("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"))  # the last is ARM's word
MIB = 2**20


class Cpu(NamedTuple):
    """What the operating system says of the processor and its memory."""

    name: str
    threads: int  # that this process may use
    memory_mib: int  # RAM, or the container's limit
    available_mib: int  # of it, now
    has_bf16: bool


def read_cpu(root: Path = Path("/"), platform: str = sys.platform) -> Cpu:
    """The processor of this machine; `root` is where /proc and /sys are looked for."""
    name, flags = _model(root, platform)
    total_mib, available_mib = _memory_mib(root, platform)
    return Cpu(name, usable_threads(root), total_mib, available_mib, bool(BF16_FLAGS & flags))


def usable_threads(root: Path = Path("/")) -> int:
    """Threads a process gets: OMP_NUM_THREADS where set, else the affinity mask within the container's quota."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(root)
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def _model(root: Path, platform: str) -> tuple[str, frozenset[str]]:
    fields: dict[str, str] = {}
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, separator, value = line.partition(":")
        if separator:
            fields.setdefault(key.strip().lower(), value.strip())
    flags = frozenset((fields.get("flags") or fields.get("features") or "").split())
    name = fields.get("model name") or fields.get("hardware")
    if not name and platform == "darwin":
        name = _sysctl("machdep.cpu.brand_string")
    if not name:
        import platform as machine  # slow to import, and rarely needed

        name = machine.processor() or machine.machine() or "CPU"
    return " ".join(name.split()), flags


def _memory_mib(root: Path, platform: str) -> tuple[int, int]:
    """RAM in MiB, total and available, within the container's limit."""
    if platform == "win32":
        return _windows_memory_mib()
    if platform == "darwin":
        total_mib = int(_sysctl("hw.memsize") or 0) // MIB
        return total_mib, total_mib * 3 // 4  # what macOS keeps for itself and its caches is not told cheaply
    fields = {}
    for line in _read(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        if value.split()[:1] and value.split()[0].isdigit():
            fields[key] = int(value.split()[0]) // 1024
    total_mib = fields.get("MemTotal", 0)
    available_mib = fields.get("MemAvailable", fields.get("MemFree", 0))
    for limit, used in _memory_limits(root):
        total_mib = min(total_mib, limit // MIB) if total_mib else limit // MIB
        available_mib = min(available_mib, max(0, limit - used) // MIB)
    return total_mib, available_mib


def _cgroups(root: Path, controller: str) -> list[Path]:
    """The control groups of this process and those above it: version 2, then version 1."""
    folders: list[Path] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, inner = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        parts = [part for part in inner.split("/") if part and part != ".."]
        folders.extend(base.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))
    return list(dict.fromkeys([*folders, root / "sys/fs/cgroup", root / "sys/fs/cgroup" / controller]))


def _memory_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, in use) in bytes of each control group that has a limit."""
    limits = []
    for folder in _cgroups(root, "memory"):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _read(folder / limit_file).strip()
            if limit.isdigit() and int(limit) < 2**60:  # version 1 writes a huge number for "none"
                used = _read(folder / used_file).strip()
                limits.append((int(limit), int(used) if used.isdigit() else 0))
    return limits


def _quota(root: Path) -> float | None:
    """Processors that the control groups allow, or None."""
    quotas = []
    for folder in _cgroups(root, "cpu"):
        limit, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if not limit:
            limit = _read(folder / "cpu.cfs_quota_us").strip()
            period = _read(folder / "cpu.cfs_period_us").strip()
        if limit.isdigit() and period.isdigit() and int(period) > 0:
            quotas.append(int(limit) / int(period))
    return min(quotas) if quotas else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _sysctl(key: str) -> str:
    import subprocess

    try:
        found = subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()


def _windows_memory_mib() -> tuple[int, int]:
    import ctypes

    class MemoryStatus(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            *((name, ctypes.c_ulonglong) for name in ("total", "available", "page", "page_free", "space", "free", "x")),
        )

    status = MemoryStatus()
    status.length = ctypes.sizeof(MemoryStatus)
    getattr(ctypes, "windll").kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # noqa: B009  Windows only
    return status.total // MIB, status.available // MIB
