"""Everything the caching allocator does for a list of operations, in order: for a memory snapshot."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.predict.allocator import hand_over
from oomph.predict.allocator_blocks import ALLOCATED, UNMAPPED, Block
from oomph.predict.allocator_caching import CachingAllocator, OutOfMemoryError
from oomph.step.ops import Buffer, Step
from oomph.step.snapshot_write import Cause, Event, PlacedBlock, PlacedSegment, Timeline


def trace(
    steps: Step | Sequence[Step], capacity_bytes: int | None = None, expandable_segments: bool = False
) -> Timeline:
    """Run the steps as `reserve` does and keep every action. It ends with `oom` where a request fails."""
    recorder = _Recorder(capacity_bytes, expandable_segments)
    try:
        for step in (steps,) if isinstance(steps, Step) else steps:
            recorder.run(step)
    except OutOfMemoryError as full:
        recorder.events.append(Event("oom", full.shortage.free_bytes, full.shortage.tried_bytes, recorder.cause))
    return Timeline(tuple(recorder.events), tuple(recorder.segments()))


class _Recorder(CachingAllocator):
    """A caching allocator that writes down what it does, and why."""

    __slots__ = ("cause", "causes", "events", "live")

    def __init__(self, capacity_bytes: int | None, expandable_segments: bool) -> None:
        super().__init__(capacity_bytes, expandable_segments)
        self.events: list[Event] = []
        self.cause = Cause()
        self.live: dict[Buffer, Block] = {}
        self.causes: dict[Buffer, Cause] = {}  # of the live buffers

    def run(self, step: Step) -> None:
        self._begin(step.resident)
        for section in step.sections:
            for number, op in enumerate(section.ops, start=1):
                for buffer in op.allocates:
                    self._serve(Cause(buffer, section, op, number))
                for buffer in op.frees:
                    self._release(buffer)

    def _begin(self, resident: Sequence[Buffer]) -> None:
        gone, taken = hand_over(self.live, resident)
        for buffer in gone:
            self._release(buffer)
        for buffer in resident:
            if buffer not in taken:
                self._serve(Cause(buffer))
            elif (before := taken[buffer]) is not buffer:
                self.live[buffer], self.causes[buffer] = self.live.pop(before), self.causes.pop(before)

    def _serve(self, cause: Cause) -> None:
        self.cause = cause
        if (buffer := cause.buffer) is None:
            return
        block = self.live[buffer] = self.allocate(buffer.bytes)
        self.causes[buffer] = cause
        if block.size:
            self.events.append(Event("alloc", block.address, buffer.bytes, cause))

    def _release(self, buffer: Buffer) -> None:
        block, cause = self.live.pop(buffer), self.causes.pop(buffer)
        if block.size:
            self.events.append(Event("free", block.address, buffer.bytes, cause))
        self.free(block)

    def segment_obtained(self, address: int, size_bytes: int) -> None:
        action = "segment_map" if self.expandable_segments else "segment_alloc"
        self.events.append(Event(action, address, size_bytes, self.cause))

    def segment_released(self, address: int, size_bytes: int) -> None:
        action = "segment_unmap" if self.expandable_segments else "segment_free"
        self.events.append(Event(action, address, size_bytes, self.cause))

    def segments(self) -> list[PlacedSegment]:
        """What is mapped at the end: for an expandable segment, each range of pages without a gap."""
        causes = {block.address: self.causes[buffer] for buffer, block in self.live.items() if block.size}
        used = [block for block in self.live.values() if block.size]
        placed: list[PlacedSegment] = []
        for pool in (self.small, self.large):
            blocks = [block for block in used if self.pool_of(block.size) is pool] + pool.blocks
            heads = [block for block in blocks if block.prev is None or block.prev.key == UNMAPPED]
            for head in sorted(heads, key=lambda block: block.address):
                row: list[PlacedBlock] = []
                for block in head.chain():
                    if block.key == UNMAPPED:
                        break
                    cause = causes[block.address] if block.key == ALLOCATED else None
                    row.append(PlacedBlock(block.address, block.size, cause))
                placed.append(PlacedSegment(pool.name, self.expandable_segments, tuple(row)))
        return placed
