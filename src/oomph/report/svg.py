"""Pictures as SVG, readable in light and dark: memory as bars and as an area over a step, curves of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import msgspec

from oomph.report.document import Area, Bar, Chart, Line, Picture, look

Points = Sequence[tuple[float, float]]
WIDE = 900  # of bars and areas
HEAD = 58  # height of a title and a line below it
LEFT, RIGHT, ROW = 120, 110, 54  # of bars
AREA_HEIGHT, AREA_LEFT, AREA_RIGHT, AREA_TOP, AREA_BOTTOM = 360, 70, 20, 50, 70
PIXELS = 2  # width of one point of an area
CHART_WIDTH, CHART_HEIGHT, CHART_LEFT, CHART_RIGHT, CHART_TOP, CHART_BOTTOM = 560, 330, 64, 16, 44, 46
MOST_POINTS = 500  # per line: more than pixels can show
COLOURS = ("#4e79a7", "#e15759", "#59a14f", "#f28e2b", "#b07aa1", "#76b7b2", "#9c755f", "#d4a017")
DASHES = ("", "7 4", "2 3", "9 3 2 3")  # for repeated or indistinguishable colours
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#202124}.title{font-weight:600;font-size:15px}.small{font-size:11px;"
    "fill:#5f6368}.bg{fill:#fff}.axis{stroke:#5f6368;fill:none}.grid{stroke:#dadce0;stroke-width:.7}"
    ".line{stroke:#202124;stroke-width:2}.limit{stroke:#202124;stroke-dasharray:6 4}.peak{fill:#202124}"
    "@media(prefers-color-scheme:dark){text{fill:#e8eaed}.small{fill:#9aa0a6}.bg{fill:#202124}"
    ".axis{stroke:#9aa0a6}.grid{stroke:#3c4043}.line,.limit{stroke:#e8eaed}.peak{fill:#e8eaed}}"
)


class _Panel(msgspec.Struct, frozen=True):
    """SVG elements and the space they take."""

    width: float
    height: float
    body: str


def to_svg(*pictures: Picture) -> str:
    """The pictures one below the other, as one self-contained SVG document."""
    panels = [panel for picture in pictures for panel in _panels(picture)]
    width, height = max(panel.width for panel in panels), sum(panel.height for panel in panels)
    body, top = [], 0.0
    for panel in panels:
        body.append(f'<g transform="translate(0 {top:.0f})">{panel.body}</g>')
        top += panel.height
    size = f'width="{width:.0f}" height="{height:.0f}"'
    about = escape(" ".join(picture.tip or picture.title for picture in pictures))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" {size} role="img">'
        f'<title>{about}</title><style>{STYLE}</style><rect class="bg" {size}/>{"".join(body)}</svg>\n'
    )


def _panels(picture: Picture) -> list[_Panel]:
    columns = min(2, len(picture.charts))
    wide = columns * CHART_WIDTH or WIDE
    panels = [_head(picture, wide)]
    panels += [_bars(picture)] if picture.bars is not None else []
    panels += [_area(area) for area in picture.areas]
    panels += [_names(picture.names, wide)] if picture.names else []
    for first in range(0, len(picture.charts), 2):
        row = [
            f'<g transform="translate({index * CHART_WIDTH} 0)">{_chart(chart)}</g>'
            for index, chart in enumerate(picture.charts[first : first + 2])
        ]
        panels.append(_Panel(wide, CHART_HEIGHT, "".join(row)))
    return panels


def _head(picture: Picture, wide: float) -> _Panel:
    title = f'<text class="title" x="16" y="26">{escape(picture.title)}</text>'
    return _Panel(wide, HEAD, f'{title}<text class="small" x="16" y="44">{escape(picture.subtitle)}</text>')


def _text(x: float, y: float, text: str, end: bool = False, name: str = "small") -> str:
    anchor = ' text-anchor="end"' if end else ""
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}"{anchor}>{escape(text)}</text>'


# --- memory ----------------------------------------------------------------------------------------


def _bars(picture: Picture) -> _Panel:
    """A bar for each program against the device's limit, and a legend in three columns."""
    assert picture.bars is not None
    bars, limit = picture.bars.bars, picture.bars.capacity_mib
    scale = (WIDE - LEFT - RIGHT) / (picture.bars.full_mib or 1.0)
    top, bottom = 16, 16 + ROW * len(bars)
    body = [line for row, bar in enumerate(bars) for line in _bar(bar, top + row * ROW, scale)]
    if limit is not None:
        x = LEFT + limit * scale
        body.append(f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 8}" y2="{bottom}"/>')
        body.append(_text(x, bottom + 16, f"{picture.device}: {limit:,.0f} MiB", end=True))
    names = list(dict.fromkeys(name for bar in bars for name, _ in bar.parts))
    for index, name in enumerate(names):
        x, y = 16 + index % 3 * (WIDE - 32) / 3, bottom + 40 + index // 3 * 24
        sizes = " / ".join(f"{dict(bar.parts).get(name, 0.0):,.0f}" for bar in bars)
        body.append(f'<rect x="{x:.0f}" y="{y}" width="14" height="14" rx="2" fill="{look(name)[0]}"/>')
        body.append(_text(x + 22, y + 12, f"{name}: {sizes} MiB"))
    return _Panel(WIDE, bottom + 40 - (-len(names) // 3) * 24 + 16, "".join(body))


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


def _area(area: Area) -> _Panel:
    """Layers of memory over the operations, the peak marked and named, and the card's limit."""
    limit_mib = area.limit[0] if area.limit is not None else 0.0
    bottom, right = AREA_HEIGHT - AREA_BOTTOM, WIDE - AREA_RIGHT
    x_of = _Scale(0, max(1, len(area.totals) - 1), AREA_LEFT, right)
    y_of = _Scale(0, max(*area.totals, limit_mib) * 1.05, bottom, AREA_TOP)
    body = [_text(16, 26, area.title, name="title"), *_layers(area, x_of, y_of)]
    for index, (name, first) in enumerate(area.sections):
        x = x_of(first)
        body.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{AREA_TOP}" y2="{bottom + 6}"/>')
        late = x >= WIDE * 0.75
        body.append(_text(right if late else x + 3, bottom + 16 + index % 3 * 16, name, end=late))
    body += [_text(AREA_LEFT - 8, y_of(value) + 4, f"{value:,.0f}", end=True) for value in ticks(0, y_of.high)]
    body.append(_text(16, AREA_TOP - 8, "MiB"))
    at, where = area.peak
    x, y = x_of(at), y_of(area.totals[at])
    body.append(f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
    body.append(_text(x, y - 8, f"{area.totals[at]:,.0f} MiB: {where}", end=x > WIDE / 2))
    if area.limit is not None:
        y = y_of(limit_mib)
        body.append(f'<line class="limit" x1="{AREA_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(_text(right, y - 5, area.limit[1], end=True))
    return _Panel(WIDE, AREA_HEIGHT, "".join(body))


def _layers(area: Area, x_of: _Scale, y_of: _Scale) -> list[str]:
    shown = _drawn(area.totals, x_of)
    base = [0.0] * len(shown)
    layers = []
    for name, sizes in area.layers:
        top = [low + sizes[at] for low, at in zip(base, shown, strict=True)]
        edge = [*zip(shown, top, strict=True), *zip(shown[::-1], base[::-1], strict=True)]
        points = " ".join(f"{x_of(at):.0f},{y_of(size):.1f}" for at, size in edge)
        tip = f"<title>{escape(name)}</title>"
        layers.append(f'<polygon fill="{look(name)[0]}" points="{points}">{tip}</polygon>')
        base = top
    return layers


def _drawn(totals: Sequence[float], x_of: _Scale) -> list[int]:
    """The operations to draw: of those too close to distinguish, the highest, so that no peak is lost."""
    fullest: dict[int, int] = {}
    for at, total in enumerate(totals):
        pixel = round(x_of(at) / PIXELS)
        if pixel not in fullest or total > totals[fullest[pixel]]:
            fullest[pixel] = at
    return list(fullest.values())


# --- charts ----------------------------------------------------------------------------------------


def _thinned(points: Points) -> list[tuple[float, float]]:
    """At most `MOST_POINTS` of them, the first and the last among them."""
    if len(points) <= MOST_POINTS:
        return list(points)
    return [points[round(index * (len(points) - 1) / (MOST_POINTS - 1))] for index in range(MOST_POINTS)]


class _Scale(msgspec.Struct, frozen=True):
    """Maps a value to a coordinate."""

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
    """1, 2 and 5 times powers of ten; only the powers if there are many."""
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


def _chart(chart: Chart) -> str:
    """The chart as SVG elements, `CHART_WIDTH` × `CHART_HEIGHT`."""
    lines = [_shown(line, chart.log_x) for line in chart.lines]
    lines = [line for line in lines if line.points]
    title = _text(CHART_LEFT, 20, chart.title, name="title")
    if not lines:
        return title + _text(CHART_LEFT, CHART_TOP + 20, "the logs do not tell")
    xs = [x for line in lines for x, _ in line.points] + [x for line in lines for x, _, _ in line.band]
    ys = [y for line in lines for _, y in line.points]
    ys += [y for line in lines for _, low, high in line.band for y in (low, high)]
    low, high = (0.0 if chart.from_zero else min(ys)), max(ys)
    margin = 0.05 * (high - low or abs(high) or 1.0)
    across = _Scale(min(xs), max(xs), CHART_LEFT, CHART_WIDTH - CHART_RIGHT, chart.log_x)
    up = _Scale(low if chart.from_zero else low - margin, high + margin, CHART_HEIGHT - CHART_BOTTOM, CHART_TOP)
    body = [title, *_axes(chart, across, up)]
    for line in sorted(lines, key=lambda line: not line.faint):
        body += _line(line, across, up)
    return "".join(body)


def _shown(line: Line, log_x: bool) -> Line:
    finite = [(x, y) for x, y in line.points if math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x)]
    return msgspec.structs.replace(line, points=tuple(_thinned(finite)))


def _axes(chart: Chart, across: _Scale, up: _Scale) -> list[str]:
    bottom, right = CHART_HEIGHT - CHART_BOTTOM, CHART_WIDTH - CHART_RIGHT
    lines = []
    for value in ticks(up.low, up.high):
        y = up(value)
        lines.append(f'<line class="grid" x1="{CHART_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(_text(CHART_LEFT - 6, y + 4, short(value), end=True))
    marks = log_ticks(across.low, across.high) if chart.log_x else ticks(across.low, across.high, 6)
    for value in marks if len(marks) > 1 else ticks(across.low, across.high, 4):
        x = across(value)
        lines.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{CHART_TOP}" y2="{bottom}"/>')
        lines.append(f'<text class="small" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{short(value)}</text>')
    lines.append(f'<path class="axis" d="M{CHART_LEFT} {CHART_TOP}V{bottom}H{right}"/>')
    lines.append(_text(right, bottom + 34, chart.x_label, end=True))
    lines.append(_text(CHART_LEFT, CHART_TOP - 8, chart.y_label))
    return lines


def _line(line: Line, across: _Scale, up: _Scale) -> list[str]:
    colour = COLOURS[line.index % len(COLOURS)]
    places = [(across(x), up(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    weight = 'stroke-width="1.2" opacity=".45"' if line.faint else 'stroke-width="2"'
    look = f'fill="none" stroke-linejoin="round" {weight} {_stroke(line.index)}'
    found = []
    if line.band:
        edge = [f"{across(x):.1f},{up(high):.1f}" for x, _, high in line.band]
        edge += [f"{across(x):.1f},{up(low):.1f}" for x, low, _ in reversed(line.band)]
        found.append(f'<polygon fill="{colour}" opacity=".18" points="{" ".join(edge)}"/>')
    found.append(f'<polyline {look} points="{path}"><title>{escape(line.name)}</title></polyline>')
    if line.marked:
        found += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    return found


def _stroke(index: int) -> str:
    """The colour of a run, and its dashes if colours repeat."""
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    return f'stroke="{COLOURS[index % len(COLOURS)]}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _names(names: Sequence[str], width: float) -> _Panel:
    """A swatch and a name for each run, in as many rows as they need."""
    lines, x, y = [], 16.0, 10.0
    for index, name in enumerate(names):
        label = name if len(name) <= 60 else f"{name[:59]}…"
        wide = 46 + 7.4 * len(label)
        if x + wide > width and x > 16:
            x, y = 16.0, y + 20
        place = f'x1="{x:.0f}" x2="{x + 22:.0f}" y1="{y - 4:.0f}" y2="{y - 4:.0f}"'
        lines.append(f'<line {place} stroke-width="3" {_stroke(index)}/>')
        lines.append(f'<text x="{x + 30:.0f}" y="{y:.0f}">{escape(label)}</text>')
        x += wide
    return _Panel(width, y + 12, "".join(lines))
