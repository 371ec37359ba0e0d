"""One step's memory over time, small enough to send: a few hundred points, and who holds the peak."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from oomph.planner import Plan
from oomph.predict.memory import CUDA_ROUNDING_BYTES, Peak
from oomph.report.timeline import step_with
from oomph.step.ops import Kind, Op, Step
from oomph.units import mib

POINTS = 320
HOLDERS = 12
_LAYER = re.compile(r"\bh\.\d+\.")


def timeline_of(plan: Plan) -> dict[str, Any]:
    """The step in which the peak lies: of operations too close to tell apart the fullest."""
    return _drawn(plan.steps, plan.memory.peak, 1 if plan.device.kind == "cpu" else CUDA_ROUNDING_BYTES)


@lru_cache(maxsize=4)  # another card or price changes nothing of it
def _drawn(steps: tuple[Step, ...], peak: Peak, rounding: int) -> dict[str, Any]:
    step = step_with(peak, steps)
    points = _points(step, rounding)
    before, index = 0, 0
    phases = []
    for section in step.sections:
        phases.append({"name": section.name, "start": before, "end": before + len(section.ops)})
        if section is peak.section:
            index = before + next(at for at, op in enumerate(section.ops) if op is peak.op)
        before += len(section.ops)
    kinds = {kind: [sizes[at] for _, _, _, sizes in points] for at, kind in enumerate(Kind)}
    return {
        "points": [[at, total] for at, total, _, _ in points],
        "ops": [f"{op.phase.value}: {op.name}" for _, _, op, _ in points],
        "kinds": {kind.value: column for kind, column in kinds.items() if any(column)},
        "peak": {
            "index": index,
            "bytes": peak.allocated_bytes,
            "op": peak.op.name,
            "at": peak.at,
            "holders": holders(peak),
        },
        "phases": phases,
        "length": before,
    }


def holders(peak: Peak) -> list[dict[str, Any]]:
    """What is alive at the peak, the same buffer of every layer taken together, the largest first."""
    sizes: dict[str, tuple[int, int]] = {}
    for buffer in peak.live:
        name = _LAYER.sub("h.*.", buffer.name)
        size, count = sizes.get(name, (0, 0))
        sizes[name] = (size + buffer.bytes, count + 1)
    largest = sorted(sizes.items(), key=lambda item: -item[1][0])[:HOLDERS]
    return [{"name": name, "mib": mib(size), "count": count} for name, (size, count) in largest]


Point = tuple[int, int, Op, list[int]]  # operation, bytes after rounding, the operation, bytes of each kind


def _points(step: Step, rounding: int) -> list[Point]:
    """In one pass, the fullest operation of each bucket; the first of several equal ones, as a peak is."""
    length = sum(len(section.ops) for section in step.sections)
    now = dict.fromkeys(Kind, 0)
    total = 0
    for buffer in step.resident:
        now[buffer.kind] += buffer.bytes
        total += -(-buffer.bytes // rounding) * rounding
    points: list[Point] = []
    at, bucket, fullest = 0, -1, -1
    for section in step.sections:
        for op in section.ops:
            for buffer in op.allocates:
                now[buffer.kind] += buffer.bytes
                total += -(-buffer.bytes // rounding) * rounding
            here = at if length <= POINTS else at * POINTS // length
            if here != bucket:
                bucket, fullest = here, total
                points.append((at, total, op, list(now.values())))
            elif total > fullest:
                fullest = total
                points[-1] = (at, total, op, list(now.values()))
            for buffer in op.frees:
                now[buffer.kind] -= buffer.bytes
                total -= -(-buffer.bytes // rounding) * rounding
            at += 1
    return points
