"""Memory over a step: bytes allocated at each moment, the peak and who holds it, and whether the process fits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from oomph.config import TrainConfig
from oomph.devices import Device
from oomph.predict.allocator.blocks import BLOCK_BYTES
from oomph.predict.allocator.replay import reserve
from oomph.predict.spread import Likely, context_spread_mib, kernels_mib, spread_of
from oomph.step.ops import Buffer, Kind, Op, Section, Step
from oomph.units import MIB, mib

CUDA_ROUNDING_BYTES = BLOCK_BYTES  # the caching allocator rounds every size up to a multiple of this
ROUNDING = "rounding by the allocator"


class Peak(msgspec.Struct, frozen=True):
    """The moment with the most allocated memory, and every buffer alive then, the largest first."""

    allocated_bytes: int  # each buffer rounded up; the caching allocator may add the tail of a block it does not split
    section: Section
    op: Op
    live: tuple[Buffer, ...]

    @property
    def at(self) -> str:
        """Where the peak is, in words: "micro-step 2, backward: lm_head"."""
        return f"{self.section.name}, {self.op.phase.value}: {self.op.name}"

    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind of buffer at the peak, before rounding."""
        totals: dict[Kind, int] = {}
        for buffer in self.live:
            totals[buffer.kind] = totals.get(buffer.kind, 0) + buffer.bytes
        return {kind.value: totals[kind] for kind in Kind if kind in totals}


def rounded(size_bytes: int, rounding_bytes: int) -> int:
    """`size_bytes` rounded up to a multiple of `rounding_bytes`, as the allocator counts it."""
    return -(-size_bytes // rounding_bytes) * rounding_bytes


def find_peak(steps: Step | Sequence[Step], rounding_bytes: int = CUDA_ROUNDING_BYTES) -> Peak:
    """The peak of a step, or of several, and every buffer alive at it. Of equal peaks, the first."""
    each = (steps,) if isinstance(steps, Step) else steps
    moments = [find_moment(step, rounding_bytes) for step in each]
    at = max(range(len(each)), key=lambda index: moments[index][0])
    step, (peak_bytes, section_index, op_index) = each[at], moments[at]
    section = step.sections[section_index]
    live = sorted(_live_at(step, section_index, op_index), key=lambda buffer: -buffer.bytes)
    return Peak(peak_bytes, section, section.ops[op_index], tuple(live))


def find_moment(step: Step, rounding_bytes: int = CUDA_ROUNDING_BYTES) -> tuple[int, int, int]:
    """The peak without its buffers: bytes, index of the section, index of the operation in it."""
    live_bytes = sum(rounded(buffer.bytes, rounding_bytes) for buffer in step.resident)
    peak_bytes, peak_at = live_bytes, (0, 0)
    most, mask = rounding_bytes - 1, -rounding_bytes  # `rounded` inlined, for powers of two: searches call this a lot
    for section_index, section in enumerate(step.sections):
        for op_index, op in enumerate(section.ops):
            if op.allocates:
                for buffer in op.allocates:
                    live_bytes += buffer.bytes + most & mask
                if live_bytes > peak_bytes:
                    peak_bytes, peak_at = live_bytes, (section_index, op_index)
            for buffer in op.frees:
                live_bytes -= buffer.bytes + most & mask
    return peak_bytes, *peak_at


def _live_at(step: Step, section_index: int, op_index: int) -> Sequence[Buffer]:
    """Every buffer alive while that operation runs."""
    alive: dict[Buffer, None] = dict.fromkeys(step.resident)
    for index, section in enumerate(step.sections[: section_index + 1]):
        last = op_index if index == section_index else len(section.ops)
        for position, op in enumerate(section.ops[: last + 1]):
            alive.update(dict.fromkeys(op.allocates))
            if (index, position) == (section_index, op_index):
                break
            for buffer in op.frees:
                del alive[buffer]
    return list(alive)


class Timeline(msgspec.Struct, frozen=True):
    """Bytes allocated while each operation runs, by kind of buffer."""

    sections: tuple[tuple[str, int], ...]  # (name, index of its first operation)
    ops: tuple[Op, ...]
    kinds: dict[Kind, tuple[int, ...]]  # before rounding; only the kinds that occur
    total_bytes: tuple[int, ...]  # after rounding


def timeline(step: Step, rounding_bytes: int = CUDA_ROUNDING_BYTES) -> Timeline:
    """Bytes allocated during each operation of the step."""
    now = dict.fromkeys(Kind, 0)
    for buffer in step.resident:
        now[buffer.kind] += buffer.bytes
    live_bytes = sum(rounded(buffer.bytes, rounding_bytes) for buffer in step.resident)
    sections: list[tuple[str, int]] = []
    ops: list[Op] = []
    totals: list[int] = []
    columns: dict[Kind, list[int]] = {kind: [] for kind in Kind}
    for section in step.sections:
        sections.append((section.name, len(ops)))
        for op in section.ops:
            for buffer in op.allocates:
                now[buffer.kind] += buffer.bytes
                live_bytes += rounded(buffer.bytes, rounding_bytes)
            ops.append(op)
            totals.append(live_bytes)
            for kind, size_bytes in now.items():
                columns[kind].append(size_bytes)
            for buffer in op.frees:
                now[buffer.kind] -= buffer.bytes
                live_bytes -= rounded(buffer.bytes, rounding_bytes)
    kinds = {kind: tuple(column) for kind, column in columns.items() if any(column)}
    return Timeline(tuple(sections), tuple(ops), kinds, tuple(totals))


class Share(msgspec.Struct, frozen=True):
    """One kind of buffer's share of the memory allocated at the peak."""

    name: str
    mib: float


class Footprint(msgspec.Struct, frozen=True):
    """The memory of one training process."""

    total_mib: float  # what nvidia-smi shows for the process, or would show if it fitted
    allocated_mib: float  # torch.cuda.max_memory_allocated
    reserved_mib: float  # torch.cuda.max_memory_reserved
    context_mib: float  # what the process takes before its first tensor
    capacity_mib: float | None  # what a process can use on this device, less the reserve
    fits: bool | None  # runs without an out-of-memory error, if necessary by emptying the allocator's cache
    p_fits: float | None  # the probability of that, 0 to 1
    headroom_mib: float | None  # capacity less the total; negative: what is missing
    retries: int  # how often the allocator has to empty its cache; each time costs time
    peak_at: str
    breakdown: tuple[Share, ...]  # adds up to allocated_mib
    low_mib: float  # the total lies between these in 95 of 100 runs
    high_mib: float
    peak: Peak

    @property
    def is_sure(self) -> bool:
        """Whether `fits` holds even if the prediction is off by its largest error. True if the room is not known."""
        if self.capacity_mib is None:
            return True
        return self.high_mib <= self.capacity_mib if self.fits else self.low_mib > self.capacity_mib

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract's `memory`."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "peak"}
        fields["breakdown"] = msgspec.to_builtins(self.breakdown)
        return fields


def footprint(
    steps: Sequence[Step], config: TrainConfig, device: Device, reserve_mib: float = 0.0, source: str = "described"
) -> Footprint:
    """The memory of a process that runs these steps, a run's first, one after another.

    `source` says where they come from: "described", or the kind of trace.
    """
    on_cpu = device.kind == "cpu"
    peak = _peak(tuple(steps), 1 if on_cpu else CUDA_ROUNDING_BYTES)
    context_mib = (device.context_mib or 0.0) + (kernels_mib(config) if device.kind == "cuda" else 0.0)
    capacity_mib = device.usable_mib - reserve_mib if device.usable_mib is not None else None
    room_mib = None if capacity_mib is None else capacity_mib - context_mib
    held = _on_cpu(peak, room_mib) if on_cpu else _on_gpu(steps, config, room_mib)
    total_mib = context_mib + held.reserved_mib
    spread, context_spread = spread_of(config, device.kind, source), context_spread_mib(config)
    likely = Likely(context_mib, held.allocated_mib, held.roomy_mib, spread, context_spread)
    return Footprint(
        total_mib=total_mib,
        allocated_mib=held.allocated_mib,
        reserved_mib=held.reserved_mib,
        context_mib=context_mib,
        capacity_mib=capacity_mib,
        fits=held.fits,
        p_fits=None if capacity_mib is None or held.fits is None else likely.p_fits(capacity_mib, held.fits),
        headroom_mib=None if capacity_mib is None else capacity_mib - total_mib,
        retries=held.retries,
        peak_at=peak.at,
        breakdown=_breakdown(peak, held.allocated_mib),
        low_mib=min(total_mib, likely.least_mib if held.retries else likely.low_mib),
        high_mib=max(total_mib, capacity_mib if held.retries and capacity_mib is not None else likely.high_mib),
        peak=peak,
    )


# The same steps have the same peak on every card, and reserve the same with unlimited capacity. Steps compare by
# identity, so a lookup costs next to nothing.
_peak = lru_cache(maxsize=4)(find_peak)
_roomy = lru_cache(maxsize=4)(reserve)


def _breakdown(peak: Peak, allocated_mib: float) -> tuple[Share, ...]:
    """Shares of the peak by kind; the last is the allocator's rounding."""
    shares = [Share(name, mib(size)) for name, size in peak.by_kind().items()]
    added_mib = allocated_mib - sum(share.mib for share in shares)
    return (*shares, Share(ROUNDING, added_mib)) if added_mib > 0 else tuple(shares)


class _Held(msgspec.Struct, frozen=True):
    """What the allocator holds, and whether the device has it."""

    allocated_mib: float
    reserved_mib: float
    roomy_mib: float  # what it reserves with unlimited capacity
    fits: bool | None
    retries: int = 0


def _on_cpu(peak: Peak, room_mib: float | None) -> _Held:
    """The CPU's allocator holds what is allocated: it keeps no cache."""
    allocated_mib = mib(peak.allocated_bytes)
    return _Held(allocated_mib, allocated_mib, allocated_mib, None if room_mib is None else allocated_mib <= room_mib)


def _on_gpu(steps: Sequence[Step], config: TrainConfig, room_mib: float | None) -> _Held:
    """With unlimited capacity first; if that is too much, with this card's, emptying the cache before failing."""
    roomy = _roomy(tuple(steps), None, config.expandable_segments)
    allocated_mib, reserved_mib = mib(roomy.peak_allocated_bytes), mib(roomy.peak_reserved_bytes)
    if room_mib is None or reserved_mib <= room_mib:
        return _Held(allocated_mib, reserved_mib, reserved_mib, None if room_mib is None else True)
    if 0 < allocated_mib <= room_mib:
        tight = reserve(steps, int(room_mib * MIB), config.expandable_segments)
        if tight.fits:
            peaks = mib(tight.peak_allocated_bytes), mib(tight.peak_reserved_bytes)
            return _Held(*peaks, reserved_mib, True, tight.retries)
    return _Held(allocated_mib, reserved_mib, reserved_mib, False)
