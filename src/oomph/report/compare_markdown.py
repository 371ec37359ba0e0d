"""A comparison as Markdown."""

from __future__ import annotations

from oomph.report.compare_summary import CompareSummary
from oomph.report.markdown import table as table


def comparison_to_markdown(summary: CompareSummary) -> str:
    """The report as GitHub-flavoured Markdown."""
    rows = [(f"**{goal}**", winner, reason) for goal, winner, reason in summary.verdicts]
    parts = [f"## {' against '.join(summary.runs)}", table(("goal", "winner", "why"), rows).replace("---:", "---")]
    grids = [grid for grid in (summary.settings, summary.metrics, *summary.losses) if grid.rows]
    parts += [table((grid.heading, *summary.runs), [(name, *cells) for name, cells in grid.rows]) for grid in grids]
    for heading, sentences in (
        ("To expect", summary.forecasts),
        ("Not comparable", summary.not_comparable),
        ("To know", summary.notes),
    ):
        if sentences:
            parts.append(f"### {heading}\n\n" + "\n".join(f"- {sentence}." for sentence in sentences))
    return "\n\n".join(parts) + "\n"
