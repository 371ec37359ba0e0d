"""A document in the terminal: one screen, or everything. Colour and width follow the terminal, NO_COLOR and COLUMNS."""

from __future__ import annotations

import shlex

from rich.console import Console, Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text as Styled

from oomph.report import document as doc

WIDEST = 120
GAP = 2  # columns between columns
FEWEST = 18  # columns, at least, for readable words
BAR_MARGIN, BAR_END = 14, 14  # columns left of a bar, at least, for the program's name, and right of it for its size
LABELS = 6  # parts of a bar that are named below it
MARKS = {
    "yes": ("✓", "bold green"),
    "no": ("✗", "bold red"),
    "warning": ("!", "bold yellow"),
    "best": ("★", "bold green"),
    "info": ("·", "bold"),
    "maybe": ("?", "dim"),
}
STYLES = {"plain": "", "strong": "bold", "good": "bold green", "dim": "dim"}


def to_text(document: doc.Document, everything: bool = False) -> str:
    """The document as text: one screen, or all its details with `everything`."""
    console = Console(highlight=False)
    page = _Page(min(console.width, WIDEST), everything, bool(console.color_system) and not console.no_color)
    with console.capture() as captured:
        console.print(page.group(document), width=page.width)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


class _Page:
    """How wide the page is, and what is shown on it."""

    def __init__(self, width: int, everything: bool, coloured: bool) -> None:
        self.width = width
        self.everything = everything
        self.coloured = coloured

    def group(self, document: doc.Document) -> Group:
        """The parts with an empty line between any two, but not between verdicts or last commands."""
        hidden = "short" if self.everything else "detail"
        shown: list[RenderableType] = []
        before: doc.Part | None = None
        for part in document.parts:
            if part.shown == hidden:
                continue
            if before is not None and not (type(before) is type(part) and isinstance(part, doc.Verdict | doc.Next)):
                shown.append(Styled())
            shown += self.render(part)
            before = part
        return Group(*shown)

    def render(self, part: doc.Part) -> list[RenderableType]:
        """One part."""
        match part:
            case doc.Title():
                return [Styled(part.text, style="bold"), *map(Styled, part.lines)]
            case doc.Verdict():
                return [_beside((_mark(part.mark), Styled(f"{part.text}.", style=MARKS[part.mark][1])))]
            case doc.Bars():
                return self._bars(part)
            case doc.Table():
                return _tables(part if self.everything else part.brief(), self)
            case doc.Items():
                return [*_heading(part.heading), self._items(part)]
            case doc.Facts():
                headings = ["", *(heading for heading, _ in part.facts)]
                rows = [
                    (Styled("" if heading == before else heading, style="bold"), Styled(f"{sentence}."))
                    for before, (heading, sentence) in zip(headings, part.facts, strict=False)
                ]
                return [_beside(*rows, gap=GAP)]
            case doc.Strip():
                cut = {"no_wrap": True, "overflow": "crop"}
                blocks = Styled(part.blocks, style=doc.look("activations")[0], **cut)  # type: ignore[arg-type]
                return [Styled(part.title, style="bold"), blocks, Styled(part.labels, **cut)]  # type: ignore[arg-type]
            case doc.Code():
                code = Styled(part.lines, no_wrap=True, overflow="ignore")  # a wrapped line is no longer code
                return [*_heading(part.heading), code, Styled(part.text)]
            case doc.Text():
                return [*_heading(part.heading), Styled(part.text, style="" if part.heading else "dim")]
            case doc.Next():
                *lines, last = _command(part.command, self.width - GAP)
                short = not lines and len(last) + GAP + len(part.what) <= self.width - GAP
                shown = Styled("→ ", no_wrap=True, overflow="ignore")
                shown.append("\n".join((*(f"{line} \\" for line in lines), last)), "bold")
                return [shown.append(f"  {part.what}")] if short else [shown, Styled(f"  {part.what}")]
        raise TypeError(part)

    def glyph(self, part: str) -> tuple[str, str]:
        """The glyph of a part of the memory, and its colour."""
        colour, glyph = doc.look(part)
        return ("█" if self.coloured else glyph), colour

    def _items(self, part: doc.Items) -> Grid:
        rows: list[tuple[RenderableType, ...]] = []
        for item in part.items:
            if item.title:
                rows.append((_mark(item.mark), Styled(f"{item.title}.", style=MARKS[item.mark][1])))
                rows += [("", Styled(item.text))] if self.everything else []
            else:
                rows.append((_mark("info"), Styled(_ended(item))))
            rows += [("", Styled(f"  {line}", style="bold", no_wrap=True, overflow="ignore")) for line in item.code]
        return _beside(*rows)

    # --- bars --------------------------------------------------------------------------------------

    def _bars(self, part: doc.Bars) -> list[RenderableType]:
        margin = max([BAR_MARGIN, *(len(bar.program) + 2 for bar in part.bars)])
        cells = max(5, self.width - margin - BAR_END)
        lines: list[RenderableType] = [self._bar(bar, part.full_mib, cells, margin) for bar in part.bars]
        if part.capacity_mib is not None:
            at = round(part.capacity_mib / part.full_mib * cells)
            label = f"{part.capacity_mib:,.0f} MiB"
            lines.append(Styled(" " * max(0, margin + at - len(label) - 2) + label + " ┛", style="bold"))
        return lines if self.everything else [*lines, self._labels(part)]

    def _bar(self, bar: doc.Bar, full_mib: float, cells: int, margin: int) -> Styled:
        """Glyphs for parts; the card's limit as a line across them."""
        glyphs = [self.glyph(name) for name, wide in segments(bar.parts, full_mib, cells) for _ in range(wide)]
        glyphs += [(" ", "")] * (cells - len(glyphs))
        if bar.capacity_mib is not None:
            at = min(cells - 1, max(0, round(bar.capacity_mib / full_mib * cells) - 1))
            glyphs[at] = ("┃", "bold")
        return Styled.assemble(f"{bar.program:<{margin}}", *glyphs, f" {bar.total_mib:,.0f} MiB")

    def _labels(self, part: doc.Bars) -> Styled:
        """The largest parts of the first bar, in its order, with their MiB."""
        parts = part.bars[0].parts
        least = sorted((size for _, size in parts), reverse=True)[:LABELS][-1]
        lines, wide = Styled(), 0
        for name, size in parts:
            if size < least:
                continue
            label = f" {name} {size:,.0f}"
            gap = GAP if wide else 0
            if wide + gap + 1 + len(label) > self.width:
                lines.append("\n")
                gap = wide = 0
            lines.append(" " * gap).append(*self.glyph(name)).append(label)
            wide += gap + 1 + len(label)
        return lines


def segments(parts: tuple[tuple[str, float], ...], full_mib: float, cells: int) -> list[tuple[str, int]]:
    """Parts as whole cells of a bar `cells` wide that stands for `full_mib`: rounded so that they add up."""
    result: list[tuple[str, int]] = []
    filled_mib, filled = 0.0, 0
    for name, size_mib in parts:
        filled_mib += size_mib
        end = round(filled_mib / full_mib * cells) if full_mib else 0
        if end > filled:
            result.append((name, end - filled))
            filled = end
    return result


def _command(command: str, width: int) -> list[str]:
    """A shell command in lines of that width, broken only between words, without the backslashes that join them."""
    lines: list[str] = []
    for word in map(shlex.quote, shlex.split(command)):
        if lines and len(lines[-1]) + 1 + len(word) + len(" \\") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}" if lines else word)
    return lines


def _mark(mark: str) -> Styled:
    return Styled(*MARKS[mark])


def _heading(heading: str) -> list[RenderableType]:
    return [Styled(heading, style="bold")] if heading else []


def _ended(item: doc.Item) -> str:
    return item.text if item.text.endswith(".") else f"{item.text}{':' if item.code else '.'}"


def _beside(*rows: tuple[RenderableType, ...], gap: int = 1) -> Grid:
    """Rows of two: something short, and text that wraps beside it."""
    grid = Grid.grid(padding=(0, gap, 0, 0))
    grid.add_column(no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    return grid


# --- tables ----------------------------------------------------------------------------------------


def _tables(table: doc.Table, page: _Page) -> list[RenderableType]:
    """A table for each group, all with the same columns: figures at full width, words in the rest."""
    places, widths = _layout(table, page.width)
    has_parts = any(row.part for _, rows in table.groups for row in rows)
    shown: list[RenderableType] = []
    for index, (heading, rows) in enumerate(table.groups):
        grid = Grid(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0), show_header=index == 0)
        for place, wide in zip(places, widths, strict=True):
            column = table.columns[place]
            grid.add_column(column.heading, justify="left" if column.words else "right", width=wide)
        for row in rows:
            first, *others = (row.cells[place] for place in places)
            grid.add_row(_first(first, row, page) if has_parts else first, *others, style=STYLES[row.look])
        shown += [*([Styled()] if index else []), *([Styled(heading, style="italic")] if heading else []), grid]
    return shown


def _first(text: str, row: doc.Row, page: _Page) -> Styled:
    """The name of a part with its glyph, or of a sum below the names."""
    return Styled.assemble(page.glyph(row.part), f" {text}") if row.part else Styled(f"  {text}")


def _layout(table: doc.Table, width: int) -> tuple[list[int], list[int]]:
    """The indices of the columns shown, and their widths. Spare columns are left out if words have no room."""
    rows = [row for _, rows in table.groups for row in rows]
    indent = 2 if any(row.part for row in rows) else 0
    natural = [
        max(len(text) for text in (column.heading, *(row.cells[place] for row in rows)))
        for place, column in enumerate(table.columns)
    ]
    natural[0] += indent
    places = list(range(len(table.columns)))
    spare = sorted((place for place in places if table.columns[place].spare), key=lambda p: -table.columns[p].spare)
    while True:
        words = [place for place in places if table.columns[place].words]
        left = width - GAP * (len(places) - 1) - sum(natural[place] for place in places if place not in words)
        if not spare or left >= sum(min(natural[place], FEWEST) for place in words):
            break
        places.remove(spare.pop(0))
    widths = dict(zip(places, (natural[place] for place in places), strict=True))
    for rest, place in zip(range(len(words), 0, -1), sorted(words, key=lambda p: natural[p]), strict=True):
        widths[place] = max(1, min(natural[place], left // rest))  # the narrowest first: others get what it leaves
        left -= widths[place]
    return places, [widths[place] for place in places]
