"""How much memory the run really takes, and the C library's habit of keeping what was freed."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

from oomph.units import MIB

_STATUS = Path("/proc/self/status")
_M_MMAP_THRESHOLD = -3  # glibc's malloc.h
_MMAP_BYTES = 2**21


def return_freed_memory() -> None:
    """Let glibc give every freed tensor of 2 MiB and more back to the kernel at once.

    By itself it keeps freed blocks of up to 32 MiB on its heap, full of holes: at 124 M parameters they were 200 MiB,
    a tenth of all. Blocks that are used again and again in small models stay below. Without glibc this does nothing.
    """
    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
    except (OSError, AttributeError):
        return


class MemoryMeter:
    """The run's memory: torch's allocator on a GPU; on the CPU what the process holds beyond what it began with."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.began_mib = 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif device.type == "cpu":
            self.began_mib = _status_mib("VmRSS")
            _forget_peak()

    def now_mib(self) -> float | None:
        """In use now: on a GPU the highest since the start, which is what one wants to see. None: nobody knows."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / MIB
        if self.device.type == "mps":
            return torch.mps.current_allocated_memory() / MIB
        resident = _status_mib("VmRSS")
        return resident - self.began_mib if resident else None

    def peak_mib(self) -> float | None:
        """The highest so far."""
        if self.device.type != "cpu":
            return self.now_mib()
        peak = _status_mib("VmHWM")
        return peak - self.began_mib if peak else None

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
    """Begin the peak anew, so that importing torch is not counted."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return
