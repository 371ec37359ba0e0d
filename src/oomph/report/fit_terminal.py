"""A fit in the terminal: the verdict, the ranked options, and why."""

from __future__ import annotations

from typing import IO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oomph.fitting.cards import Cards
from oomph.report.fit_summary import CARD_HEADINGS, HEADINGS, FitSummary, Line, Section, card_rows

WIDE = 100  # columns from which advice has a column of its own


def print_fit(summary: FitSummary, file: IO[str] | None = None) -> None:
    """Print the report. Colour and width follow the terminal, NO_COLOR and COLUMNS."""
    console = Console(file=file, highlight=False, soft_wrap=False)
    width = min(console.width, 120)
    mark, style = ("✓", "bold green") if summary.good else ("✗", "bold red")
    console.print(
        Group(
            Text(f"{mark} {summary.verdict}.", style=style),
            Text(),
            Text(summary.title, style="bold"),
            Text(summary.setting),
            Text(summary.device),
            Padding(_table(summary, width >= WIDE), (1, 0, 1, 0)),
            *_list("why", summary.why),
            *_list("what changes in the training", summary.effects),
            *_patch(summary),
            *_list("to know", summary.notes),
            Text(summary.evaluated, style="dim"),
        ),
        width=width,
    )


def _table(summary: FitSummary, wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    headings = HEADINGS if wide else HEADINGS[:-1]
    for heading in headings:
        left = heading in ("", "option", "advice")
        table.add_column(heading, justify="left" if left else "right", no_wrap=not left or heading == "")
    for section in summary.sections:
        _rows(table, section, wide)
    return table


def _rows(table: Table, section: Section, wide: bool) -> None:
    blank = [""] * (len(table.columns) - 2)
    table.add_row("", Text(section.title, style="italic"), *blank)
    for line in section.lines:
        cells = list(line.cells())
        if not wide:
            cells[1] = f"{cells[1]}\n  {cells.pop()}"
        table.add_row(*cells, style=_style(line))


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


def print_cards(cards: Cards, file: IO[str] | None = None) -> None:
    """Print which cards would do."""
    console = Console(file=file, highlight=False, soft_wrap=False)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in CARD_HEADINGS:
        table.add_column(heading, justify="left" if heading == "card" else "right")
    for row in card_rows(cards):
        table.add_row(*row)
    mark, style = ("✓", "bold green") if cards.fitting else ("✗", "bold red")
    verdict = Text(f"{mark} {cards.verdict}.", style=style)
    end = Text("Of each memory size the fastest card; --json has them all. Each is simulated in full.", style="dim")
    console.print(Group(verdict, Padding(table, (1, 0, 1, 0)), end), width=min(console.width, 120))
