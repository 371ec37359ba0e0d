"""Memory over one optimizer step: an area chart by kind of buffer, as SVG and in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from oomph.planner import Plan
from oomph.predict.memory import Peak, Timeline, timeline
from oomph.report.palette import look
from oomph.step.ops import Step
from oomph.units import MIB, mib

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 360, 70, 20, 50, 70
PIXELS = 2  # across, to one point of the chart
LEVELS = " ▁▂▃▄▅▆▇█"


def step_of_peak(plan: Plan) -> Step:
    """The step in which the peak lies, without the micro-steps that only repeat."""
    return step_with(plan.memory.peak, plan.steps)


def step_with(peak: Peak, steps: Sequence[Step]) -> Step:
    """The one of these steps in which that peak lies, without the micro-steps that only repeat."""
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


def to_svg(plan: Plan, title: str) -> str:
    """The area chart as SVG elements: the peak marked and named, and the card's line."""
    found = timeline(step_of_peak(plan))
    room_mib = None if plan.memory.capacity_mib is None else plan.memory.capacity_mib - plan.memory.context_mib
    highest = max(mib(max(found.total_bytes)), room_mib or 0.0) * 1.05
    across = (WIDTH - LEFT - RIGHT) / max(1, len(found.ops) - 1)
    up = (HEIGHT - TOP - BOTTOM) / highest
    body = [
        *_areas(found, across, up),
        *_sections(found, across),
        *_scale(highest, up),
        *_peak(plan, found, across, up),
    ]
    if room_mib is not None:
        y = HEIGHT - BOTTOM - room_mib * up
        body.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = f"{plan.device.name}: {room_mib:,.0f} MiB beside the context"
        body.append(f'<text class="small" x="{WIDTH - RIGHT}" y="{y - 5:.1f}" text-anchor="end">{escape(text)}</text>')
    return f'<text class="title" x="16" y="26">{escape(title)}</text>{"".join(body)}'


def _areas(found: Timeline, across: float, up: float) -> list[str]:
    shown = _drawn(found, across)
    base = [0] * len(shown)
    areas = []
    for kind, column in found.kinds.items():
        top = [low + column[at] for low, at in zip(base, shown, strict=True)]
        points = [f"{LEFT + at * across:.0f},{_y(size, up)}" for at, size in zip(shown, top, strict=True)]
        points += [f"{LEFT + at * across:.0f},{_y(size, up)}" for at, size in zip(shown[::-1], base[::-1], strict=True)]
        tip = f"<title>{escape(kind.value)}</title>"
        areas.append(f'<polygon fill="{look(kind.value)[0]}" points="{" ".join(points)}">{tip}</polygon>')
        base = top
    return areas


def _drawn(found: Timeline, across: float) -> list[int]:
    """The operations to draw: of those too close to tell apart the fullest, so that no peak is lost."""
    fullest: dict[int, int] = {}
    for at, total in enumerate(found.total_bytes):
        pixel = round(at * across / PIXELS)
        if pixel not in fullest or total > found.total_bytes[fullest[pixel]]:
            fullest[pixel] = at
    return list(fullest.values())


def _y(size_bytes: int, up: float) -> str:
    return f"{HEIGHT - BOTTOM - size_bytes / MIB * up:.1f}"


def _sections(found: Timeline, across: float) -> list[str]:
    lines = []
    for index, (name, first) in enumerate(found.sections):
        x = LEFT + first * across
        bottom = HEIGHT - BOTTOM
        lines.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom + 6}"/>')
        place = f'x="{x + 3:.1f}"' if x < WIDTH * 0.75 else f'x="{WIDTH - RIGHT}" text-anchor="end"'
        lines.append(f'<text class="small" {place} y="{bottom + 16 + index % 3 * 16}">{escape(name)}</text>')
    return lines


def _scale(highest_mib: float, up: float) -> list[str]:
    step = 10 ** (len(str(int(highest_mib))) - 1)
    step = step // 5 if highest_mib / step < 2 else step // 2 if highest_mib / step < 5 else step
    lines = []
    for value in range(0, int(highest_mib) + 1, max(1, step)):
        y = HEIGHT - BOTTOM - value * up
        lines.append(f'<text class="small" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:,}</text>')
    lines.append(f'<text class="small" x="16" y="{TOP - 8}">MiB</text>')
    return lines


def _peak(plan: Plan, found: Timeline, across: float, up: float) -> list[str]:
    section = plan.memory.peak.section
    first = next(first for name, first in found.sections if name == section.name)
    at = first + section.ops.index(plan.memory.peak.op)
    x, y = LEFT + at * across, float(_y(found.total_bytes[at], up))
    anchor = "end" if x > WIDTH / 2 else "start"
    text = f"{mib(found.total_bytes[at]):,.0f} MiB: {plan.memory.peak_at}"
    return [
        f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
        f'<text class="small" x="{x:.1f}" y="{y - 8:.1f}" text-anchor="{anchor}">{escape(text)}</text>',
    ]
