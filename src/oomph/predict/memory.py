"""How much is allocated at each moment, where the peak is, and who holds it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from oomph.step.ops import Buffer, Kind, Op, Section, Step

CUDA_ROUNDING_BYTES = 512  # kMinBlockSize in PyTorch's c10/core/AllocatorConfig.h


class Peak(msgspec.Struct, frozen=True):
    """The fullest moment, and every buffer alive in it, the largest first."""

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
    """`size_bytes` as the allocator books it, in multiples of a power of two; nothing for an empty tensor."""
    return -(-size_bytes // rounding_bytes) * rounding_bytes


def find_peak(steps: Step | Sequence[Step], rounding_bytes: int = CUDA_ROUNDING_BYTES) -> Peak:
    """The fullest moment of a step, or of several, and who holds it. The first of several equal ones."""
    each = (steps,) if isinstance(steps, Step) else steps
    moments = [find_moment(step, rounding_bytes) for step in each]
    at = max(range(len(each)), key=lambda index: moments[index][0])
    step, (peak_bytes, section_index, op_index) = each[at], moments[at]
    section = step.sections[section_index]
    live = sorted(_live_at(step, section_index, op_index), key=lambda buffer: -buffer.bytes)
    return Peak(peak_bytes, section, section.ops[op_index], tuple(live))


def find_moment(step: Step, rounding_bytes: int = CUDA_ROUNDING_BYTES) -> tuple[int, int, int]:
    """The fullest moment alone: its bytes, and the places of its section and its operation."""
    live_bytes = sum(rounded(buffer.bytes, rounding_bytes) for buffer in step.resident)
    peak_bytes, peak_at = live_bytes, (0, 0)
    most, mask = rounding_bytes - 1, -rounding_bytes  # `rounded`, for this is asked of thousands of buffers
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
    """What is allocated while each operation runs, by kind of buffer, in bytes before rounding."""

    sections: tuple[tuple[str, int], ...]  # (name, index of its first operation)
    ops: tuple[Op, ...]
    kinds: dict[Kind, tuple[int, ...]]  # only the kinds that occur
    total_bytes: tuple[int, ...]  # after rounding


def timeline(step: Step, rounding_bytes: int = CUDA_ROUNDING_BYTES) -> Timeline:
    """The whole step, operation by operation."""
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
