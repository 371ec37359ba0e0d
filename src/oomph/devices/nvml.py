"""This machine's cards at one moment, as NVIDIA's driver reports them through NVML."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from oomph.units import MIB


class Sample(msgspec.Struct, frozen=True):
    """One card at one moment. A figure that the driver does not report is None."""

    gpu: int
    name: str
    total_mib: float
    used_mib: float
    utilization_percent: float | None = None
    watts: float | None = None
    celsius: float | None = None
    processes: tuple[tuple[int, float], ...] = ()  # (pid, MiB) of compute processes


Sampler = Callable[[], list[Sample]]


def nothing() -> list[Sample]:
    """A sampler that finds no cards."""
    return []


def sampler() -> Sampler:
    """A function that samples all cards; without a driver it finds none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, no driver, or no answer: each raises something else
        return nothing
    return lambda: _look(pynvml)


def _look(nvml: Any) -> list[Sample]:
    samples = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            name = nvml.nvmlDeviceGetName(handle)
            samples.append(
                Sample(
                    gpu=index,
                    name=name.decode() if isinstance(name, bytes) else str(name),
                    total_mib=memory.total / MIB,
                    used_mib=memory.used / MIB,
                    utilization_percent=_told(nvml, lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu, handle),
                    watts=_told(nvml, lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1e3, handle),
                    celsius=_told(nvml, lambda h: nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU), handle),
                    processes=_processes(nvml, handle),
                )
            )
    except nvml.NVMLError:
        return samples  # the driver stopped answering
    return samples


def _told(nvml: Any, ask: Callable[[Any], float], handle: Any) -> float | None:
    try:
        return float(ask(handle))
    except nvml.NVMLError:  # laptops and virtual machines report less
        return None


def _processes(nvml: Any, handle: Any) -> tuple[tuple[int, float], ...]:
    try:
        found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return ()
    return tuple((process.pid, process.usedGpuMemory / MIB) for process in found if process.usedGpuMemory)
