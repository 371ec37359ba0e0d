"""Line plots as SVG, readable in light and dark: what the reports of runs draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from statistics import median

import msgspec

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 330, 64, 16, 44, 46
MOST_POINTS = 500  # drawn of one line: more than pixels tell apart
COLOURS = ("#4e79a7", "#e15759", "#59a14f", "#f28e2b", "#b07aa1", "#76b7b2", "#9c755f", "#d4a017")
DASHES = ("", "7 4", "2 3", "9 3 2 3")  # where colours come round again, or are not seen
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#202124}.title{font-weight:600;font-size:15px}.small{font-size:11px;"
    "fill:#5f6368}.bg{fill:#fff}.axis{stroke:#5f6368;fill:none}.grid{stroke:#dadce0;stroke-width:.7}"
    "@media(prefers-color-scheme:dark){text{fill:#e8eaed}.small{fill:#9aa0a6}.bg{fill:#202124}"
    ".axis{stroke:#9aa0a6}.grid{stroke:#3c4043}}"
)


class Line(msgspec.Struct, frozen=True):
    """One curve. `index` gives its colour: the same run has the same in every chart."""

    name: str
    points: tuple[tuple[float, float], ...]
    index: int = 0
    faint: bool = False  # single steps behind their smoothed curve
    marked: bool = False  # a dot at each point: evaluations
    band: tuple[tuple[float, float, float], ...] = ()  # (x, low, high): an uncertainty


class Chart(msgspec.Struct, frozen=True):
    """One picture. Nothing is drawn outside the range of what it shows."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log_x: bool = False
    from_zero: bool = False

    @property
    def is_drawable(self) -> bool:
        """Whether some line has two points, and is one."""
        return any(sum(x > 0 or not self.log_x for x, _ in line.points) > 1 for line in self.lines)


def smooth(points: Points, window: int = 25) -> tuple[tuple[float, float], ...]:
    """Medians of neighbouring points: what single batches hide."""
    if len(points) < 3 * window:
        return tuple(points)
    half = window // 2
    places = [*range(0, len(points) - 1, max(1, window // 4)), len(points) - 1]
    return tuple((points[at][0], median(y for _, y in points[max(0, at - half) : at + half + 1])) for at in places)


def thinned(points: Points) -> list[tuple[float, float]]:
    """At most `MOST_POINTS` of them, the first and the last among them."""
    if len(points) <= MOST_POINTS:
        return list(points)
    return [points[round(index * (len(points) - 1) / (MOST_POINTS - 1))] for index in range(MOST_POINTS)]


class _Scale(msgspec.Struct, frozen=True):
    """From a value to a place on the paper."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (
            (math.log(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from low to high: 1, 2 or 5 times a power of ten apart."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= 0.7 * rough)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten; powers alone where those are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    times = (1, 2, 5) if len(powers) <= 3 else (1,) if len(powers) > 6 else (1, 3)
    return [value for power in powers for each in times if low <= (value := each * 10.0**power) <= high]


def short(value: float) -> str:
    """A tick's label: 524k, 10.5B, 3e18."""
    size = abs(value)
    if size >= 1e15:
        return f"{value:.0e}".replace("e+", "e")
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"


def chart_svg(chart: Chart) -> str:
    """The chart as SVG elements, `WIDTH` × `HEIGHT`."""
    lines = [_shown(line, chart.log_x) for line in chart.lines]
    lines = [line for line in lines if line.points]
    title = f'<text class="title" x="{LEFT}" y="20">{escape(chart.title)}</text>'
    if not lines:
        return f'{title}<text class="small" x="{LEFT}" y="{TOP + 20}">the logs do not tell</text>'
    xs = [x for line in lines for x, _ in line.points] + [x for line in lines for x, _, _ in line.band]
    ys = [y for line in lines for _, y in line.points]
    ys += [y for line in lines for _, low, high in line.band for y in (low, high)]
    low, high = (0.0 if chart.from_zero else min(ys)), max(ys)
    margin = 0.05 * (high - low or abs(high) or 1.0)
    across = _Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, chart.log_x)
    up = _Scale(low if chart.from_zero else low - margin, high + margin, HEIGHT - BOTTOM, TOP)
    body = [title, *_axes(chart, across, up)]
    for line in sorted(lines, key=lambda line: not line.faint):
        body += _line(line, across, up)
    return "".join(body)


def _shown(line: Line, log_x: bool) -> Line:
    finite = [(x, y) for x, y in line.points if math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x)]
    return msgspec.structs.replace(line, points=tuple(thinned(finite)))


def _axes(chart: Chart, across: _Scale, up: _Scale) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    lines = []
    for value in ticks(up.low, up.high):
        y = up(value)
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text class="small" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    marks = log_ticks(across.low, across.high) if chart.log_x else ticks(across.low, across.high, 6)
    for value in marks if len(marks) > 1 else ticks(across.low, across.high, 4):
        x = across(value)
        lines.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        lines.append(f'<text class="small" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{short(value)}</text>')
    lines.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    lines.append(f'<text class="small" x="{right}" y="{bottom + 34}" text-anchor="end">{escape(chart.x_label)}</text>')
    lines.append(f'<text class="small" x="{LEFT}" y="{TOP - 8}">{escape(chart.y_label)}</text>')
    return lines


def _line(line: Line, across: _Scale, up: _Scale) -> list[str]:
    colour = COLOURS[line.index % len(COLOURS)]
    dash = DASHES[line.index // len(COLOURS) % len(DASHES)]
    places = [(across(x), up(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    look = f'fill="none" stroke="{colour}" stroke-linejoin="round"'
    look += ' stroke-width="1.2" opacity=".45"' if line.faint else ' stroke-width="2"'
    look += f' stroke-dasharray="{dash}"' if dash else ""
    found = []
    if line.band:
        edge = [f"{across(x):.1f},{up(high):.1f}" for x, _, high in line.band]
        edge += [f"{across(x):.1f},{up(low):.1f}" for x, low, _ in reversed(line.band)]
        found.append(f'<polygon fill="{colour}" opacity=".18" points="{" ".join(edge)}"/>')
    found.append(f'<polyline {look} points="{path}"><title>{escape(line.name)}</title></polyline>')
    if line.marked:
        found += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    return found


def sheet(title: str, subtitle: str, charts: Sequence[Chart], names: Sequence[str], columns: int = 2) -> str:
    """Charts on one page under a title and a legend: a self-contained SVG document."""
    columns = min(columns, len(charts)) or 1
    width = columns * WIDTH
    legend, legend_height = _legend(names, width)
    top = 58 + legend_height
    height = top + HEIGHT * -(-len(charts) // columns)
    body = [
        f'<rect class="bg" width="{width}" height="{height}"/>',
        f'<text class="title" x="16" y="26">{escape(title)}</text>',
        f'<text class="small" x="16" y="44">{escape(subtitle)}</text>',
        *legend,
    ]
    for index, chart in enumerate(charts):
        x, y = index % columns * WIDTH, top + index // columns * HEIGHT
        body.append(f'<g transform="translate({x} {y})">{chart_svg(chart)}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><title>{escape(title)}</title><style>{STYLE}</style>{"".join(body)}</svg>\n'
    )


def _legend(names: Sequence[str], width: int) -> tuple[list[str], int]:
    """A swatch and a name for each run, in as many rows as they need."""
    lines, x, y = [], 16.0, 66.0
    for index, name in enumerate(names):
        label = name if len(name) <= 60 else f"{name[:59]}…"
        wide = 46 + 7.4 * len(label)
        if x + wide > width and x > 16:
            x, y = 16.0, y + 20
        dash = DASHES[index // len(COLOURS) % len(DASHES)]
        stroke = f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="3"' + (
            f' stroke-dasharray="{dash}"' if dash else ""
        )
        lines.append(f'<line x1="{x:.0f}" x2="{x + 22:.0f}" y1="{y - 4:.0f}" y2="{y - 4:.0f}" {stroke}/>')
        lines.append(f'<text x="{x + 30:.0f}" y="{y:.0f}">{escape(label)}</text>')
        x += wide
    return lines, int(y - 46) if names else 0
