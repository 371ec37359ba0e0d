"""Reads a real PyTorch memory snapshot as a step.

A real snapshot (`torch.cuda.memory._record_memory_history()`, then `_dump_snapshot(path)`) becomes the same
op list that the other sources write, so that every prediction runs on it and it can be compared with
a predicted one. Its history is a ring: buffers that were freed or are still alive without having been
allocated in it existed before it began.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from oomph.errors import InputError, Problem
from oomph.step.ops import Buffer, Kind, Op, Phase, Section, Step
from oomph.step.snapshot.write import CATEGORIES, Event, Origin, PlacedBlock, PlacedSegment, SnapshotTimeline, write

if TYPE_CHECKING:
    from oomph.step.snapshot.load import RawEntry, RawSegment, RawSnapshot

__all__ = [
    "Event",
    "FrameTotal",
    "Origin",
    "PlacedBlock",
    "PlacedSegment",
    "Recording",
    "SnapshotTimeline",
    "read",
    "write",
]  # fmt: skip

ROUNDING_BYTES = 512  # the allocator rounds sizes up to multiples of this (kMinBlockSize)
NO_FRAME = "no Python frame (autograd's own thread)"
BEFORE = "there before the history began"
LIBRARIES = ("site-packages", "dist-packages", "/torch/", "torchinductor_", "<frozen", "/lib/python3")

# Our kind for each of the viewer's categories; if several kinds share one, the first of them.
KINDS = {category: kind for kind, category in reversed(CATEGORIES.items())}


class FrameTotal(msgspec.Struct, frozen=True):
    """Bytes held by one line of a program."""

    frame: str  # "model.py:187 forward"
    bytes: int
    count: int


class Recording(msgspec.Struct, frozen=True, eq=False):
    """A real run's memory on one device."""

    device: int
    step: Step  # one operation per allocation, named by the line that made it; a kind only if the file has one
    allocated_curve: tuple[int, ...]  # bytes after each allocation or free, in order
    peak_bytes: int
    peak_index: int  # index in the curve; -1: before the history began
    live_at_peak: tuple[Buffer, ...]  # the largest first
    reserved_bytes: int  # at the end
    peak_reserved_bytes: int
    failures: tuple[tuple[int, int], ...]  # of each out-of-memory error: bytes requested, bytes the device had free
    from_the_start: bool  # whether the history has every allocation

    def by_frame(self) -> list[FrameTotal]:
        """The bytes that each line of the program holds at the peak, the largest first."""
        totals: dict[str, tuple[int, int]] = {}
        for buffer in self.live_at_peak:
            size, count = totals.get(buffer.name, (0, 0))
            totals[buffer.name] = (size + _rounded(buffer.bytes), count + 1)
        rows = [FrameTotal(frame, size, count) for frame, (size, count) in totals.items()]
        return sorted(rows, key=lambda row: (-row.bytes, row.frame))

    def largest(self, count: int = 20) -> tuple[Buffer, ...]:
        """The largest allocations alive at the peak."""
        return self.live_at_peak[:count]


def read(path: str | os.PathLike[str], device: int | None = None) -> Recording:
    """Read a snapshot; of several devices, the one holding most. Raises InputError; never runs code from the file."""
    from oomph.step.snapshot.load import load  # imports pickle, which nothing else needs

    raw = load(path)
    weights = _weights(raw)
    if device is None:
        device = max(weights, key=lambda at: weights[at], default=0)
    elif device not in weights:
        known = ", ".join(map(str, sorted(weights))) or "none"
        raise InputError(Problem(os.fspath(path), "the snapshot has no such device", str(device), known))
    segments = [segment for segment in raw.segments if segment.device == device]
    history = raw.device_traces[device] if 0 <= device < len(raw.device_traces) else []
    return _Replay(segments).run(device, history)


def _weights(raw: RawSnapshot) -> dict[int, tuple[int, int]]:
    """Each device's reserved bytes, and the length of its history."""
    weights = {at: (0, len(history)) for at, history in enumerate(raw.device_traces)}
    for segment in raw.segments:
        size, entries = weights.get(segment.device, (0, 0))
        weights[segment.device] = (size + segment.total_size, entries)
    return weights


class _Replay:
    """Replays the history: which buffer lives at which address."""

    def __init__(self, segments: Sequence[RawSegment]) -> None:
        self.segments = segments
        self.names: dict[int, tuple[str, Phase]] = {}  # by the identity of a frame list: many entries share one
        self.live: dict[int, Buffer] = {}
        self.before: list[Buffer] = []  # buffers alive when the history began
        self.ops: list[tuple[str, Phase, tuple[Buffer, ...], list[Buffer]]] = []
        self.changes: list[int] = []  # bytes, for each allocation and free
        self.reserved_changes: list[int] = []
        self.failures: list[tuple[int, int]] = []

    def run(self, device: int, history: Sequence[RawEntry]) -> Recording:
        for entry in history:
            if entry.action == "alloc":
                self._allocate(entry)
            elif entry.action == "free_requested":  # from here on torch.cuda.memory_allocated excludes it
                self._free(entry)
            elif entry.action in ("segment_alloc", "segment_map"):
                self.reserved_changes.append(entry.size)
            elif entry.action in ("segment_free", "segment_unmap"):
                self.reserved_changes.append(-entry.size)
            elif entry.action == "oom":
                self.failures.append((entry.size, entry.device_free))
        self._add_survivors()
        return self._recording(device)

    def _allocate(self, entry: RawEntry) -> None:
        name, phase = self._describe(entry.frames)
        buffer = Buffer(name, entry.size, KINDS.get(entry.category or "", Kind.TEMPORARY))
        if (stale := self.live.get(entry.addr)) is not None:  # its free was not recorded
            self._drop(stale)
        self.live[entry.addr] = buffer
        self.ops.append((name, phase, (buffer,), []))
        self.changes.append(_rounded(entry.size))

    def _free(self, entry: RawEntry) -> None:
        buffer = self.live.pop(entry.addr, None)
        if buffer is None:
            buffer = Buffer(BEFORE, entry.size, KINDS.get(entry.category or "", Kind.TEMPORARY))
            self.before.append(buffer)
        self._drop(buffer)

    def _drop(self, buffer: Buffer) -> None:
        if not self.ops:
            self.ops.append((BEFORE, Phase.FORWARD, (), []))
        self.ops[-1][3].append(buffer)
        self.changes.append(-_rounded(buffer.bytes))

    def _add_survivors(self) -> None:
        """Add the blocks in use at the end that the history did not allocate: they were alive all the time."""
        for segment in self.segments:
            address = segment.address
            for block in segment.blocks:
                if block.state == "active_allocated" and address not in self.live:
                    size = block.size if block.requested_size is None else block.requested_size
                    name = self._describe(block.frames)[0] if block.frames else BEFORE
                    self.before.append(Buffer(name, size, Kind.TEMPORARY))
                address += block.size

    def _describe(self, frames: object) -> tuple[str, Phase]:
        known = self.names.get(id(frames))
        if known is None:
            known = self.names[id(frames)] = _name_and_phase(frames)
        return known

    def _recording(self, device: int) -> Recording:
        curve, peak_bytes, peak_index = _curve(sum(_rounded(b.bytes) for b in self.before), self.changes)
        ops = tuple(Op(name, phase, allocates, tuple(frees)) for name, phase, allocates, frees in self.ops)
        sections = (Section("recorded", ops),) if ops else ()
        reserved_bytes = sum(segment.total_size for segment in self.segments)
        reserved_at_start = reserved_bytes - sum(self.reserved_changes)
        live = _live_after(self.before, ops, peak_index)
        return Recording(
            device=device,
            step=Step(tuple(self.before), sections),
            allocated_curve=curve,
            peak_bytes=peak_bytes,
            peak_index=peak_index,
            live_at_peak=tuple(sorted(live, key=lambda buffer: -buffer.bytes)),
            reserved_bytes=reserved_bytes,
            peak_reserved_bytes=_curve(reserved_at_start, self.reserved_changes)[1],
            failures=tuple(self.failures),
            from_the_start=not self.before,
        )


def _curve(start: int, changes: Iterable[int]) -> tuple[tuple[int, ...], int, int]:
    """The running total, its maximum, and the first index of that; -1 is the start."""
    now = peak = start
    peak_index = -1
    curve: list[int] = []
    for index, change in enumerate(changes):
        now += change
        curve.append(now)
        if now > peak:
            peak, peak_index = now, index
    return tuple(curve), peak, peak_index


def _live_after(before: Iterable[Buffer], ops: Iterable[Op], last: int) -> list[Buffer]:
    """The buffers alive after the allocation or free at that index."""
    live = dict.fromkeys(before)
    changes = 0
    for op in ops:
        for buffer in op.allocates:
            if changes > last:
                return list(live)
            live[buffer] = None
            changes += 1
        for buffer in op.frees:
            if changes > last:
                return list(live)
            del live[buffer]
            changes += 1
    return list(live)


def _name_and_phase(frames: object) -> tuple[str, Phase]:
    """The innermost line of the user's own program, or else the innermost line; and the phase it implies."""
    known = [frame for frame in frames if _is_frame(frame)] if isinstance(frames, (list, tuple)) else []
    if not known:
        return NO_FRAME, Phase.BACKWARD
    python = [frame for frame in known if frame["filename"].endswith(".py") or frame["filename"].startswith("<")]
    own = [frame for frame in python if not any(library in frame["filename"] for library in LIBRARIES)]
    frame = (own or python or known)[0]
    file = frame["filename"].replace("\\", "/").rsplit("/", 1)[-1]
    name = f"{file}:{frame['line']} {frame['name']}"[:200]
    # The file is untrusted, and its names are printed to a terminal.
    return "".join(letter if letter.isprintable() else "?" for letter in name), _phase(known)


def _is_frame(frame: object) -> bool:
    return (
        isinstance(frame, dict)
        and isinstance(frame.get("filename"), str)
        and isinstance(frame.get("name"), str)
        and isinstance(frame.get("line"), int)
    )


def _phase(frames: Sequence[dict[str, str]]) -> Phase:
    for frame in frames:
        if "torch/optim/" in frame["filename"].replace("\\", "/"):
            return Phase.OPTIMIZER
        if "clip_grad" in frame["name"]:
            return Phase.CLIP
        if "cross_entropy" in frame["name"]:
            return Phase.LOSS
        if frame["name"] == "backward":
            return Phase.BACKWARD
    return Phase.FORWARD


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // ROUNDING_BYTES) * ROUNDING_BYTES
