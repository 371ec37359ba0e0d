"""What PyTorch reserves for a list of operations: the list run through its caching allocator."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from oomph.predict.allocator_blocks import Block
from oomph.predict.allocator_caching import CachingAllocator, OutOfMemoryError, Shortage
from oomph.step.ops import Buffer, Op, Section, Step

__all__ = ["CachingAllocator", "OutOfMemoryError", "Place", "Reserved", "Shortage", "hand_over", "reserve"]

BEFORE_THE_STEP = "before the first operation"


class Place(msgspec.Struct, frozen=True):
    """An operation, and the section it stands in; neither for what is allocated before a step begins."""

    section: Section | None = None
    op: Op | None = None

    def __str__(self) -> str:
        if self.section is None or self.op is None:
            return BEFORE_THE_STEP
        return f"{self.section.name}, {self.op.phase.value}: {self.op.name}"


class Reserved(msgspec.Struct, frozen=True):
    """What the allocator had done when the steps ended, or when a request failed."""

    peak_reserved_bytes: int  # torch.cuda.max_memory_reserved: with the CUDA context, what nvidia-smi shows
    peak_reserved_at: Place  # where the reserved memory first reached its peak
    allocated_at_peak_bytes: int  # allocated while that operation ran; the rest of the peak is cache
    peak_allocated_bytes: int  # torch.cuda.max_memory_allocated
    reserved_bytes: int  # at the end
    allocated_bytes: int  # at the end
    largest_free_block_bytes: int  # at the end
    retries: int  # how often the cache was emptied to serve a request (num_alloc_retries): each costs time
    failure: Shortage | None = None  # the request that failed, if one did: the steps end there
    failed_at: Place | None = None
    failed_buffer: Buffer | None = None

    @property
    def fits(self) -> bool:
        return self.failure is None


def reserve(
    steps: Step | Sequence[Step], capacity_bytes: int | None = None, expandable_segments: bool = False
) -> Reserved:
    """Run the steps one after another through one allocator that may reserve `capacity_bytes` in all."""
    fold = _Fold(CachingAllocator(capacity_bytes, expandable_segments))
    try:
        for step in (steps,) if isinstance(steps, Step) else steps:
            fold.run(step)
    except OutOfMemoryError as full:
        return fold.result(full.shortage)
    return fold.result()


def hand_over(live: dict[Buffer, Block], resident: Sequence[Buffer]) -> tuple[list[Buffer], dict[Buffer, Buffer]]:
    """How a step takes over from the one before it: what is let go, and which live buffer each resident one is.

    A resident buffer is a live one where it is the same object, or else has the same name and size. Live
    buffers that the step does not list are let go, so that a step begins with its resident buffers alone.
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


class _Fold:
    """The state of a run through an allocator: which block each live buffer has, and where the peak came."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.live: dict[Buffer, Block] = {}
        self.peak_reserved_bytes = 0
        self.peak_at: tuple[Section | None, Op | None] = (None, None)
        self.allocated_at_peak_bytes = 0
        self.now: tuple[Section | None, Op | None, Buffer | None] = (None, None, None)

    def run(self, step: Step) -> None:
        self._begin(step.resident)
        allocator, live = self.allocator, self.live
        allocate, free = allocator.allocate, allocator.free
        section = op = buffer = None
        try:
            for section in step.sections:
                for op in section.ops:
                    if op.allocates:
                        for buffer in op.allocates:
                            live[buffer] = allocate(buffer.bytes)
                        if allocator.peak_reserved_bytes > self.peak_reserved_bytes:
                            self._note_peak(section, op)
                    for buffer in op.frees:
                        free(live.pop(buffer))
        except OutOfMemoryError:
            self.now = (section, op, buffer)
            raise

    def _begin(self, resident: Sequence[Buffer]) -> None:
        gone, taken = hand_over(self.live, resident)
        before, self.live = self.live, {}
        for buffer in gone:
            self.allocator.free(before[buffer])
        for buffer in resident:
            self.now = (None, None, buffer)
            self.live[buffer] = before[taken[buffer]] if buffer in taken else self.allocator.allocate(buffer.bytes)
        if self.allocator.peak_reserved_bytes > self.peak_reserved_bytes:
            self._note_peak(None, None)

    def _note_peak(self, section: Section | None, op: Op | None) -> None:
        self.peak_reserved_bytes = self.allocator.peak_reserved_bytes
        self.allocated_at_peak_bytes = self.allocator.allocated_bytes
        self.peak_at = (section, op)

    def result(self, failure: Shortage | None = None) -> Reserved:
        allocator = self.allocator
        section, op, buffer = self.now
        if allocator.peak_reserved_bytes > self.peak_reserved_bytes:  # the operation that failed had reserved more
            self._note_peak(section, op)
        return Reserved(
            peak_reserved_bytes=self.peak_reserved_bytes,
            peak_reserved_at=Place(*self.peak_at),
            allocated_at_peak_bytes=self.allocated_at_peak_bytes,
            peak_allocated_bytes=allocator.peak_allocated_bytes,
            reserved_bytes=allocator.reserved_bytes,
            allocated_bytes=allocator.allocated_bytes,
            largest_free_block_bytes=allocator.largest_free_block_bytes,
            retries=allocator.retries,
            failure=failure,
            failed_at=Place(section, op) if failure else None,
            failed_buffer=buffer if failure else None,
        )
