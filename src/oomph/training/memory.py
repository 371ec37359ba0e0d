"""How much memory the run really takes, and the C library's habit of keeping what was freed."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import torch

from oomph.predict.cpu_kernels import OOMPH_KEPT_BYTES
from oomph.units import MIB

_STATUS = Path("/proc/self/status")
_M_MMAP_THRESHOLD = -3  # glibc's malloc.h


def return_freed_memory() -> None:
    """Let glibc give every freed tensor of 16 MiB and more back to the kernel at once.

    By itself it keeps freed blocks of up to 32 MiB on its heap, full of holes. From 2 MiB on would take 160 MiB less at
    124 M parameters, and a tenth more time, all of it spent on new pages. Without glibc this does nothing.
    """
    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, OOMPH_KEPT_BYTES)
    except (OSError, AttributeError):
        return


class MemoryMeter:
    """The run's memory at its highest: of torch's allocator on a GPU, of the whole process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.began_mib = _status_mib("VmRSS") if device.type == "cpu" else 0.0  # the process before the run
        self.forget()

    def let_go(self, loaded: dict[str, Any]) -> None:
        """Empty what was loaded before the run began: neither its beginning nor its peak counts it."""
        held_mib = _status_mib("VmRSS")
        loaded.clear()
        if self.device.type == "cpu":
            self.began_mib -= held_mib - _status_mib("VmRSS")
        self.forget()

    def forget(self) -> None:
        """Begin the peak anew: what was needed to get here is no part of it."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.device.type == "cpu":
            _forget_peak()

    def peak_mib(self) -> float | None:
        """The highest so far; on an Apple GPU what is allocated now. None: nobody knows."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / MIB
        if self.device.type == "mps":
            return torch.mps.current_allocated_memory() / MIB
        return _status_mib("VmHWM") or None

    def reserved_mib(self) -> float | None:
        """What the CUDA allocator has taken from the card; None elsewhere."""
        return torch.cuda.max_memory_reserved(self.device) / MIB if self.device.type == "cuda" else None


def _status_mib(field: str) -> float:
    """A figure of this process as Linux tells it; 0 elsewhere."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) / 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0.0


def _forget_peak() -> None:
    """Linux's own peak, begun anew from what the process holds now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return
