"""The report of an explanation: what is wrong first, then topic by topic, plain words before figures; and its plots."""

from __future__ import annotations

from oomph.planning.plan import Plan
from oomph.report import document as doc
from oomph.report import plan as plan_report
from oomph.report.fit import options_table
from oomph.report.plan import figure_mib, heading, memory_bar
from oomph.runs.curves import expected_end
from oomph.runs.explain import Explanation
from oomph.runs.figures import Evidence, Measured
from oomph.runs.findings import Finding, Severity
from oomph.runs.run import STEADY
from oomph.units import count

SECTIONS = (
    ("memory", ("memory", "model", "card")),
    ("time", ("time",)),
    ("training", ("loss", "rate", "batch", "data")),
    ("what was read", ("log",)),
)
MARKS: dict[Severity, doc.Mark] = {"error": "no", "warning": "warning", "info": "info"}
IN_SHORT = ("memory.predicted", "time.step", "time.mfu", "time.left", "loss.now", "loss.expected")
HEADLINES = 4  # on one screen
FIXES = 6  # options shown in detail; JSON has them all
ALL_WELL = "Nothing is wrong with this run, as far as its log tells"
MEMORY = (doc.Column("memory, MiB, at the peak", words=True), doc.Column("predicted"), doc.Column("seen"))
UNKNOWN = "–"
SEEN = 0.05  # of the device's memory
TRAINING, VALIDATION = 0, 1


def document(explanation: Explanation) -> doc.Document:
    """The report: what is wrong and what would fix it; in detail memory part by part, every finding and note."""
    plan, found = explanation.plan, explanation.findings
    wrong = [finding for finding in found if finding.severity != "info"]
    parts: list[doc.Part] = [heading(plan) if plan is not None else _title(explanation)]
    for place, finding in enumerate(wrong):
        shown: doc.Shown = "always" if place < HEADLINES else "detail"
        parts.append(doc.Verdict(finding.title, MARKS[finding.severity], shown=shown))
    parts += [] if wrong else [doc.Verdict(ALL_WELL, "yes")]
    parts += [doc.Bars((memory_bar(plan),), shown="short")] if plan is not None else []
    urgent = any(finding.severity == "error" and finding.topic == "memory" for finding in wrong)
    fixes = _fixes(explanation)
    parts += fixes if urgent else []
    parts += [doc.Table(MEMORY, (("", tuple(_memory(explanation, plan))),), shown="detail")] if plan is not None else []
    for topic, topics in SECTIONS:
        items = tuple(_item(finding) for finding in found if finding.topic in topics)
        parts += [doc.Items(topic, items, shown="detail")] if items else []
    short = tuple(_item(finding) for finding in found if finding.id in IN_SHORT and finding.severity == "info")
    parts += [doc.Items("", short, shown="short")] if short else []
    parts += [] if urgent else fixes
    parts += doc.sentence_list("to know", plan.notes if plan is not None else ())
    return doc.Document(tuple(parts), f"all {len(found)} findings, with their reasons")


def _item(finding: Finding) -> doc.Item:
    return doc.Item(finding.text, finding.title, MARKS[finding.severity])


def _title(explanation: Explanation) -> doc.Title:
    """What is known of a run that could not be planned."""
    measured, run = explanation.measured, explanation.run
    model = f": a model of {count(measured.params)} parameters" if measured.params is not None else ""
    lines = sum(source.lines for source in run.sources)
    read = f"{lines:,} lines, {run.steps.count:,} steps, {run.evals.count:,} evaluations"
    device = measured.inference.card.device
    where = device.name if device is not None else "on a card that is not known"
    return doc.Title(f"{measured.name}{model}", (f"{run.program or 'no known program'}: {read}", where))


def _fixes(explanation: Explanation) -> list[doc.Part]:
    """The settings that fit: the verdict, and the first of them in detail."""
    fit = explanation.fit
    if fit is None:
        return []
    fitting = [index for index, option in enumerate(fit.options) if option.fits][:FIXES]
    parts: list[doc.Part] = [doc.Text(f"{fit.verdict}.", "what fits, the same training first")]
    if fitting:
        table = options_table(fit, set(fitting)).brief()
        parts.append(doc.Table(table.columns, table.groups, shown="detail"))
    return parts


def _memory(explanation: Explanation, plan: Plan) -> list[doc.Row]:
    """The predicted parts, and what was seen beside their sums."""
    bar = memory_bar(plan)
    evidence = Evidence(explanation.measured, plan)
    seen = {predicted: reading.mib for reading, predicted in reversed(evidence.readings())}
    total, tensors = seen.get(bar.total_mib), seen.get(plan.memory.allocated_mib)
    rows = [doc.Row((name, _mib(size), ""), part=name) for name, size in bar.parts]
    if tensors is not None and total is None:
        rows.append(doc.Row(("tensors at the peak", _mib(plan.memory.allocated_mib), _mib(tensors)), "strong"))
    rows.append(doc.Row(("the process, in all", _mib(bar.total_mib), _mib(total)), "strong"))
    if (oom := evidence.oom) is not None:
        failed = {"tensors": oom.allocated_mib, "the process": oom.process_mib, "asked for": oom.tried_mib}
        rows += [
            doc.Row((f"{name}, when it failed", "", _mib(size)), "strong")
            for name, size in failed.items()
            if size is not None
        ]
    if evidence.others_mib:
        rows.append(doc.Row(("other programs", "", _mib(evidence.others_mib)), part="other programs"))
    if bar.capacity_mib is not None:
        where = "the machine" if plan.device.kind == "cpu" else "the card"
        rows.append(doc.Row((f"{where} gives a process", _mib(bar.capacity_mib), ""), "strong"))
    return rows


def _mib(size: float | None) -> str:
    return UNKNOWN if size is None else figure_mib(size)


# --- plots -----------------------------------------------------------------------------------------


def pictures(explanation: Explanation) -> list[doc.Picture]:
    """The losses and the throughput, and the memory at its peak where it is large enough to be seen."""
    measured, plan = explanation.measured, explanation.plan
    charts = tuple(chart for chart in (_losses(measured), throughput([measured])) if chart.is_drawable)
    worst = [finding.title for finding in explanation.findings if finding.severity != "info"]
    about = "; ".join(worst[:2]) or ALL_WELL
    found = (
        [doc.Picture(measured.name, about, charts=charts, names=("training loss", "validation loss"))] if charts else []
    )
    found += [plan_report.picture([plan])] if plan is not None and _fills(plan) else []
    return found or [doc.Picture(measured.name, "nothing that could be drawn")]


def _fills(plan: Plan) -> bool:
    """Whether the run takes enough of the device's memory to see it in a picture."""
    return plan.memory.capacity_mib is None or plan.memory.total_mib > SEEN * plan.memory.capacity_mib


def _losses(measured: Measured) -> doc.Chart:
    tokens = measured.tokens_per_step
    each = float(tokens) if tokens else 1.0
    steps = [(x * each, y) for x, y in measured.run.steps.curve("loss")]
    vals = [(x * each, y) for x, y in measured.run.evals.curve("val_loss")]
    lines = [
        doc.Line("training loss, single steps", tuple(steps), TRAINING, faint=True),
        doc.Line("training loss", doc.smooth(steps), TRAINING),
        doc.Line("validation loss", tuple(vals), VALIDATION, marked=True, band=_ahead(measured, each)),
    ]
    return doc.Chart("loss", "tokens" if tokens else "steps", "nats", tuple(lines), log_x=True)


def _ahead(measured: Measured, each: float) -> tuple[tuple[float, float, float], ...]:
    """Where the run's own curve leads, with its bounds."""
    end = expected_end(measured)
    curve = measured.run.evals.curve("val_loss")
    if end is None or not curve:
        return ()
    step, loss = curve[-1]
    return ((step * each, loss, loss), (end.step * each, end.low, end.high))


def throughput(runs: list[Measured]) -> doc.Chart:
    """Tokens a second of steady steps, or steps a minute where a step's tokens are not known."""
    known = all(run.tokens_per_step for run in runs)
    lines = []
    for index, run in enumerate(runs):
        steps = run.run.steps
        rows = zip(steps.column("step"), steps.column("ms"), steps.column("kind"), strict=True)
        size = float(run.tokens_per_step or 0) if known else 60.0
        points = sorted((step, size / ms * 1e3) for step, ms, kind in rows if kind == STEADY and ms > 0)
        lines.append(doc.Line(run.name, doc.smooth(points, 9), index))
    return doc.Chart(
        "throughput", "steps", "tokens a second" if known else "steps a minute", tuple(lines), from_zero=True
    )
