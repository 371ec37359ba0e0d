"""Runs a list of operations through the caching allocator: what is reserved, or every event for a memory snapshot."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from oomph.predict.allocator.blocks import ALLOCATED, UNMAPPED, MemoryBlock
from oomph.predict.allocator.caching import CachingAllocator, OutOfMemoryError
from oomph.step.ops import Buffer, Kind, Step
from oomph.step.snapshot.write import Event, Origin, PlacedBlock, PlacedSegment, SnapshotTimeline

IN_FLIGHT = 2  # FSDP1's limit_all_gathers: how many gathered units the host may be ahead by (_limiter_utils.py)


class Reserved(msgspec.Struct, frozen=True):
    """The allocator's counters when the steps ended, or when a request failed."""

    peak_reserved_bytes: int  # torch.cuda.max_memory_reserved: with the CUDA context, what nvidia-smi shows
    peak_allocated_bytes: int  # torch.cuda.max_memory_allocated
    reserved_bytes: int  # at the end
    allocated_bytes: int  # at the end
    retries: int  # how often the cache was emptied to serve a request (num_alloc_retries): each costs time
    fits: bool  # False: a request failed, and the steps ended there


def reserve(
    steps: Step | Sequence[Step], capacity_bytes: int | None = None, expandable_segments: bool = False
) -> Reserved:
    """What the steps reserve of `capacity_bytes` (None: unlimited), run one after another."""
    allocator = CachingAllocator(capacity_bytes, expandable_segments)
    fits = True
    try:
        _run((steps,) if isinstance(steps, Step) else steps, allocator)
    except OutOfMemoryError:
        fits = False
    return Reserved(
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        reserved_bytes=allocator.reserved_bytes,
        allocated_bytes=allocator.allocated_bytes,
        retries=allocator.retries,
        fits=fits,
    )


def _run(steps: Sequence[Step], allocator: CachingAllocator) -> None:
    allocate, free = allocator.allocate, allocator.free
    live: dict[Buffer, MemoryBlock] = {}
    for step in steps:
        gone, taken = _hand_over(live, step.resident)
        before, live = live, {}
        for buffer in gone:
            _free(allocator, buffer, before[buffer])
        for buffer in step.resident:
            live[buffer] = before[taken[buffer]] if buffer in taken else _allocate(allocator, buffer)
        for section in step.sections:
            for op in section.ops:  # the innermost loop of a plan: buffers of the main stream take the short path
                for buffer in op.allocates:
                    live[buffer] = _allocate(allocator, buffer) if buffer.stream else allocate(buffer.bytes)
                for buffer in op.frees:
                    block = live.pop(buffer)
                    if buffer.stream:
                        _free(allocator, buffer, block)
                    else:
                        free(block)


def _allocate(allocator: CachingAllocator, buffer: Buffer) -> MemoryBlock:
    if not buffer.stream:
        return allocator.allocate(buffer.bytes)
    if buffer.recorded and buffer.kind is Kind.GATHERED:
        allocator.catch_up(IN_FLIGHT - 1)
    allocator.enter(buffer.stream)
    block = allocator.allocate(buffer.bytes)
    allocator.enter(0)
    return block


def _free(allocator: CachingAllocator, buffer: Buffer, block: MemoryBlock) -> None:
    if buffer.recorded:
        allocator.free_later(block, buffer.stream, buffer.kind is Kind.GATHERED)
        return
    if not buffer.stream:
        allocator.free(block)
        return
    allocator.enter(buffer.stream)
    allocator.free(block)
    allocator.enter(0)


def _hand_over(
    live: dict[Buffer, MemoryBlock], resident: Sequence[Buffer]
) -> tuple[list[Buffer], dict[Buffer, Buffer]]:
    """The handover between two steps: the buffers to free, and the live buffer behind each resident one.

    A resident buffer is a live one if it is the same object, or else has the same name and size. Live buffers that
    the step does not list are freed, so that it begins with its resident buffers alone.
    """
    taken = {buffer: buffer for buffer in resident if buffer in live}
    spare: dict[tuple[str, int], list[Buffer]] = {}
    for buffer in live:
        if buffer not in taken:
            spare.setdefault((buffer.name, buffer.bytes), []).append(buffer)
    for buffer in resident:
        if buffer not in taken and (same := spare.get((buffer.name, buffer.bytes))):
            taken[buffer] = same.pop(0)
    return [buffer for left in spare.values() for buffer in left], taken


def record(
    steps: Step | Sequence[Step], capacity_bytes: int | None = None, expandable_segments: bool = False
) -> SnapshotTimeline:
    """Every event of the steps run as `reserve` runs them, for a snapshot. Ends with `oom` where a request fails."""
    recorder = _EventRecorder(capacity_bytes, expandable_segments)
    try:
        for step in (steps,) if isinstance(steps, Step) else steps:
            recorder.run(step)
    except OutOfMemoryError as full:
        recorder.events.append(Event("oom", full.free_bytes, full.tried_bytes, recorder.origin))
    return SnapshotTimeline(tuple(recorder.events), tuple(recorder.segments()))


class _EventRecorder(CachingAllocator):
    """A caching allocator that records each event with the operation that caused it."""

    __slots__ = ("events", "live", "origin", "origins")

    def __init__(self, capacity_bytes: int | None, expandable_segments: bool) -> None:
        super().__init__(capacity_bytes, expandable_segments)
        self.events: list[Event] = []
        self.origin = Origin()
        self.live: dict[Buffer, MemoryBlock] = {}
        self.origins: dict[Buffer, Origin] = {}  # the live buffers'

    def run(self, step: Step) -> None:
        self._begin(step.resident)
        for section in step.sections:
            for number, op in enumerate(section.ops, start=1):
                for buffer in op.allocates:
                    self._serve(Origin(buffer, section, op, number))
                for buffer in op.frees:
                    self._release(buffer)

    def _begin(self, resident: Sequence[Buffer]) -> None:
        gone, taken = _hand_over(self.live, resident)
        for buffer in gone:
            self._release(buffer)
        for buffer in resident:
            if buffer not in taken:
                self._serve(Origin(buffer))
            elif (before := taken[buffer]) is not buffer:
                self.live[buffer], self.origins[buffer] = self.live.pop(before), self.origins.pop(before)

    def _serve(self, origin: Origin) -> None:
        self.origin = origin
        if (buffer := origin.buffer) is None:
            return
        block = self.live[buffer] = _allocate(self, buffer)
        self.origins[buffer] = origin
        if block.size:
            self.events.append(Event("alloc", block.address, buffer.bytes, origin))

    def _release(self, buffer: Buffer) -> None:
        block, origin = self.live.pop(buffer), self.origins.pop(buffer)
        if block.size:
            self.events.append(Event("free", block.address, buffer.bytes, origin))
        _free(self, buffer, block)

    def segment_obtained(self, address: int, size_bytes: int) -> None:
        action = "segment_map" if self.expandable_segments else "segment_alloc"
        self.events.append(Event(action, address, size_bytes, self.origin))

    def segment_released(self, address: int, size_bytes: int) -> None:
        action = "segment_unmap" if self.expandable_segments else "segment_free"
        self.events.append(Event(action, address, size_bytes, self.origin))

    def segments(self) -> list[PlacedSegment]:
        """The segments mapped at the end; of an expandable segment, each contiguous range of pages."""
        origins = {block.address: self.origins[buffer] for buffer, block in self.live.items() if block.size}
        placed: list[PlacedSegment] = []
        for stream, pool in [(stream, pool) for stream, pools in self.streams.items() for pool in pools]:
            self.enter(stream)
            used = [block for buffer, block in self.live.items() if block.size and buffer.stream == stream]
            blocks = [block for block in used if self.pool_of(block.size) is pool] + pool.blocks
            heads = [block for block in blocks if block.prev is None or block.prev.key == UNMAPPED]
            for head in sorted(heads, key=lambda block: block.address):
                row: list[PlacedBlock] = []
                for block in head.chain():
                    if block.key == UNMAPPED:
                        break
                    origin = origins[block.address] if block.key == ALLOCATED else None
                    row.append(PlacedBlock(block.address, block.size, origin))
                placed.append(PlacedSegment(pool.name, self.expandable_segments, tuple(row)))
        return placed
