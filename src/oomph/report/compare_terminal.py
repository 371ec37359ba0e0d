"""A comparison in the terminal: who wins at what, and why; then the figures behind it."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oomph.report.compare_summary import CompareSummary, Grid


def comparison_to_text(summary: CompareSummary) -> str:
    """The report as text. Colour and width follow the terminal, NO_COLOR and COLUMNS."""
    console = Console(highlight=False)
    with console.capture() as captured:
        console.print(_report(summary), width=min(console.width, 120))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def _report(summary: CompareSummary) -> Group:
    parts: list[RenderableType] = [Text(" against ".join(summary.runs), style="bold"), Text(), _verdicts(summary)]
    grids = [grid for grid in (summary.settings, summary.metrics, *summary.losses) if grid.rows]
    parts += [Padding(_grid(grid, summary.runs), (1, 0, 0, 0)) for grid in grids]
    for heading, sentences in (
        ("to expect", summary.forecasts),
        ("not comparable", summary.not_comparable),
        ("to know", summary.notes),
    ):
        if sentences:
            parts += [Text(), Text(heading, style="bold underline"), _list(sentences)]
    return Group(*parts)


def _verdicts(summary: CompareSummary) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for goal, winner, reason in summary.verdicts:
        won = winner != "no winner"
        style = "bold green" if won else "bold"
        grid.add_row(Text("★" if won else "·", style=style), Text(f"{goal}: {winner}", style=style))
        grid.add_row("", f"{reason}.")
    return grid


def _grid(grid: Grid, runs: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(grid.heading)
    for name in runs:
        table.add_column(name, justify="right")
    for heading, cells in grid.rows:
        table.add_row(heading, *cells)
    return table


def _list(sentences: tuple[str, ...]) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    for sentence in sentences:
        grid.add_row("·", sentence if sentence.endswith(".") else f"{sentence}.")
    return grid
