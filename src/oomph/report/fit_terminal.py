"""A fit in the terminal: the verdict, the ranked options, and why."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oomph.fitting.cards import Cards
from oomph.report.fit_summary import CARD_HEADINGS, HEADINGS, FitSummary, Line, card_rows, cards_note

GAP = 2  # columns between columns
LEFT = ("", "option", "program", "advice")
WIDE = 100  # columns from which advice has a column of its own
FEWEST = (24, 16)  # columns that an option and its advice are readable in


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
    lines = [line for section in summary.sections for line in section.lines]
    headings, widths = _layout(lines, width)
    shown: list[RenderableType] = []
    for place, section in enumerate(summary.sections):
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0), show_header=place == 0)
        for heading, cells in zip(headings, widths, strict=True):
            table.add_column(heading, justify="left" if heading in LEFT else "right", width=cells)
        for line in section.lines:
            table.add_row(*_cells(line, headings), style=_style(line))
        shown += [Text(f"\n{section.title}", style="italic"), table]
    return shown


def _layout(lines: list[Line], width: int) -> tuple[tuple[str, ...], list[int]]:
    """The columns shown and how wide each is. Advice has a column of its own where the terminal is wide; where huge
    numbers leave too little for words it goes under the option, and then columns that can be spared go."""
    for spared in ((), ("advice",), ("advice", "saved"), ("advice", "saved", "batch")):
        headings = tuple(heading for heading in HEADINGS if heading not in spared)
        if width < WIDE and not spared:
            continue
        columns = list(zip(headings, *(_cells(line, headings) for line in lines), strict=True))
        widths = [max(len(part) for cell in column for part in cell.split("\n")) for column in columns]
        words = [headings.index(name) for name in ("option", "advice") if name in headings]
        left = width - GAP * (len(widths) - 1) - sum(widths) + sum(widths[place] for place in words)
        if left >= sum(min(widths[place], least) for place, least in zip(words, FEWEST, strict=False)):
            break
    if len(words) > 1:
        widths[words[0]] = min(widths[words[0]], left * 3 // 5)
    widths[words[-1]] = max(1, min(widths[words[-1]], left - sum(widths[place] for place in words[:-1])))
    return headings, widths


def _cells(line: Line, headings: tuple[str, ...]) -> list[str]:
    """The cells of those columns; advice without a column stands under the option."""
    cells = dict(zip(HEADINGS, line.cells(), strict=True))
    if "advice" not in headings:
        cells["option"] = f"{cells['option']}\n  {cells['advice']}"
    return [cells[heading] for heading in headings]


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
    notes = (cards_note(cards), "Of each memory size the fastest card; --json has them all. Each is simulated in full.")
    end = Text("\n".join(filter(None, notes)), style="dim")
    with console.capture() as captured:
        console.print(Group(verdict, Padding(table, (1, 0, 1, 0)), end), width=min(console.width, 120))
    return captured.get()
