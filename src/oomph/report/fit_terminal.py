"""A fit in the terminal: the verdict, the ranked options, and why."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oomph.fitting.cards import Cards
from oomph.report.fit_summary import CARD_HEADINGS, HEADINGS, FitSummary, Line, card_rows

GAP = 2  # columns between columns
LEFT = ("", "option", "program", "advice")
WIDE = 100  # columns from which advice has a column of its own


def fit_to_text(summary: FitSummary) -> str:
    """The report as text. Colour and width follow the terminal, NO_COLOR and COLUMNS."""
    console = Console(highlight=False, soft_wrap=False)
    width = min(console.width, 120)
    with console.capture() as captured:
        console.print(_report(summary, width), width=width)
    return captured.get()


def _report(summary: FitSummary, width: int) -> Group:
    mark, style = ("✓", "bold green") if summary.good else ("✗", "bold red")
    return Group(
        Text(f"{mark} {summary.verdict}.", style=style),
        Text(),
        Text(summary.title, style="bold"),
        Text(summary.setting),
        Text(summary.device),
        *_tables(summary, width),
        Text(),
        *_list("why", summary.why),
        *_list("what changes in the training", summary.effects),
        *_patch(summary),
        *_list("to know", summary.notes),
        Text(summary.evaluated, style="dim"),
    )


def _tables(summary: FitSummary, width: int) -> list[RenderableType]:
    """A table a section, all with the same columns: figures as wide as they are, words in what is left."""
    wide = width >= WIDE
    headings = HEADINGS if wide else HEADINGS[:-1]
    rows = [_cells(line, wide) for section in summary.sections for line in section.lines]
    columns = list(zip(headings, *rows, strict=True))
    widths = [max(len(part) for cell in column for part in cell.split("\n")) for column in columns]
    left = width - sum(widths) - GAP * (len(widths) - 1) + widths[1] + (widths[-1] if wide else 0)
    widths[1] = min(widths[1], left * 3 // 5 if wide else left)
    if wide:
        widths[-1] = min(widths[-1], left - widths[1])
    shown: list[RenderableType] = []
    for place, section in enumerate(summary.sections):
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0), show_header=place == 0)
        for heading, cells in zip(headings, widths, strict=True):
            table.add_column(heading, justify="left" if heading in LEFT else "right", width=cells)
        for line in section.lines:
            table.add_row(*_cells(line, wide), style=_style(line))
        shown += [Text(f"\n{section.title}", style="italic"), table]
    return shown


def _cells(line: Line, wide: bool) -> list[str]:
    cells = list(line.cells())
    if not wide:
        cells[1] = f"{cells[1]}\n  {cells.pop()}"
    return cells


def _style(line: Line) -> str:
    return "bold green" if line.best else "" if line.fits else "dim"


def _list(heading: str, sentences: tuple[str, ...]) -> list[RenderableType]:
    if not sentences:
        return []
    grid = Table.grid(padding=(0, 1, 0, 0))
    for sentence in sentences:
        grid.add_row("·", sentence if sentence.endswith(".") else f"{sentence}.")
    return [Text(heading, style="bold"), Padding(grid, (0, 0, 1, 0))]


def _patch(summary: FitSummary) -> list[RenderableType]:
    if summary.patch is None:
        return []
    lines, reason = summary.patch
    return [Text("the two-line patch for nanoGPT", style="bold"), Text(lines), Padding(Text(reason), (0, 0, 1, 0))]


def cards_to_text(cards: Cards) -> str:
    """Which cards would do, as text for the terminal."""
    console = Console(highlight=False, soft_wrap=False)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in CARD_HEADINGS:
        table.add_column(heading, justify="left" if heading == "card" else "right")
    for row in card_rows(cards):
        table.add_row(*row)
    mark, style = ("✓", "bold green") if cards.fitting else ("✗", "bold red")
    verdict = Text(f"{mark} {cards.verdict}.", style=style)
    end = Text("Of each memory size the fastest card; --json has them all. Each is simulated in full.", style="dim")
    with console.capture() as captured:
        console.print(Group(verdict, Padding(table, (1, 0, 1, 0)), end), width=min(console.width, 120))
    return captured.get()
