"""A fit as Markdown, for an issue, a note or a pull request."""

from __future__ import annotations

from oomph.fitting.cards import Cards
from oomph.report.fit_summary import CARD_HEADINGS, HEADINGS, FitSummary, card_rows, cards_note
from oomph.report.markdown import table as table


def fit_to_markdown(summary: FitSummary) -> str:
    """The report as GitHub-flavoured Markdown."""
    parts = [
        f"## {'✅' if summary.good else '❌'} {summary.verdict}.",
        f"{summary.title}  \n{summary.setting}  \n{summary.device}",
    ]
    for section in summary.sections:
        rows = [(*line.cells(), line.effect) for line in section.lines]
        parts.append(f"### {section.title.capitalize()}\n\n{table((*HEADINGS, 'effect on the training'), rows)}")
    for heading, sentences in (
        ("Why", summary.why),
        ("To know", summary.notes),
    ):
        if sentences:
            parts.append(f"### {heading}\n\n" + "\n".join(f"- {sentence}" for sentence in sentences))
    if summary.patch is not None:
        lines, reason = summary.patch
        parts.append(f"### The two-line patch for nanoGPT\n\n```\n{lines}```\n\n{reason}")
    parts.append(f"{summary.evaluated}.")
    return "\n\n".join(parts) + "\n"


def cards_to_markdown(cards: Cards) -> str:
    """Which cards would do, as Markdown."""
    mark = "✅" if cards.fitting else "❌"
    note = f"\n\\{cards_note(cards)}\n" if cards_note(cards) else ""
    return f"## {mark} {cards.verdict}.\n\n{table(CARD_HEADINGS, card_rows(cards))}\n{note}"
