"""Measuring the run's memory, and making the C library return freed memory."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from oomph.devices import Device
from oomph.predict.cpu_kernels import OOMPH_KEPT_BYTES
from oomph.units import MIB

_STATUS = Path("/proc/self/status")
_M_MMAP_THRESHOLD = -3  # glibc's malloc.h
_MADV_DONTNEED = 4  # Linux's mman.h


def return_freed_memory() -> None:
    """Make glibc return every freed tensor of 16 MiB or more to the kernel at once. Does nothing without glibc.

    By default it keeps freed blocks of up to 32 MiB on a fragmented heap. A limit of 2 MiB would save another 160 MiB
    at 124 M parameters, but cost a tenth more time in page faults.
    """
    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, OOMPH_KEPT_BYTES)
    except (OSError, AttributeError):
        return


def drop_pages(mapped: Iterable[Tensor]) -> None:
    """Unload the pages of tensors in a memory-mapped checkpoint, once copied: else they count as the run's memory.

    They are read again from the file if needed. Does nothing except on Linux.
    """
    if sys.platform != "linux":
        return
    page = os.sysconf("SC_PAGE_SIZE")
    for tensor in mapped:
        first = -(-tensor.data_ptr() // page) * page
        whole = (tensor.data_ptr() + tensor.nbytes - first) // page * page
        if whole > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole), _MADV_DONTNEED)


class MemoryMeter:
    """The run's peak memory: of torch's allocator on a GPU, of the whole process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.began_mib = _status_mib("VmRSS") if device.type == "cpu" else 0.0  # the process before the run
        self.reset_peak()

    def with_own_share(self, hardware: Device) -> Device:
        """The CPU with this process's own memory before the run, imports included, instead of the measured one."""
        if not self.began_mib:
            return hardware
        return replace(hardware, context_mib=round(self.began_mib), optimizer_mib=0, transformers_mib=0)

    def reset_peak(self) -> None:
        """Restart the peak from the memory held now."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.device.type == "cpu":
            _reset_linux_peak()

    def peak_mib(self) -> float | None:
        """The peak so far; on an Apple GPU what is allocated now; None if unknown."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / MIB
        if self.device.type == "mps":
            return torch.mps.current_allocated_memory() / MIB
        return _status_mib("VmHWM") or None

    def reserved_mib(self) -> float | None:
        """The peak that CUDA's allocator reserved; None on other devices."""
        return torch.cuda.max_memory_reserved(self.device) / MIB if self.device.type == "cuda" else None


def _status_mib(field: str) -> float:
    """A field of Linux's /proc/self/status; 0 on other systems."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) / 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0.0


def _reset_linux_peak() -> None:
    """Reset VmHWM to what the process holds now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return
