"""The report of an explanation: one screen in plain words, everything behind `--all`; and its plots."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from oomph.fitting.result import Fit, Option
from oomph.planning.plan import Plan
from oomph.report import document as doc
from oomph.report import plan as plan_report
from oomph.report.fit import options_table
from oomph.report.heading import heading
from oomph.report.plan import figure_mib, memory_bar
from oomph.runs.curves import expected_end
from oomph.runs.explain import Explanation
from oomph.runs.figures import Evidence, Measured
from oomph.runs.findings import Finding, Severity
from oomph.runs.health import LEAST_STEPS
from oomph.runs.run import STEADY
from oomph.units import count, counted

SECTIONS = (
    ("memory", ("memory", "model", "card")),
    ("time", ("time",)),
    ("training", ("loss", "rate", "batch", "data")),
    ("what was read", ("log",)),
)
MARKS: dict[Severity, doc.Mark] = {"error": "no", "warning": "warning", "info": "info"}
# Shown on one screen if nothing more important is wrong, in this order.
IN_SHORT = (
    *(
        "card.screen",
        "card.idle",
        "memory.predicted",
        "memory.logged",
        "memory.others",
        "time.step",
        "time.mfu",
        "time.left",
        "loss.now",
    ),
    *("loss.skipped", "loss.expected", "card.several", "loss.forecast", "log.settings", "log.summary"),
)
# Never a headline: part of another finding, or only a hint about what to add.
WITH_OTHERS = ("memory.cause", "log.contradiction", "card.contradiction", "log.unreadable")
OWN_TENSORS = ("activations", "loading", "optimizer", "evaluation", "fragments")  # causes that are the run's own
SCREEN = 25  # lines of a terminal, in total
WIDTH = 78  # of the 80 columns, for words
LAST_LINES = 6  # for the commands at the end
WATCH = 3  # further problems shown
FIXES = 6  # options shown in detail; JSON has them all
RANKED = 3  # fixes on one screen
ALL_WELL = "Nothing is wrong with this run, as far as its log tells"
TOO_FEW = "No error in it, but too few steps to judge the run by"
LEAST_EVALUATIONS = 3
NO_MORE = "One look at the cards, and no run with it"
SCREEN_ONLY = "Nothing stands out on this screen"
SETTINGS_ONLY = "Nothing in it tells how the run went: no step, no error, no screen of the card"
MEMORY = (doc.Column("memory, MiB, at the peak", words=True), doc.Column("predicted"), doc.Column("seen"))
UNKNOWN = "–"
PROGRAMS = {"nanogpt": "nanoGPT", "oomph": "oomph train", "transformers": "transformers' Trainer"}
SEEN = 0.05  # of the device's memory
TRAINING, VALIDATION = 0, 1


def document(explanation: Explanation) -> doc.Document:
    """The report: what happened, why, what to do, what to watch; in detail every finding, with its reasons."""
    plan, found = explanation.plan, explanation.findings
    title = heading(plan) if plan is not None else _title(explanation)
    above = sum(_lines(line, 0) for line in (title.text, *title.lines))
    parts: list[doc.Part] = [title, *_screen(explanation, SCREEN - LAST_LINES - above)]
    parts += [
        doc.Verdict(finding.title, MARKS[finding.severity], shown="detail")
        for finding in found
        if finding.severity != "info"
    ] or [_all_well(explanation, "detail")]
    parts += _fixes(explanation)
    parts += [doc.Table(MEMORY, (("", tuple(_memory(explanation, plan))),), shown="detail")] if plan is not None else []
    for topic, topics in SECTIONS:
        items = tuple(_item(finding) for finding in found if finding.topic in topics)
        parts += [doc.Items(topic, items, shown="detail")] if items else []
    parts += doc.sentence_list("to know", plan.notes if plan is not None else ())
    return doc.Document(
        tuple(parts),
        "the finding, with its reasons" if len(found) == 1 else f"all {len(found)} findings, with their reasons",
    )


# --- one screen ------------------------------------------------------------------------------------


def _lines(text: str, indent: int = 2) -> int:
    """Lines that a text takes on the screen."""
    return sum(max(1, len(wrap(line, WIDTH - indent))) for line in text.split("\n"))


def _screen(explanation: Explanation, room: int) -> list[doc.Part]:
    """What happened, why, what to do, what to watch, in at most `room` lines."""
    found = explanation.findings
    wrong = [each for each in found if each.severity != "info" and each.id not in WITH_OTHERS]
    wrong = wrong or [each for each in found if each.severity != "info"]
    fixes = _ranked(explanation) if wrong[:1] and wrong[0].topic in ("memory", "card") else []
    parts: list[doc.Part] = []
    if not wrong:
        parts.append(_all_well(explanation, "short"))
        room -= 2
    for first in wrong[:1]:
        parts.append(doc.Verdict(first.title, MARKS[first.severity], shown="short"))
        room -= 1 + _lines(first.title)
        why = _why(explanation, first)
        least = 4 + _lines(_text(fixes[0])) if fixes else 0  # for the first thing to do, and both headings
        while why and _lines(why) > max(2, min(room // 3, room - least)):
            why = f"{why.rstrip('.').rpartition('. ')[0]}." if ". " in why else ""
        if why:
            parts.append(doc.Text(why, "why", shown="short"))
            room -= 2 + _lines(why)
    shown, room = _as_fit([_text(item) for item in fixes], room - 2)
    if shown:
        parts.append(doc.Items("what to do", tuple(fixes[: len(shown)]), shown="short"))
    known = [each for each in found if each.id in IN_SHORT and each not in wrong]
    known.sort(key=lambda each: IN_SHORT.index(each.id))
    facts = [*wrong[1 : 1 + WATCH], *(known if not fixes else [])]
    kept, room = _as_fit([each.title for each in facts], room - 1)
    if kept:
        items = tuple(doc.Item("", each.title, _mark(each)) for each in facts if each.title in kept)
        parts.append(doc.Items("to watch" if fixes else "", items, shown="short"))
    return parts


def _all_well(explanation: Explanation, shown: doc.Shown) -> doc.Verdict:
    """The verdict that nothing is wrong, worded for a run, a screen, or neither."""
    run = explanation.run
    whole = run.snapshots or run.printed.mean_loss or explanation.plan is not None  # a mean of 0 tells nothing
    happened = run.has_happened or run.printed.mean_loss is not None
    if happened and not whole and run.steps.count < LEAST_STEPS and run.evals.count < LEAST_EVALUATIONS:
        return doc.Verdict(TOO_FEW, "info", shown=shown)
    if happened or whole:
        return doc.Verdict(ALL_WELL, "yes", shown=shown)
    if explanation.finding("card.idle") is not None:
        return doc.Verdict(NO_MORE, "info", shown=shown)
    if explanation.finding("card.screen") is not None:
        return doc.Verdict(SCREEN_ONLY, "yes", shown=shown)
    return doc.Verdict(SETTINGS_ONLY, "info", shown=shown)


def _as_fit(texts: Sequence[str], room: int) -> tuple[list[str], int]:
    """The texts that fit into `room` lines, and the lines left."""
    kept = []
    for text in texts:
        need = _lines(text)
        if need > room:
            break
        kept.append(text)
        room -= need
    return kept, room if kept else room + 1


def _why(explanation: Explanation, first: Finding) -> str:
    """The cause of an out-of-memory error, and what adapters leave; else the reasons of the finding itself."""
    cause, adapters = explanation.finding("memory.cause"), explanation.finding("memory.adapters")
    if first.id != "memory.oom" or cause is None:
        return first.text
    own = adapters is not None and cause.numbers["cause"] in OWN_TENSORS
    left = adapters.text if own and adapters is not None else ""
    return " ".join(filter(None, (f"{cause.title}.", cause.text, left, first.text)))


def _ranked(explanation: Explanation) -> list[doc.Item]:
    """Two or three things to do, each with the lines to change."""
    fit = explanation.fit
    cause = explanation.finding("memory.cause")
    general = [doc.Item(fix.title, code=fix.lines) for fix in explanation.fixes]
    # Settings do not help against another process, or against the machine's own limits.
    outside = cause is not None and cause.numbers.get("cause") in (
        "others",
        "beside",
        "refused",
        "machine",
        "library",
        "limit",
    )
    if fit is None or not any(option.fits for option in fit.options):
        return general[:RANKED] + ([doc.Item(fit.verdict)] if fit is not None else [])
    exact = [_option(explanation, option) for option in _different(fit) if option.fits]
    return (general[:1] + exact[: RANKED - 1]) if outside else exact[:RANKED]


def _different(fit: Fit) -> list[Option]:
    """The options in their order, one of each kind of change."""
    chosen: dict[tuple[str, ...], Option] = {}
    for option in fit.options:
        if option.changes:
            chosen.setdefault((option.trainer, *sorted(option.changes)), option)
    return list(chosen.values())


def _text(item: doc.Item) -> str:
    return "\n".join((item.text, *item.code))


def _option(explanation: Explanation, option: Option) -> doc.Item:
    """What to change, its memory and its speed, scaled so that the setting that ran has its measured figures."""
    lines = ", ".join(f"{key} = {value}" for key, value in option.changes.items())
    speed = ""
    if option.tokens_per_s:
        speed = f", about {option.tokens_per_s * _measured_ratio(explanation):,.0f} tokens/s"
    named = _change(option)
    ratio = Evidence(explanation.measured, explanation.plan).memory_ratio
    title = f"{named[:1].upper()}{named[1:]}: {option.plan.memory.total_mib * ratio:,.0f} MiB{speed}"
    return doc.Item(title, code=tuple(wrap(lines, WIDTH - 4)))


CHANGES = {
    "trainer": "with oomph train",
    "return_logits": "returning the loss without the logits",
    "loss_chunk": "the loss in chunks",
    "checkpoint_layers": "activations computed again in backward",
    "expandable_segments": "PyTorch's expandable segments",
    "method": "training an adapter",
}


def _change(option: Option) -> str:
    """What an option changes, in words."""
    config = option.plan.config
    words = [CHANGES[key] for key in option.changes if key in CHANGES]
    if "checkpoint_layers" in option.changes and not config.checkpoint_layers:
        words[words.index(CHANGES["checkpoint_layers"])] = "activations kept, not computed again"
    if option.changes.keys() & {"batch_size", "gradient_accumulation_steps"}:
        words.insert(0, f"{config.batch_size} × {config.gradient_accumulation_steps} instead")
    return ", ".join(words) or option.name


def _measured_ratio(explanation: Explanation) -> float:
    """The run's speed over its plan's."""
    plan, measured = explanation.plan, explanation.measured
    if plan is None or plan.time is None or not measured.tokens_per_s or measured.pace is None:
        return 1.0
    return measured.tokens_per_s / plan.time.tokens_per_s


# --- in detail -------------------------------------------------------------------------------------


def _mark(finding: Finding) -> doc.Mark:
    return "maybe" if finding.basis == "guess" else MARKS[finding.severity]


def _item(finding: Finding) -> doc.Item:
    return doc.Item(finding.text, finding.title, _mark(finding))


def _title(explanation: Explanation) -> doc.Title:
    """What is known about a run that could not be planned."""
    measured, run = explanation.measured, explanation.run
    model = f": a model of {count(measured.params)} parameters" if measured.params is not None else ""
    lines = sum(source.lines for source in run.sources)
    read = [counted(lines, "line")]
    read += [counted(run.steps.count, "step")] if run.steps.count else []
    read += [counted(run.evals.count, "evaluation")] if run.evals.count else []
    program = f"{PROGRAMS.get(run.program, run.program)}: " if run.program else ""
    device = measured.inference.card.device
    known = measured.inference.card.how in ("read", "given")
    where = f", {'on' if known else 'perhaps on'} a {device.name}" if device is not None else ""
    return doc.Title(f"{measured.name}{model}", (f"{program}{', '.join(read)}{where}",))


def _fixes(explanation: Explanation) -> list[doc.Part]:
    """What helps in any case, and the settings that fit: the verdict, and the first of them in detail."""
    fit = explanation.fit
    parts: list[doc.Part] = []
    if explanation.fixes:
        items = tuple(doc.Item(fix.title, code=fix.lines) for fix in explanation.fixes)
        parts.append(doc.Items("what helps against this cause", items, shown="detail"))
    if fit is None:
        return parts
    fitting = [index for index, option in enumerate(fit.options) if option.fits][:FIXES]
    parts.append(doc.Text(f"{fit.verdict}.", "what fits, the same training first", shown="detail"))
    if fitting:
        table = options_table(fit, set(fitting)).brief()
        parts.append(doc.Table(table.columns, table.groups, shown="detail"))
    return parts


def _memory(explanation: Explanation, plan: Plan) -> list[doc.Row]:
    """The predicted parts, and measured figures beside their sums."""
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
    """The losses and the throughput, and the memory at its peak if it is large enough to be visible."""
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
    """The forecast of the run's own loss curve, with its bounds."""
    end = expected_end(measured)
    curve = measured.run.evals.curve("val_loss")
    if end is None or not curve:
        return ()
    step, loss = curve[-1]
    return ((step * each, loss, loss), (end.step * each, end.low, end.high))


def throughput(runs: list[Measured]) -> doc.Chart:
    """Tokens a second of steady steps, or steps a minute if a step's tokens are not known."""
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
