"""Write a predicted timeline as a memory snapshot that PyTorch's own viewer (pytorch.org/memory_viz) opens.

The viewer reads pickles of protocol 4 that hold only plain containers. Each allocation carries two frames:
the buffer, and the operation that allocates it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from oomph.errors import InputError, Problem
from oomph.step.ops import Buffer, Kind, Op, Section

PICKLE_PROTOCOL = 4  # 5 leaves the viewer's page blank

# The viewer colours by these. If any category is used, one entry must be "unknown", or the viewer stops.
CATEGORIES = {
    Kind.PARAMETERS: "parameter",
    Kind.GATHERED: "parameter",
    Kind.GRADIENTS: "gradient",
    Kind.OPTIMIZER: "optimizer_state",
    Kind.HALF_WEIGHTS: "autograd_detail",
    Kind.ACTIVATIONS: "activation",
    Kind.ATTENTION: "activation",
    Kind.LOGITS: "activation",
    Kind.TEMPORARY: "temporary",
    Kind.WORKSPACE: "temporary",
    Kind.INPUTS: "input",
    Kind.COMMUNICATION: "temporary",
}
UNKNOWN_CATEGORY = "unknown"


class Origin(msgspec.Struct, frozen=True, eq=False):
    """The buffer that an allocator action is for, and the operation that causes it (none: before the step)."""

    buffer: Buffer | None = None
    section: Section | None = None
    op: Op | None = None
    op_number: int = 0  # counted from 1 within its section

    def frames(self) -> list[dict[str, Any]]:
        """Innermost first, as PyTorch orders them; the viewer shows each as `filename:line:name`."""
        frames: list[dict[str, Any]] = []
        if self.buffer is not None:
            frames.append({"filename": self.buffer.kind.value, "line": 0, "name": self.buffer.name})
        if self.section is None or self.op is None:
            frames.append({"filename": "before the step", "line": 0, "name": "resident"})
        else:
            where = f"{self.section.name}, {self.op.phase.value}"
            frames.append({"filename": where, "line": self.op_number, "name": self.op.name})
        return frames


class Event(msgspec.Struct, frozen=True, eq=False):
    """One action of the allocator."""

    action: str  # alloc, free, segment_alloc, segment_free, segment_map, segment_unmap, oom
    address: int  # for oom: how many bytes the device had free
    size_bytes: int
    origin: Origin


class PlacedBlock(msgspec.Struct, frozen=True, eq=False):
    """A block of a segment at the end, and what it is used for; None if it is free."""

    address: int
    size_bytes: int
    origin: Origin | None


class PlacedSegment(msgspec.Struct, frozen=True, eq=False):
    """A segment at the end. Its blocks tile it in order."""

    pool: str  # "small", "large"
    expandable: bool
    blocks: tuple[PlacedBlock, ...]


class SnapshotTimeline(msgspec.Struct, frozen=True, eq=False):
    """Everything an allocator did, and what it held at the end."""

    events: tuple[Event, ...]
    segments: tuple[PlacedSegment, ...]


def write(timeline: SnapshotTimeline, path: str | os.PathLike[str]) -> Path:
    """Write the snapshot. Readers see the old file or the whole new one, never a part."""
    import pickle

    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            pickle.dump(to_plain(timeline), file, protocol=PICKLE_PROTOCOL)
        temporary.replace(target)
    except OSError as error:
        raise InputError(Problem(str(target), f"cannot be written: {error.strerror or error}")) from None
    finally:
        with suppress(OSError):
            temporary.unlink()
    return target


def to_plain(timeline: SnapshotTimeline) -> dict[str, Any]:
    """The snapshot in plain containers, as torch.cuda.memory._snapshot() returns one."""
    entries: list[dict[str, Any]] = []
    for event in timeline.events:
        _append(entries, event)
    return {
        "segments": [_segment(segment) for segment in timeline.segments],
        "device_traces": [entries],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _append(entries: list[dict[str, Any]], event: Event) -> None:
    entry: dict[str, Any] = {"size": event.size_bytes, "stream": 0, "frames": event.origin.frames()}
    if event.action == "oom":
        entry["device_free"] = event.address
    else:
        entry["addr"] = event.address
    buffer = event.origin.buffer
    is_data = buffer is not None and event.action in ("alloc", "free")
    entry["category"] = CATEGORIES[buffer.kind] if is_data and buffer is not None else UNKNOWN_CATEGORY
    # One stream only, so a freed block is reusable at once: two entries in a row.
    actions = ("free_requested", "free_completed") if event.action == "free" else (event.action,)
    for action in actions:
        entries.append({"action": action, "time_us": len(entries), **entry})


def _segment(segment: PlacedSegment) -> dict[str, Any]:
    blocks = [_block(block) for block in segment.blocks]
    used = [block for block in blocks if block["state"] == "active_allocated"]
    used_bytes = sum(block["size"] for block in used)
    return {
        "device": 0,
        "address": segment.blocks[0].address,
        "total_size": sum(block["size"] for block in blocks),
        "allocated_size": used_bytes,
        "active_size": used_bytes,
        "requested_size": sum(block["requested_size"] for block in used),
        "stream": 0,
        "segment_type": segment.pool,
        "segment_pool_id": (0, 0),
        "is_expandable": segment.expandable,
        "frames": [],
        "blocks": blocks,
    }


def _block(block: PlacedBlock) -> dict[str, Any]:
    origin = block.origin
    requested_bytes = origin.buffer.bytes if origin is not None and origin.buffer is not None else 0
    return {
        "address": block.address,
        "size": block.size_bytes,
        "requested_size": requested_bytes,
        "state": "inactive" if origin is None else "active_allocated",
        "frames": [] if origin is None else origin.frames(),
    }
