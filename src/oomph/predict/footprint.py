"""What a process takes on a device: allocated, reserved, the context around it; and whether that fits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from oomph.config import TrainConfig
from oomph.devices import Device
from oomph.predict.allocator import reserve
from oomph.predict.memory import CUDA_ROUNDING_BYTES, Peak, find_peak
from oomph.step.ops import Step
from oomph.units import MIB, mib

CONTEXT_SPREAD_MIB = 100.0  # the context's size is known to about this much, from card to card and driver to driver
ALLOCATED_SPREAD = 0.05  # what a simulated step may miss: kernels chosen, fusions, a library's own workspaces
ROUNDING = "rounding by the allocator"


class Part(msgspec.Struct, frozen=True):
    """One component of the allocated memory at the peak."""

    name: str
    mib: float


class Footprint(msgspec.Struct, frozen=True):
    """The memory of one training process."""

    total_mib: float  # what nvidia-smi shows for the process; what it would show, where it does not fit
    allocated_mib: float  # torch.cuda.max_memory_allocated
    reserved_mib: float  # torch.cuda.max_memory_reserved
    context_mib: float  # what the process takes before its first tensor
    capacity_mib: float | None  # what a process can use on this device, less what is kept free
    fits: bool | None  # runs without an out-of-memory error, the cache given back where need be
    headroom_mib: float | None  # capacity less the total; negative: what is missing
    retries: int  # how often the allocator has to give its cache back to get on; each costs time
    peak_at: str
    breakdown: tuple[Part, ...]  # sums to allocated_mib
    low_mib: float
    high_mib: float
    peak: Peak

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract's `memory`."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "peak"}
        fields["breakdown"] = msgspec.to_builtins(self.breakdown)
        return fields


def footprint(steps: Sequence[Step], config: TrainConfig, device: Device, reserve_mib: float = 0.0) -> Footprint:
    """The memory of a process that runs these steps, the run's first ones, one after another."""
    on_cpu = device.kind == "cpu"
    peak = _peak(tuple(steps), 1 if on_cpu else CUDA_ROUNDING_BYTES)
    context_mib = device.context_mib or 0.0
    capacity_mib = device.usable_mib - reserve_mib if device.usable_mib is not None else None
    room_mib = None if capacity_mib is None else capacity_mib - context_mib
    held = _on_cpu(peak, room_mib) if on_cpu else _on_gpu(steps, config, room_mib)
    total_mib = context_mib + held.reserved_mib
    return Footprint(
        total_mib=total_mib,
        allocated_mib=held.allocated_mib,
        reserved_mib=held.reserved_mib,
        context_mib=context_mib,
        capacity_mib=capacity_mib,
        fits=held.fits,
        headroom_mib=None if capacity_mib is None else capacity_mib - total_mib,
        retries=held.retries,
        peak_at=peak.at,
        breakdown=_breakdown(peak, held.allocated_mib),
        low_mib=held.allocated_mib * (1 - ALLOCATED_SPREAD) + max(0.0, context_mib - CONTEXT_SPREAD_MIB),
        high_mib=held.reserved_mib * (1 + ALLOCATED_SPREAD) + context_mib + CONTEXT_SPREAD_MIB,
        peak=peak,
    )


# On another card the same steps have the same peak, and take the same where there is room: they are told apart by
# identity, so that a search which never asks twice loses nothing.
_peak = lru_cache(maxsize=4)(find_peak)
_roomy = lru_cache(maxsize=4)(reserve)


def _breakdown(peak: Peak, allocated_mib: float) -> tuple[Part, ...]:
    """Shares of the peak; the last is what the allocator adds to what tensors ask for."""
    shares = [Part(name, mib(size)) for name, size in peak.by_kind().items()]
    added_mib = allocated_mib - sum(part.mib for part in shares)
    return (*shares, Part(ROUNDING, added_mib)) if added_mib > 0 else tuple(shares)


class _Held(msgspec.Struct, frozen=True):
    """What the allocator holds, and whether the device can give it."""

    allocated_mib: float
    reserved_mib: float
    fits: bool | None
    retries: int = 0


def _on_cpu(peak: Peak, room_mib: float | None) -> _Held:
    """The CPU's allocator keeps no cache."""
    allocated_mib = mib(peak.allocated_bytes)
    return _Held(allocated_mib, allocated_mib, None if room_mib is None else allocated_mib <= room_mib)


def _on_gpu(steps: Sequence[Step], config: TrainConfig, room_mib: float | None) -> _Held:
    """First on a card with room; where that is too much, on this card, which gives cache back before it fails."""
    roomy = _roomy(tuple(steps), None, config.expandable_segments)
    allocated_mib, reserved_mib = mib(roomy.peak_allocated_bytes), mib(roomy.peak_reserved_bytes)
    if room_mib is None or reserved_mib <= room_mib:
        return _Held(allocated_mib, reserved_mib, None if room_mib is None else True)
    if 0 < allocated_mib <= room_mib:
        tight = reserve(steps, int(room_mib * MIB), config.expandable_segments)
        if tight.fits:
            return _Held(mib(tight.peak_allocated_bytes), mib(tight.peak_reserved_bytes), True, tight.retries)
    return _Held(allocated_mib, reserved_mib, False)
