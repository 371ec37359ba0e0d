"""An explanation as Markdown, for an issue or a forum."""

from __future__ import annotations

from oomph.report.explain_summary import ALL_WELL, ExplainSummary
from oomph.report.markdown import table as table

MARKS = {"error": "❌ ", "warning": "⚠️ ", "info": ""}


def explanation_to_markdown(summary: ExplainSummary) -> str:
    """The report as GitHub-flavoured Markdown."""
    heads = [f"- {MARKS[finding.severity]}**{finding.title}.**" for finding in summary.headlines]
    parts = [
        f"## {summary.title}",
        f"{summary.setting}  \n{summary.device}",
        "\n".join(heads) or f"- ✅ **{ALL_WELL[0].upper()}{ALL_WELL[1:]}.**",
    ]
    if summary.memory:
        rows = [
            (f"**{row.name}**" if row.is_sum else row.name, row.predicted or " ", row.observed or " ")
            for row in summary.memory
        ]
        parts.append(table(("memory, MiB, at the peak", "predicted", "seen"), rows))
    for heading, findings in summary.sections:
        lines = [f"- {MARKS[finding.severity]}**{finding.title}.** {finding.text}" for finding in findings]
        parts.append(f"### {heading.capitalize()}\n\n" + "\n".join(lines))
    if summary.verdict is not None:
        options = [(line.option, line.program, line.total, line.tokens_per_s, line.advice) for line in summary.fixes]
        fixes = f"\n\n{table(('setting', 'program', 'MiB', 'tokens/s', 'advice'), options)}" if options else ""
        parts.append(f"### What fits, the same training first\n\n{summary.verdict}.{fixes}")
    if summary.notes:
        parts.append("### To know\n\n" + "\n".join(f"- {note}" for note in summary.notes))
    return "\n\n".join(parts) + "\n"
