"""One step's memory over time, small enough to send: a few hundred points, and who holds the peak."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise
from typing import Any

from oomph.planner import Plan
from oomph.predict.memory import CUDA_ROUNDING_BYTES, Peak, rounded
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
    """The fullest operation of each bucket; the first of several equal ones, as a peak is."""
    chosen = _fullest(step, rounding)
    now = dict.fromkeys(Kind, 0)
    for buffer in step.resident:
        now[buffer.kind] += buffer.bytes
    points: list[Point] = []
    wanted = iter([*chosen, (-1, 0)])
    place, total = next(wanted)
    at = 0
    for section in step.sections:
        for op in section.ops:
            for buffer in op.allocates:
                now[buffer.kind] += buffer.bytes
            if at == place:
                points.append((at, total, op, list(now.values())))
                place, total = next(wanted)
            for buffer in op.frees:
                now[buffer.kind] -= buffer.bytes
            at += 1
    return points


def _fullest(step: Step, rounding: int) -> list[tuple[int, int]]:
    """The operations to draw, and what is allocated while each runs, after rounding."""
    totals: list[int] = []
    total = sum(rounded(buffer.bytes, rounding) for buffer in step.resident)
    for section in step.sections:
        for op in section.ops:
            for buffer in op.allocates:
                total += -(-buffer.bytes // rounding) * rounding
            totals.append(total)
            for buffer in op.frees:
                total -= -(-buffer.bytes // rounding) * rounding
    length = len(totals)
    if length <= POINTS:
        return list(enumerate(totals))
    edges = [-(-bucket * length // POINTS) for bucket in range(POINTS + 1)]
    places = [totals.index(max(totals[start:end]), start) for start, end in pairwise(edges)]
    return [(at, totals[at]) for at in places]
