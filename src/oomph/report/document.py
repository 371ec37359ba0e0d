"""`Document`: a report as a list of parts, and `Picture`: one as drawings. How they look is up to the renderers.

A verb's module (plan.py, fit.py, …) turns its result into a `Document`; terminal.py and markdown.py show any of them,
and svg.py draws any `Picture`. The terminal shows one screen by default and every part with `--all`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal

import msgspec

# "short" stands for "detail" parts on one screen; Markdown and --all have the details in its place.
Shown = Literal["always", "detail", "short"]
Mark = Literal["yes", "no", "warning", "best", "info", "maybe"]
Look = Literal["plain", "strong", "good", "dim"]

# Colour and glyph of each component of memory, the same in every picture; the glyph is for output without colour.
PARTS: dict[str, tuple[str, str]] = {
    "parameters": ("#4e79a7", "█"),
    "gradients": ("#76b7b2", "▓"),
    "optimizer state": ("#59a14f", "▒"),
    "half copies of weights": ("#9c755f", "▚"),
    "gathered parameters": ("#79706e", "▙"),
    "activations": ("#f28e2b", "▄"),
    "attention": ("#edc948", "▞"),
    "logits and loss": ("#e15759", "▀"),
    "temporaries": ("#b07aa1", "▖"),
    "workspaces": ("#ff9da7", "░"),
    "inputs": ("#86bcb6", "░"),
    "communication buffers": ("#d37295", "▟"),
}
OTHER = ("#9aa0a6", "░")  # rounding, cache, context


def look(part: str) -> tuple[str, str]:
    """The colour and the glyph of a part of the memory."""
    return PARTS.get(part, OTHER)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a document."""

    shown: Shown = "always"


class Title(Part, frozen=True):
    """What the report is about: a heading, and lines below it."""

    text: str
    lines: tuple[str, ...] = ()


class Verdict(Part, frozen=True):
    """One answer, without its full stop."""

    text: str
    mark: Mark


class Bar(msgspec.Struct, frozen=True):
    """One program's memory, part by part, against what the device gives."""

    program: str
    parts: tuple[tuple[str, float], ...]  # (component, MiB)
    total_mib: float
    capacity_mib: float | None


class Bars(Part, frozen=True):
    """Stacked bars on one scale."""

    bars: tuple[Bar, ...]

    @property
    def capacity_mib(self) -> float | None:
        return next((bar.capacity_mib for bar in self.bars if bar.capacity_mib is not None), None)

    @property
    def full_mib(self) -> float:
        """The MiB at the end of the scale."""
        return max([bar.total_mib for bar in self.bars] + [self.capacity_mib or 0.0])


class Column(msgspec.Struct, frozen=True):
    """A column of a table: figures, which stay on one line, or words."""

    heading: str
    words: bool = False
    spare: int = 0  # on a narrow page, columns above 0 are left out, the highest first
    detail: bool = False


class Row(msgspec.Struct, frozen=True):
    """A row of a table."""

    cells: tuple[str, ...]
    look: Look = "plain"
    part: str | None = None  # a component of memory: the row gets its glyph and colour
    detail: bool = False


class Table(Part, frozen=True):
    """Rows under common columns, in groups that may have headings."""

    columns: tuple[Column, ...]
    groups: tuple[tuple[str, tuple[Row, ...]], ...]

    def brief(self) -> Table:
        """The table without the columns, rows and groups that are details."""
        kept = [place for place, column in enumerate(self.columns) if not column.detail]
        groups = [(heading, tuple(_of(row, kept) for row in rows if not row.detail)) for heading, rows in self.groups]
        groups = [group for group in groups if group[1]]
        columns = tuple(self.columns[place] for place in kept)
        return Table(columns, tuple(groups) if len(groups) > 1 else tuple(("", rows) for _, rows in groups))


def _of(row: Row, kept: list[int]) -> Row:
    return msgspec.structs.replace(row, cells=tuple(row.cells[place] for place in kept))


class Item(msgspec.Struct, frozen=True):
    """A sentence, or a title with sentences as its detail."""

    text: str
    title: str = ""
    mark: Mark = "info"
    code: tuple[str, ...] = ()  # lines to copy, below it


class Items(Part, frozen=True):
    """A list under a heading."""

    heading: str
    items: tuple[Item, ...]


class Facts(Part, frozen=True):
    """Sentences, each with a short heading beside it; a repeated heading is shown once."""

    facts: tuple[tuple[str, str], ...]


class Strip(Part, frozen=True):
    """A sparkline, and labels below it. Only for the terminal."""

    title: str
    blocks: str
    labels: str


class Code(Part, frozen=True):
    """Lines to copy, and what to know about them."""

    heading: str
    lines: str
    text: str


class Text(Part, frozen=True):
    """A paragraph."""

    text: str
    heading: str = ""


class Next(Part, frozen=True):
    """The command to type next. Only for the terminal."""

    command: str
    what: str


class Document(msgspec.Struct, frozen=True):
    """A report. `more` says what its details hold."""

    parts: tuple[Part, ...]
    more: str = ""

    def then(self, *commands: tuple[str, str]) -> Document:
        """The document with these commands, and what each does, at its end."""
        return Document((*self.parts, *(Next(*command) for command in commands)), self.more)


def sentence_list(heading: str, lines: tuple[str, ...], shown: Shown = "detail") -> list[Part]:
    """A list of plain sentences; empty if there are none."""
    return [Items(heading, tuple(Item(line) for line in lines), shown=shown)] if lines else []


# --- pictures --------------------------------------------------------------------------------------


class Line(msgspec.Struct, frozen=True):
    """One curve. `index` gives its colour: the same run has the same in every chart."""

    name: str
    points: tuple[tuple[float, float], ...]
    index: int = 0
    faint: bool = False  # single steps behind their smoothed curve
    marked: bool = False  # a dot at each point: evaluations
    band: tuple[tuple[float, float, float], ...] = ()  # (x, low, high): an uncertainty


class Chart(msgspec.Struct, frozen=True):
    """Curves on common axes. Nothing is drawn outside the range of what it shows."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log_x: bool = False
    from_zero: bool = False

    @property
    def is_drawable(self) -> bool:
        """Whether some line has at least two points to draw."""
        return any(sum(x > 0 or not self.log_x for x, _ in line.points) > 1 for line in self.lines)


class Area(msgspec.Struct, frozen=True):
    """Memory over a step, operation by operation, in layers that add up."""

    title: str
    layers: tuple[tuple[str, tuple[float, ...]], ...]  # (component, MiB while each operation runs)
    totals: tuple[float, ...]  # MiB of all layers, and of what the allocator adds
    sections: tuple[tuple[str, int], ...]  # (name, its first operation)
    peak: tuple[int, str]  # the operation, and what it is
    limit: tuple[float, str] | None  # MiB, and whose limit it is


class Picture(msgspec.Struct, frozen=True):
    """Drawings under one title: bars and areas of memory, or charts with a legend of names."""

    title: str
    subtitle: str
    bars: Bars | None = None
    device: str = ""
    areas: tuple[Area, ...] = ()
    charts: tuple[Chart, ...] = ()
    names: tuple[str, ...] = ()
    tip: str = ""  # for screen readers and tooltips; else the title


def smooth(points: Sequence[tuple[float, float]], window: int = 25) -> tuple[tuple[float, float], ...]:
    """Running medians, which smooth out the noise of single batches."""
    if len(points) < 3 * window:
        return tuple(points)
    half = window // 2
    places = [*range(0, len(points) - 1, max(1, window // 4)), len(points) - 1]
    return tuple((points[at][0], median(y for _, y in points[max(0, at - half) : at + half + 1])) for at in places)
