"""An explanation in the terminal: what is wrong first, then topic by topic, plain words before figures."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oomph.report.explain_summary import ALL_WELL, ExplainSummary
from oomph.report.palette import look
from oomph.runs.findings import Finding

MARKS = {"error": ("✗", "bold red"), "warning": ("!", "bold yellow"), "info": ("·", "bold")}


def explanation_to_text(summary: ExplainSummary) -> str:
    """The report as text. Colour and width follow the terminal, NO_COLOR and COLUMNS."""
    console = Console(highlight=False)
    with console.capture() as captured:
        console.print(_report(summary), width=min(console.width, 110))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def _report(summary: ExplainSummary) -> Group:
    parts: list[RenderableType] = [
        Text(summary.title, style="bold"),
        Text(summary.setting),
        Text(summary.device),
        Text(),
        *_headlines(summary),
        Text(),
    ]
    urgent = any(finding.severity == "error" and finding.topic == "memory" for finding in summary.headlines)
    parts += _fixes(summary) if urgent else []
    if summary.memory:
        parts.append(Padding(_memory(summary), (0, 0, 1, 0)))
    for heading, findings in summary.sections:
        parts += [Text(heading, style="bold underline"), _findings(findings), Text()]
    parts += [] if urgent else _fixes(summary)
    if summary.notes:
        parts += [Text("to know", style="bold underline"), _list(summary.notes)]
    return Group(*parts)


def _headlines(summary: ExplainSummary) -> list[Text]:
    if not summary.headlines:
        return [Text(f"✓ {ALL_WELL[0].upper()}{ALL_WELL[1:]}.", style="bold green")]
    return [Text(f"{MARKS[f.severity][0]} {f.title}.", style=MARKS[f.severity][1]) for f in summary.headlines]


def _memory(summary: ExplainSummary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("memory, MiB, at the peak")
    for heading in ("predicted", "seen"):
        table.add_column(heading, justify="right")
    for row in summary.memory:
        colour, glyph = look(row.name)
        name = Text(f"  {row.name}", style="bold") if row.is_sum else Text.assemble((f"{glyph} ", colour), row.name)
        table.add_row(name, row.predicted, row.observed, style="bold" if row.is_sum else "")
    return table


def _findings(findings: tuple[Finding, ...]) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for finding in findings:
        mark, style = MARKS[finding.severity]
        grid.add_row(Text(mark, style=style), Text(f"{finding.title}.", style=style))
        grid.add_row("", finding.text)
    return grid


def _fixes(summary: ExplainSummary) -> list[RenderableType]:
    if summary.verdict is None:
        return []
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("", "setting", "program", "MiB", "saved", "tokens/s", "hours", "advice"):
        table.add_column(heading, justify="right" if heading in ("MiB", "saved", "tokens/s", "hours") else "left")
    for line in summary.fixes:
        cells = (line.option, line.program, line.total, line.saved, line.tokens_per_s, line.hours, line.advice)
        table.add_row("★" if line.best else "✓", *cells, style="bold green" if line.best else "")
    title = Text("what fits, the same training first", style="bold underline")
    verdict = Text(f"{summary.verdict}.")
    return [title, verdict, *([Padding(table, (0, 0, 1, 0))] if summary.fixes else [Text()])]


def _list(sentences: tuple[str, ...]) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    for sentence in sentences:
        grid.add_row("·", sentence if sentence.endswith(".") else f"{sentence}.")
    return grid
