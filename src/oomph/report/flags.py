"""The reports on which models fit a card, on what each flag of a run saves and costs, and on its longest context."""

from __future__ import annotations

from oomph.fitting.flags import Flag, Flags, LongestContext
from oomph.fitting.models import ModelOption, Models
from oomph.report import document as doc
from oomph.report.heading import heading
from oomph.report.plan import MARKS, memory_bar, verdict
from oomph.units import count

MODELS = (
    doc.Column("model", words=True),
    doc.Column("parameters"),
    doc.Column("MiB"),
    doc.Column("free"),
    doc.Column("tokens/s"),
)
FLAGS = (
    doc.Column("flag", words=True),
    doc.Column("MiB"),
    doc.Column("saved"),
    doc.Column("tokens/s"),
    doc.Column("faster"),
    doc.Column("training", words=True),
)
UNKNOWN = "–"


def models_document(models: Models) -> doc.Document:
    """The largest models that fit, under the smallest that does not."""
    parts: list[doc.Part] = [doc.Verdict(models.verdict, "yes" if models.fitting else "no")]
    if models.options:
        shown = (models.fitting or list(models.options))[0].plan
        parts += [heading(shown), doc.Table(MODELS, (("", tuple(map(_model, models.options))),))]
        parts += doc.sentence_list("to know", shown.notes)
    return doc.Document(tuple(parts), "what there is to know")


def _model(option: ModelOption) -> doc.Row:
    memory, time = option.plan.memory, option.plan.time
    cells = (
        f"{'✓' if option.fits else '✗'} {option.name}",
        count(option.plan.model.params),
        f"{memory.total_mib:,.0f}",
        UNKNOWN if memory.headroom_mib is None else f"{memory.headroom_mib:,.0f}",
        UNKNOWN if time is None else f"{time.tokens_per_s:,.0f}",
    )
    return doc.Row(cells, "plain" if option.fits else "dim")


def flags_document(flags: Flags) -> doc.Document:
    """The run as it is, and a row for each flag."""
    now = verdict(flags.now)
    parts: list[doc.Part] = [
        doc.Verdict(now.text, MARKS[now.fits]),
        heading(flags.now),
        doc.Table(FLAGS, (("", tuple(map(_flag, flags.flags))),)),
        *doc.sentence_list("to know", flags.now.notes),
    ]
    return doc.Document(tuple(parts), "what there is to know")


def context_document(context: LongestContext) -> doc.Document:
    """The longest context, and the memory of a run with it."""
    parts: list[doc.Part] = [doc.Verdict(context.verdict, "no" if context.plan is None else "yes")]
    if context.plan is not None:
        parts += [heading(context.plan), doc.Bars((memory_bar(context.plan),))]
        parts += doc.sentence_list("to know", context.plan.notes)
    return doc.Document(tuple(parts), "what there is to know")


def _flag(flag: Flag) -> doc.Row:
    time = flag.plan.time
    cells = (
        " ".join(f"--{key}={value}" for key, value in flag.keys.items()),
        f"{flag.plan.memory.total_mib:,.0f}{'' if flag.plan.memory.fits is not False else ' ✗'}",
        f"{flag.saved_mib:+,.0f}",
        UNKNOWN if time is None else f"{time.tokens_per_s:,.0f}",
        UNKNOWN if flag.faster is None else f"{100 * flag.faster:+.0f} %",
        flag.effect,
    )
    return doc.Row(cells)
