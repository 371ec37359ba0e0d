"""The device of this machine: the GPU that NVML finds, an Apple GPU, or the CPU with the memory a process may use."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from oomph.devices.cpu_rates import BUSY, cpu_rates, torch_version
from oomph.devices.device import Device
from oomph.devices.lookup import custom, find, with_memory
from oomph.errors import InputError
from oomph.units import MIB

SKIP_MEASURING = "OOMPH_MEASURE"  # if set to 0, the CPU is never measured
BF16_FLAGS = frozenset(("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"))  # the last is ARM's name


def detect(device: str = "cuda", measure: bool = True) -> Device:
    """The device that `device` ("cuda", "cuda:1", "mps", "cpu") means on this machine.

    If there is none, the CPU, with a note. With `measure=False`, or OOMPH_MEASURE=0 in the environment, the
    CPU's rates are known only if they are cached.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return this_cpu(measure)
    found = _apple() if kind == "mps" else _nvidia(int(index) if index.isdigit() else 0)
    if found is not None:
        return found
    cpu = this_cpu(measure)
    wanted = "Apple GPU" if kind == "mps" else "NVIDIA GPU"
    note = f"No {wanted} was found: this is the machine's CPU. Name a card with --gpu."
    return replace(cpu, notes=(note, *cpu.notes))


def may_measure() -> bool:
    """Whether this CPU may be measured: torch is installed, and OOMPH_MEASURE does not forbid it."""
    return os.environ.get(SKIP_MEASURING, "") != "0" and torch_version() is not None


def this_cpu(measure: bool = True) -> Device:
    """This machine's CPU, with measured rates if torch is installed."""
    cpu = read_cpu()
    measure = measure and may_measure()
    device = Device(
        name=cpu.name,
        kind="cpu",
        vendor="",
        arch="",
        threads=cpu.threads,
        memory_mib=cpu.memory_mib,
        usable_mib=cpu.available_mib,
        context_mib=0,
        has_bf16=cpu.has_bf16,
        source="this machine",
    )
    rates = cpu_rates(cpu.name, cpu.threads, measure)
    if rates is None:
        why = "was not measured." if torch_version() else "is not known: pip install 'oomph[train]' measures it."
        return replace(device, notes=(f"The CPU's speed {why}",))
    busy = (
        f"Other programs used the CPU for {rates.waited:.0%} of the time while its speed was measured: alone it may be "
        "faster than this, and it will be measured again next time.",
    )
    return replace(
        device,
        notes=busy if rates.waited > BUSY else (),
        cpu_rates=rates,
        context_mib=round(rates.process_mib or 0),
        optimizer_mib=round(rates.optimizer_mib or 0),
        transformers_mib=round(rates.transformers_mib or 0),
        bandwidth_gbs=rates.copy_gbs,
        tflops_bf16=rates.tflops_bf16 if cpu.has_bf16 else None,
        bf16_emulated_tflops=None if cpu.has_bf16 else rates.tflops_bf16,
        tflops_fp32=rates.tflops_fp32,
        gemm_tflops_low=rates.tflops_fp32,
        gemm_tflops_high=rates.tflops_fp32,
        source="this machine; rates measured with torch",
    )


def _nvidia(index: int) -> Device | None:
    """The card with that CUDA index, as NVML describes it; None if there is none."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = _handle(pynvml, index)
        return None if handle is None else _from_nvml(pynvml, handle)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _handle(pynvml: Any, index: int) -> Any:
    """NVML's handle for a CUDA index, given CUDA_VISIBLE_DEVICES, which renumbers and hides cards; None if hidden."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return pynvml.nvmlDeviceGetHandleByIndex(index)
    visible = [entry.strip() for entry in listed.split(",") if entry.strip()]
    if index >= len(visible) or visible[index].startswith("-"):
        return None
    if visible[index].isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(visible[index]))
    return pynvml.nvmlDeviceGetHandleByUUID(visible[index])


def _from_nvml(pynvml: Any, handle: Any) -> Device:
    name = pynvml.nvmlDeviceGetName(handle)
    name = name.decode() if isinstance(name, bytes) else str(name)
    memory_mib = pynvml.nvmlDeviceGetMemoryInfo(handle).total // MIB
    try:
        known = find(name, memory_mib)
        return replace(known, source=f"{known.source}; name and memory from the driver")
    except InputError:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        watts = _power_limit(pynvml, handle)
        unknown = custom(name, mib=memory_mib, watts=watts, compute_capability=major + minor / 10)
        note = "This card is not in the catalogue: give --gpu_tflops and --gpu_gbs to have its hours predicted."
        return replace(unknown, source="the driver", notes=(*unknown.notes, note))


def _power_limit(pynvml: Any, handle: Any) -> float | None:
    try:
        return float(pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)) / 1000
    except pynvml.NVMLError:  # laptops and virtual machines may not report it
        return None


def _apple() -> Device | None:
    """The GPU of an Apple chip, with this machine's memory."""
    if sys.platform != "darwin":
        return None
    cpu = read_cpu()
    try:
        return with_memory(find(cpu.name, cpu.memory_mib), cpu.memory_mib)
    except InputError:
        return None


# --- the CPU, as the operating system describes it ----------------------------------------------------


class Cpu(NamedTuple):
    """The processor and its memory, as the operating system reports them."""

    name: str
    threads: int  # usable by this process
    memory_mib: int  # RAM, or the container's limit
    available_mib: int  # of that, available now
    has_bf16: bool


def read_cpu(root: Path = Path("/"), platform: str = sys.platform) -> Cpu:
    """This machine's processor; `root` is the folder that holds /proc and /sys."""
    name, flags = _model(root, platform)
    total_mib, available_mib = _memory_mib(root, platform)
    return Cpu(name, usable_threads(root), total_mib, available_mib, bool(BF16_FLAGS & flags))


def usable_threads(root: Path = Path("/")) -> int:
    """Threads a process gets: OMP_NUM_THREADS if set, else the affinity mask within the container's quota."""
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
        import platform as machine  # slow to import, rarely needed

        name = machine.processor() or machine.machine() or "CPU"
    return " ".join(name.split()), flags


def _memory_mib(root: Path, platform: str) -> tuple[int, int]:
    """RAM in MiB, total and available, within the container's limit."""
    if platform == "win32":
        return _windows_memory_mib()
    if platform == "darwin":
        total_mib = int(_sysctl("hw.memsize") or 0) // MIB
        return total_mib, total_mib * 3 // 4  # macOS has no cheap way to ask what is available
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
    """The control groups of this process and their parents: version 2, then version 1."""
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
