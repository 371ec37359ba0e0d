"""A report as Markdown, for an issue, a note or a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.report.summary import Summary


def to_markdown(summary: Summary) -> str:
    """The report as GitHub-flavoured Markdown."""
    marks = {True: "✅", False: "❌", None: "•"}
    parts = [
        f"## {summary.title}",
        f"{summary.setting}  \n{summary.device}",
        "\n".join(f"- {marks[verdict.fits]} **{verdict.text}.**" for verdict in summary.verdicts),
        _memory(summary),
    ]
    if summary.paces:
        rows = [(p.case, p.step, p.tokens_per_s, p.run, p.finish) for p in summary.paces]
        parts.append(table(("time", "a step", "tokens/s", "the run", "done, if started now"), rows))
    parts.append("\n".join(f"- **{heading}**: {sentence}." for heading, sentence in summary.facts))
    if summary.notes:
        parts.append("### To know\n" + "\n".join(f"- {note}" for note in summary.notes))
    return "\n\n".join(parts) + "\n"


def _memory(summary: Summary) -> str:
    rows = []
    for component in summary.components:
        sizes = (dict(bar.parts).get(component) for bar in summary.bars)
        rows.append((component, *("" if size is None else f"{size:,.1f}" for size in sizes)))
    rows.append(("**in all**", *(f"**{bar.total_mib:,.1f}**" for bar in summary.bars)))
    return table(("memory, MiB, at the peak", *(bar.program for bar in summary.bars)), rows)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
