"""Memory over one step for the page: a few hundred points, and what is alive at the peak."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import msgspec

from oomph.errors import InputError, Problem
from oomph.planning.plan import Plan
from oomph.predict.memory import CUDA_ROUNDING_BYTES, Peak
from oomph.report.timeline import step_with
from oomph.step.ops import Buffer, Kind, Op, Step
from oomph.units import mib

POINTS = 320
HOLDERS = 12
_BLOCK = re.compile(r"\.\d+\.")


class PeakHolder(msgspec.Struct, frozen=True):
    """A buffer alive at the peak, or the same one of every layer."""

    name: str
    mib: float
    count: int


class TimelinePeak(msgspec.Struct, frozen=True):
    """The operation at which most is allocated."""

    index: int
    bytes: int
    op: str
    at: str
    holders: list[PeakHolder]


class Moment(msgspec.Struct, frozen=True):
    """What is alive while one operation runs."""

    op: str
    bytes: int
    holders: list[PeakHolder]


class TimelinePhase(msgspec.Struct, frozen=True):
    """A part of the step, from one operation to another."""

    name: str
    start: int
    end: int


class StepTimeline(msgspec.Struct, frozen=True):
    """The memory over one step. Of operations too close to tell apart it has the fullest."""

    points: list[tuple[int, int]]  # an operation, and the bytes allocated while it runs
    ops: list[str]  # the operation at each point
    kinds: dict[str, list[int]]  # bytes at each point by kind of buffer
    peak: TimelinePeak
    phases: list[TimelinePhase]
    length: int  # operations of the step


def timeline_of(plan: Plan) -> StepTimeline:
    """The timeline of the step with the peak."""
    return _timeline(plan.steps, plan.memory.peak, 1 if plan.device.kind == "cpu" else CUDA_ROUNDING_BYTES)


@lru_cache(maxsize=4)  # it does not depend on the card or on prices
def _timeline(steps: tuple[Step, ...], peak: Peak, rounding: int) -> StepTimeline:
    step = step_with(peak, steps)
    points = _points(step, rounding)
    before, index = 0, 0
    phases = []
    for section in step.sections:
        phases.append(TimelinePhase(section.name, before, before + len(section.ops)))
        if section is peak.section:
            index = before + next(at for at, op in enumerate(section.ops) if op is peak.op)
        before += len(section.ops)
    kinds = {kind: [point.kinds[at] for point in points] for at, kind in enumerate(Kind)}
    return StepTimeline(
        points=[(point.at, point.total) for point in points],
        ops=[f"{point.op.phase.value}: {point.op.name}" for point in points],
        kinds={kind.value: column for kind, column in kinds.items() if any(column)},
        peak=TimelinePeak(index, peak.allocated_bytes, peak.op.name, peak.at, holders(peak.live)),
        phases=phases,
        length=before,
    )


def moment(plan: Plan, index: int) -> Moment:
    """What is alive during that operation of the step with the peak. Raises `InputError` if there is no such one."""
    rounding = 1 if plan.device.kind == "cpu" else CUDA_ROUNDING_BYTES
    step = step_with(plan.memory.peak, plan.steps)
    live = {id(buffer): buffer for buffer in step.resident}
    ops = [op for section in step.sections for op in section.ops]
    if index >= len(ops):
        raise InputError(Problem("at", "beyond the step's last operation", str(index), f"0 to {len(ops) - 1}"))
    for op in ops[: index + 1]:
        live.update((id(buffer), buffer) for buffer in op.allocates)
        if op is not ops[index]:
            for buffer in op.frees:
                live.pop(id(buffer), None)
    total = sum(-(-buffer.bytes // rounding) * rounding for buffer in live.values())
    return Moment(f"{ops[index].phase.value}: {ops[index].name}", total, holders(live.values()))


def holders(live: Iterable[Buffer]) -> list[PeakHolder]:
    """What is alive, largest first; the same buffer of every layer is one entry."""
    sizes: dict[str, tuple[int, int]] = {}
    for buffer in live:
        name = _BLOCK.sub(".*.", buffer.name, count=1)
        size, count = sizes.get(name, (0, 0))
        sizes[name] = (size + buffer.bytes, count + 1)
    largest = sorted(sizes.items(), key=lambda item: -item[1][0])[:HOLDERS]
    return [PeakHolder(name, mib(size), count) for name, (size, count) in largest]


class _Point(NamedTuple):
    at: int  # the operation's index in the step
    total: int  # bytes, each buffer rounded up
    op: Op
    kinds: list[int]  # bytes of each kind, in the order of `Kind`


def _points(step: Step, rounding: int) -> list[_Point]:
    """The operation with most memory of each bucket, in one pass; of equal ones the first, as for the peak."""
    length = sum(len(section.ops) for section in step.sections)
    now = dict.fromkeys(Kind, 0)
    total = 0
    for buffer in step.resident:
        now[buffer.kind] += buffer.bytes
        total += -(-buffer.bytes // rounding) * rounding
    points: list[_Point] = []
    at, bucket, fullest = 0, -1, -1
    for section in step.sections:
        for op in section.ops:
            for buffer in op.allocates:
                now[buffer.kind] += buffer.bytes
                total += -(-buffer.bytes // rounding) * rounding
            here = at if length <= POINTS else at * POINTS // length
            if here != bucket:
                bucket, fullest = here, total
                points.append(_Point(at, total, op, list(now.values())))
            elif total > fullest:
                fullest = total
                points[-1] = _Point(at, total, op, list(now.values()))
            for buffer in op.frees:
                now[buffer.kind] -= buffer.bytes
                total -= -(-buffer.bytes // rounding) * rounding
            at += 1
    return points
