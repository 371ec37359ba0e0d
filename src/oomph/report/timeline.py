"""Memory over one optimizer step: as an area to draw, and as a line of blocks for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.planning.plan import Plan
from oomph.predict.memory import Peak, timeline
from oomph.report.document import Area
from oomph.step.ops import Step
from oomph.units import mib

LEVELS = " ▁▂▃▄▅▆▇█"


def step_of_peak(plan: Plan) -> Step:
    """The step with the peak, without the micro-steps that only repeat."""
    return step_with(plan.memory.peak, plan.steps)


def step_with(peak: Peak, steps: Sequence[Step]) -> Step:
    """The one of these steps with that peak, without the micro-steps that only repeat."""
    step = next(step for step in steps if peak.section in step.sections)
    shown = [section for section in step.sections if section.times <= 1 or section is peak.section]
    return Step(step.resident, tuple(shown))


def sparkline(plan: Plan, columns: int) -> tuple[str, str]:
    """Allocated memory over the step in one line of blocks, and a line that names its sections."""
    found = timeline(step_of_peak(plan))
    highest = max(found.total_bytes)
    bars = []
    for column in range(columns):
        start = column * len(found.ops) // columns
        end = max(start + 1, (column + 1) * len(found.ops) // columns)
        bars.append(LEVELS[round(max(found.total_bytes[start:end]) / highest * (len(LEVELS) - 1))])
    names = [" "] * columns
    for name, first in found.sections:
        at = first * columns // len(found.ops)
        label = f"│{name}"[: columns - at]
        names[at : at + len(label)] = label
    return "".join(bars), "".join(names).rstrip()


def area(plan: Plan) -> Area:
    """The step's memory by kind of buffer, its peak, and the card's memory without the context."""
    found = timeline(step_of_peak(plan))
    memory = plan.memory
    section = memory.peak.section
    first = next(first for name, first in found.sections if name == section.name)
    limit = None
    if memory.capacity_mib is not None:
        room_mib = memory.capacity_mib - memory.context_mib
        limit = (room_mib, f"{plan.device.name}: {room_mib:,.0f} MiB beside the context")
    return Area(
        title=f"{plan.program}, allocated over one optimizer step, operation by operation",
        layers=tuple((kind.value, tuple(map(mib, sizes))) for kind, sizes in found.kinds.items()),
        totals=tuple(map(mib, found.total_bytes)),
        sections=found.sections,
        peak=(first + section.ops.index(memory.peak.op), memory.peak_at),
        limit=limit,
    )
