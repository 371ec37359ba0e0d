"""The memory picture: one stacked bar a program against the device's line, and memory over one step below it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from oomph.planner import Plan
from oomph.report import timeline
from oomph.report.palette import look
from oomph.report.summary import Bar, Summary

WIDTH, LEFT, RIGHT, ROW = 900, 120, 110, 54
STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#202124}.title{font-weight:600;font-size:16px}.small{font-size:12px;"
    "fill:#5f6368}.line{stroke:#202124;stroke-width:2}.bg{fill:#fff}.limit{stroke:#202124;stroke-dasharray:6 4}"
    ".tick{stroke:#9aa0a6;stroke-width:.5}.peak{fill:#202124}"
    "@media(prefers-color-scheme:dark){text{fill:#e8eaed}.small{fill:#9aa0a6}.line,.limit{stroke:#e8eaed}"
    ".bg{fill:#202124}.peak{fill:#e8eaed}}"
)


def to_svg(summary: Summary, plans: Sequence[Plan]) -> str:
    """The picture as a self-contained SVG document, readable in light and dark."""
    limits = [bar.capacity_mib for bar in summary.bars if bar.capacity_mib is not None]
    full_mib = max([bar.total_mib for bar in summary.bars] + limits) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / full_mib
    top = 78
    bottom = top + ROW * len(summary.bars)
    legend, legend_height = _legend(summary, bottom + 40)
    bars_height = bottom + 40 + legend_height
    height = bars_height + timeline.HEIGHT * len(plans)
    body = [
        f'<rect class="bg" width="{WIDTH}" height="{height}"/>',
        f'<text class="title" x="16" y="26">{escape(summary.title)}</text>',
        f'<text class="small" x="16" y="46">{escape(summary.setting)}</text>',
        *(line for row, bar in enumerate(summary.bars) for line in _bar(bar, top + row * ROW, scale)),
    ]
    if limits:
        x = LEFT + limits[0] * scale
        body.append(f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 8}" y2="{bottom}"/>')
        label = f"{summary.device.split(',')[0]}: {limits[0]:,.0f} MiB"
        body.append(f'<text class="small" x="{x:.1f}" y="{bottom + 16}" text-anchor="end">{escape(label)}</text>')
    for index, plan in enumerate(plans):
        title = f"{plan.program}, allocated over one optimizer step, operation by operation"
        chart = timeline.to_svg(plan, title)
        body.append(f'<g transform="translate(0 {bars_height + index * timeline.HEIGHT})">{chart}</g>')
    verdict = " ".join(f"{verdict.text}." for verdict in summary.verdicts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img"><title>{escape(verdict)}</title><style>{STYLE}</style>{"".join(body)}{"".join(legend)}</svg>\n'
    )


def _bar(bar: Bar, y: float, scale: float) -> list[str]:
    lines = [f'<text x="{LEFT - 12}" y="{y + 25}" text-anchor="end">{escape(bar.program)}</text>']
    x = float(LEFT)
    for name, size_mib in bar.parts:
        wide = size_mib * scale
        tip = f"<title>{escape(name)}: {size_mib:,.1f} MiB</title>"
        box = f'x="{x:.2f}" y="{y}" width="{wide:.2f}" height="38"'
        lines.append(f'<rect {box} fill="{look(name)[0]}">{tip}</rect>')
        x += wide
    lines.append(f'<text x="{x + 8:.1f}" y="{y + 25}">{bar.total_mib:,.0f} MiB</text>')
    return lines


def _legend(summary: Summary, top: float) -> tuple[list[str], float]:
    """Swatches in three columns."""
    lines = []
    column = (WIDTH - 32) / 3
    for index, name in enumerate(summary.components):
        x, y = 16 + index % 3 * column, top + index // 3 * 24
        sizes = " / ".join(f"{dict(bar.parts).get(name, 0.0):,.0f}" for bar in summary.bars)
        lines.append(f'<rect x="{x:.0f}" y="{y}" width="14" height="14" rx="2" fill="{look(name)[0]}"/>')
        lines.append(f'<text class="small" x="{x + 22:.0f}" y="{y + 12}">{escape(name)}: {sizes} MiB</text>')
    return lines, -(-len(summary.components) // 3) * 24 + 16.0
