"""What a report of an explanation says, before anyone decides how it looks."""

from __future__ import annotations

import msgspec

from oomph.report.fit_summary import Line, summarise_fit
from oomph.report.summary import Bar, summarise
from oomph.runs.case import Case
from oomph.runs.explain import Explanation
from oomph.runs.findings import Finding
from oomph.runs.measured import Measured
from oomph.units import count

SECTIONS = (
    ("memory", ("memory", "model", "card")),
    ("time", ("time",)),
    ("training", ("loss", "rate", "batch", "data")),
    ("what was read", ("log",)),
)
FIXES = 6  # options shown; JSON has them all
ALL_WELL = "nothing is wrong with this run, as far as its log tells"
UNKNOWN = "–"


class MemoryRow(msgspec.Struct, frozen=True):
    """One component, or a sum of them."""

    name: str
    predicted: str
    observed: str
    is_sum: bool = False


class ExplainSummary(msgspec.Struct, frozen=True):
    """A report in words and numbers."""

    title: str
    setting: str
    device: str
    headlines: tuple[Finding, ...]  # errors and warnings: what the reader should see if nothing else
    memory: tuple[MemoryRow, ...]
    sections: tuple[tuple[str, tuple[Finding, ...]], ...]
    verdict: str | None  # of the search for better settings
    fixes: tuple[Line, ...]
    notes: tuple[str, ...]


def summarise_explanation(explanation: Explanation) -> ExplainSummary:
    """The report of an explanation."""
    plan, fit = explanation.plan, explanation.fit
    about = summarise([plan]) if plan is not None else None
    found = explanation.findings
    sections = [(heading, tuple(f for f in found if f.topic in topics)) for heading, topics in SECTIONS]
    fits = summarise_fit(fit) if fit is not None else None
    lines = [line for section in fits.sections for line in section.lines if line.fits] if fits is not None else []
    return ExplainSummary(
        title=about.title if about is not None else _title(explanation.measured),
        setting=about.setting if about is not None else _read(explanation),
        device=about.device if about is not None else _card(explanation.measured),
        headlines=tuple(finding for finding in found if finding.severity != "info"),
        memory=_memory(explanation, about.bars[0]) if about is not None else (),
        sections=tuple(section for section in sections if section[1]),
        verdict=fits.verdict if fits is not None else None,
        fixes=tuple(lines[:FIXES]),
        notes=about.notes if about is not None else (),
    )


def _title(measured: Measured) -> str:
    if measured.params is not None:
        return f"{measured.name}: a model of {count(measured.params)} parameters"
    return measured.name


def _read(explanation: Explanation) -> str:
    run = explanation.run
    lines = sum(source.lines for source in run.sources)
    told = [f"{lines:,} lines", f"{run.steps.count:,} steps", f"{run.evals.count:,} evaluations"]
    return f"{run.program or 'no known program'}: {', '.join(told)}"


def _card(measured: Measured) -> str:
    device = measured.inference.card.device
    return device.name if device is not None else "on a card that is not known"


def _memory(explanation: Explanation, bar: Bar) -> tuple[MemoryRow, ...]:
    """The predicted parts, and what was seen beside their sums."""
    plan = explanation.plan
    case = Case(explanation.measured, plan)
    seen = {reading.predicted_mib: reading.observed_mib for reading in reversed(case.readings())}
    oom = case.oom
    rows = [MemoryRow(name, _mib(size), "") for name, size in bar.parts]
    total = seen.get(bar.total_mib)
    assert plan is not None
    tensors = seen.get(plan.memory.allocated_mib)
    if tensors is not None and total is None:
        rows.append(MemoryRow("tensors at the peak", _mib(plan.memory.allocated_mib), _mib(tensors), True))
    rows.append(MemoryRow("the process, in all", _mib(bar.total_mib), _mib(total), True))
    if oom is not None:
        rows += [
            MemoryRow(f"{name}, when it failed", "", _mib(size), True)
            for name, size in (
                ("tensors", oom.allocated_mib),
                ("the process", oom.process_mib),
                ("asked for", oom.tried_mib),
            )
            if size is not None
        ]
    if case.others_mib:
        rows.append(MemoryRow("other programs", "", _mib(case.others_mib)))
    if bar.capacity_mib is not None:
        where = "the machine" if plan.device.kind == "cpu" else "the card"
        rows.append(MemoryRow(f"{where} gives a process", _mib(bar.capacity_mib), "", True))
    return tuple(rows)


def _mib(size: float | None) -> str:
    return UNKNOWN if size is None else f"{size:,.0f}" if size >= 10 else f"{size:,.1f}"
