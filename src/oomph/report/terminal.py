"""A report in the terminal: the verdict first, then one bar against the card's line, then the figures."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oomph.report.palette import look, segments
from oomph.report.summary import Bar, Summary, Verdict

BAR_MARGIN = 14  # columns left of a bar, for the program's name


def to_text(summary: Summary) -> str:
    """The report as text. Colour and width follow the terminal, NO_COLOR and COLUMNS."""
    console = Console(highlight=False)
    width = min(console.width, 110)
    with console.capture() as captured:
        console.print(_report(summary, width), width=width)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def _report(summary: Summary, width: int) -> Group:
    return Group(
        Text(summary.title, style="bold"),
        Text(summary.setting),
        Text(summary.device),
        Text(),
        *(_verdict(verdict) for verdict in summary.verdicts),
        Text(),
        *_bars(summary, width),
        Padding(_memory_table(summary), (1, 0, 1, 0)),
        Text(f"{summary.bars[0].program}, allocated over one optimizer step", style="bold"),
        Text(summary.over_a_step[0], style=look("activations")[0], no_wrap=True, overflow="crop"),
        Text(summary.over_a_step[1], no_wrap=True, overflow="crop"),
        Text(),
        *_time(summary),
        _facts(summary),
        *_to_know(summary),
    )


def _verdict(verdict: Verdict) -> Text:
    mark, style = {True: ("✓", "bold green"), False: ("✗", "bold red"), None: ("·", "bold")}[verdict.fits]
    return Text(f"{mark} {verdict.text}.", style=style)


def _bars(summary: Summary, width: int) -> list[Text]:
    cells = max(5, width - BAR_MARGIN - 14)
    limits = [bar.capacity_mib for bar in summary.bars if bar.capacity_mib is not None]
    full_mib = max([bar.total_mib for bar in summary.bars] + limits)
    lines = [_bar(bar, full_mib, cells) for bar in summary.bars]
    if limits:
        at = round(limits[0] / full_mib * cells)
        label = f"{limits[0]:,.0f} MiB"
        before = BAR_MARGIN + at - 1
        lines.append(Text(" " * max(0, before - len(label) - 1) + label + " ┛", style="bold"))
    return lines


def _bar(bar: Bar, full_mib: float, cells: int) -> Text:
    """Glyphs for parts; the card's limit as a line, in front of what does not fit."""
    glyphs = [
        (look(name)[1], look(name)[0]) for name, wide in segments(bar.parts, full_mib, cells) for _ in range(wide)
    ]
    glyphs += [(" ", "")] * (cells - len(glyphs))
    if bar.capacity_mib is not None:
        at = min(cells - 1, max(0, round(bar.capacity_mib / full_mib * cells) - 1))
        glyphs[at] = ("┃", "bold")
    line = Text(f"{bar.program:<{BAR_MARGIN}}")
    for glyph, style in glyphs:
        line.append(glyph, style=style)
    return line.append(f" {bar.total_mib:,.0f} MiB")


def _memory_table(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("memory, MiB, at the peak")
    for bar in summary.bars:
        table.add_column(bar.program, justify="right")
    for component in summary.components:
        colour, glyph = look(component)
        name = Text.assemble((f"{glyph} ", colour), component)
        table.add_row(name, *(_cell(dict(bar.parts).get(component)) for bar in summary.bars))
    table.add_row(
        Text("  in all", style="bold"), *(Text(f"{bar.total_mib:,.0f}", style="bold") for bar in summary.bars)
    )
    return table


def _cell(size_mib: float | None) -> str:
    return "" if size_mib is None else f"{size_mib:,.0f}" if size_mib >= 10 else f"{size_mib:,.1f}"


def _time_table(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("time", "a step", "tokens/s", "the run", "done, if started now"):
        table.add_column(heading, justify="left" if heading in ("time", "done, if started now") else "right")
    for pace in summary.paces:
        row = (pace.case, pace.step, pace.tokens_per_s, pace.run, pace.finish)
        table.add_row(*row, style="bold" if pace.case == "likely" else "")
    return table


def _time(summary: Summary) -> list[RenderableType]:
    return [Padding(_time_table(summary), (0, 0, 1, 0))] if summary.paces else []


def _to_know(summary: Summary) -> list[RenderableType]:
    return [Text(), Text("to know", style="bold"), _notes(summary)] if summary.notes else []


def _facts(summary: Summary) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    before = ""
    for heading, sentence in summary.facts:
        grid.add_row(heading if heading != before else "", Text(f"{sentence}."))
        before = heading
    return grid


def _notes(summary: Summary) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    for note in summary.notes:
        grid.add_row("·", Text(note if note.endswith(".") else f"{note}."))
    return grid
