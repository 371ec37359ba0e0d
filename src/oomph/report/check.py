"""The report of a check: predicted, measured and error, one line per figure."""

from __future__ import annotations

from collections.abc import Iterator

from oomph.checking.check import Check, shape
from oomph.report import document as doc

FIGURES = (
    ("allocated, MiB", "allocated_mib", "{:,.1f}"),
    ("reserved, MiB", "reserved_mib", "{:,.0f}"),
    ("the process, MiB", "process_mib", "{:,.0f}"),
    ("a step, ms", "step_ms", "{:,.1f}"),
    ("the first step, s", "first_step_s", "{:,.1f}"),
    ("the card, W", "watts", "{:,.0f}"),
)
COLUMNS = (doc.Column("", words=True), doc.Column("predicted"), doc.Column("measured"), doc.Column("error"))


def document(check: Check) -> doc.Document:
    """The report; its details say how each figure was measured."""
    config = check.plan.config
    size = f"{shape(check.plan)}, block {config.block_size}, batch {config.batch_size}"
    vocabulary = "" if check.plan.traced else f"vocabulary {config.vocab_size}, "
    how = f"{vocabulary}{'compiled' if config.compile else 'eager'}, {config.dtype}"
    parts: list[doc.Part] = [doc.Title(f"{check.plan.program} on {check.plan.device.name}: {size}, {how}")]
    if check.failure:
        what = "Memory ran out" if check.out_of_memory else "It failed"
        parts.append(doc.Verdict(f"{what}: {check.failure.rstrip('.')}", "no"))
    parts.append(doc.Table(COLUMNS, (("", tuple(_rows(check))),)))
    parts += doc.sentence_list("", tuple(_facts(check)))
    parts += doc.sentence_list("", check.notes, "short")
    return doc.Document(tuple(parts), "how each figure was measured")


def _rows(check: Check) -> Iterator[doc.Row]:
    error = check.error
    for name, field, form in FIGURES:
        said, was, off = (getattr(figures, field) for figures in (check.predicted, check.measured, error))
        if said is not None or was is not None:
            figures = ("" if value is None else form.format(value) for value in (said, was))
            yield doc.Row((name, *figures, "" if off is None else f"{round(100 * off, 1) + 0.0:+.1f} %"))


def _facts(check: Check) -> Iterator[str]:
    if len(check.steps_ms) > 1:
        low, high = min(check.steps_ms), max(check.steps_ms)
        yield f"The middle of {len(check.steps_ms)} steps, which took {low:,.1f} to {high:,.1f} ms"
    yield f"Tokens: {check.data}"
    yield f"Allocated memory is counted by {check.how}"
    yield from check.notes
