"""The device of this machine: the card that NVML sees, an Apple GPU, or the CPU."""

from __future__ import annotations

import os
import sys
from typing import Any

from msgspec.structs import replace

from oomph.devices.busy import BUSY
from oomph.devices.by_numbers import custom
from oomph.devices.cpu import read_cpu
from oomph.devices.device import Device
from oomph.devices.lookup import find, with_memory
from oomph.devices.rates import cpu_rates, torch_version
from oomph.errors import InputError

SKIP_MEASURING = "OOMPH_MEASURE"  # set to 0, the CPU is never measured


def detect(device: str = "cuda", measure: bool = True) -> Device:
    """The device that `device` ("cuda", "cuda:1", "mps", "cpu") means on this machine.

    Without such a device it is the CPU, and a note says so. `measure=False`, or OOMPH_MEASURE=0 in
    the environment, leaves the CPU's rates out unless they are kept from before.
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
    """Whether a CPU whose rates are not kept could be measured: torch is here, and nobody forbade it."""
    return os.environ.get(SKIP_MEASURING, "") != "0" and torch_version() is not None


def this_cpu(measure: bool = True) -> Device:
    """The CPU of this machine, with measured rates where torch is installed."""
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
    rates = cpu_rates(cpu.name, cpu.threads, cpu.has_bf16, measure)
    if rates is None:
        why = "was not measured." if torch_version() else "is not known: pip install 'oomph[train]' measures it."
        return replace(device, notes=(f"The CPU's speed {why}",))
    busy = (
        f"Other programs had the CPU for {rates.waited:.0%} of the time in which its speed was measured: it is faster "
        "than this, and is measured again next time.",
    )
    return replace(
        device,
        notes=busy if rates.waited > BUSY else (),
        cpu_rates=rates,
        context_mib=round(rates.process_mib or 0),
        optimizer_mib=round(rates.optimizer_mib or 0),
        bandwidth_gbs=rates.copy_gbs,
        tflops_bf16=rates.tflops_bf16,
        tflops_fp32=rates.tflops_fp32,
        gemm_tflops_low=rates.tflops_fp32,
        gemm_tflops_high=rates.tflops_fp32,
        source="this machine; rates measured with torch",
    )


def _nvidia(index: int) -> Device | None:
    """The card with that CUDA index as NVML describes it, or None."""
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
    """NVML's handle of a CUDA index, or None: CUDA_VISIBLE_DEVICES renumbers the cards and hides some."""
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
    memory_mib = pynvml.nvmlDeviceGetMemoryInfo(handle).total // 2**20
    try:
        known = find(name, memory_mib)
        return replace(known, source=f"{known.source}; name and memory as the driver tells them")
    except InputError:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        watts = _power_limit(pynvml, handle)
        unknown = custom(name, mib=memory_mib, watts=watts, compute_capability=major + minor / 10)
        note = "The catalogue does not know this card: give --gpu_tflops and --gpu_gbs for its hours."
        return replace(unknown, source="as the driver tells it", notes=(*unknown.notes, note))


def _power_limit(pynvml: Any, handle: Any) -> float | None:
    try:
        return float(pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)) / 1000
    except pynvml.NVMLError:  # laptops and virtual machines may not tell
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
