"""The report of a comparison: who wins at what, and why; then the figures behind it; and plots."""

from __future__ import annotations

from oomph.report import document as doc
from oomph.report.explain import throughput
from oomph.runs import curves
from oomph.runs.compare import Comparison
from oomph.runs.curves import Axis, Losses
from oomph.runs.figures import Measured
from oomph.runs.verdicts import GoalVerdict
from oomph.units import count, duration, tflops

UNKNOWN = "–"
SETTINGS = 2  # shown on one screen
ROWS = 6  # of losses per axis; JSON has them all
METRICS = {
    "params": "parameters",
    "tokens_per_step": "tokens a step",
    "step_ms": "a step",
    "predicted_step_ms": "a step, predicted",
    "tokens_per_s": "tokens a second",
    "flops_per_token": "FLOPs a token",
    "tflops": "useful arithmetic a second",
    "mfu": "MFU, of the card's own peak",
    "mfu_nanogpt": "MFU, as nanoGPT prints it",
    "memory_mib": "memory, MiB",
    "predicted_memory_mib": "memory, MiB, predicted",
    "steps": "steps so far",
    "tokens": "tokens so far",
    "train_hours": "hours of steps so far",
    "best_val_loss": "lowest validation loss",
    "val_noise": "noise of one validation loss",
}
AXES = {"step": "the same step", "tokens": "the same tokens", "flops": "the same FLOPs", "hours": "the same hours"}
GOALS = (doc.Column("goal", words=True), doc.Column("winner", words=True), doc.Column("why", words=True, detail=True))
IN_SHORT = ("step_ms", "tokens_per_s", "memory_mib", "predicted_memory_mib", "best_val_loss")
X_AXES: tuple[tuple[Axis, str], ...] = (("tokens", "tokens"), ("hours", "hours of steps"), ("flops", "FLOPs"))


def document(found: Comparison) -> doc.Document:
    """The report: who wins, the main figures, what cannot be compared; in detail why, all figures, losses and notes."""
    settings = tuple(
        doc.Row((key, *(_setting(value) for value in values)), detail=place >= SETTINGS)
        for place, (key, values) in enumerate(found.differences.items())
    )
    metrics = tuple(
        doc.Row((label, *(_figure(name, value) for value in found.metrics[name].values)), detail=name not in IN_SHORT)
        for name, label in _labels(found).items()
        if name in found.metrics
    )
    goals = tuple(doc.Row((each.goal, _winner(each), each.reason)) for each in found.verdicts)
    first = doc.Verdict(found.sentence, "info" if found.sentence.startswith("No winner") else "best")
    parts: list[doc.Part] = [doc.Title(" against ".join(found.runs)), first, doc.Table(GOALS, (("", goals),))]
    parts += [_grid(found, "settings that differ", settings)] if settings else []
    parts += [_grid(found, "figures", metrics)] if metrics else []
    for losses in (each for each in found.losses if each.points):
        parts.append(_grid(found, *_losses(losses), detail=True))
    forecasts = (
        f"{name}: {each.loss:.3f} at step {each.step:,.0f} by its own curve, nine times in ten between "
        f"{each.low:.3f} and {each.high:.3f}"
        for name, each in found.forecasts.items()
    )
    parts += doc.sentence_list("to expect", tuple(forecasts))
    parts += doc.sentence_list("not comparable", tuple(each.text for each in found.not_comparable))
    parts += doc.sentence_list("to know", tuple(each.text for each in found.notes))
    apart = len(found.not_comparable)
    held = f"{apart} reason{'s' * (apart != 1)} not to compare them, " if apart else ""
    return doc.Document(tuple(parts), f"why, {held}every figure, losses side by side")


def _labels(found: Comparison) -> dict[str, str]:
    """The labels of the figures by name; memory's says where it was read, if that is the same in all runs."""
    places = {reading.name for run in found.measured for reading in run.memory()[:1]}
    return METRICS | ({"memory_mib": f"memory, MiB: {places.pop()}"} if len(places) == 1 else {})


def _grid(found: Comparison, heading: str, rows: tuple[doc.Row, ...], detail: bool = False) -> doc.Table:
    columns = (doc.Column(heading, words=True), *(doc.Column(name) for name in found.runs))
    return doc.Table(columns, (("", rows),), shown="detail" if detail else "always")


def picture(found: Comparison) -> doc.Picture:
    """Losses against tokens, hours and FLOPs, and the throughput."""
    charts = (*(_curves(found.measured, at, label) for at, label in X_AXES), throughput(found.measured))
    won = "; ".join(f"{each.goal}: {each.winner}" for each in found.verdicts if each.winner is not None)
    about = won or "no goal has a clear winner"
    return doc.Picture(" against ".join(found.runs), about, charts=charts, names=tuple(found.runs))


def _curves(runs: list[Measured], at: Axis, label: str) -> doc.Chart:
    """Training losses of single steps behind, validation losses marked in front, if every run has them."""
    kind = curves.kind_for(runs)
    lines = []
    for index, run in enumerate(runs):
        each = curves.scale(run, at)
        if not each:
            continue
        steps = [(x * each, y) for x, y in run.run.steps.curve("loss")]
        lines.append(doc.Line(f"{run.name}, training", doc.smooth(steps), index, faint=kind == "val"))
        if kind == "val":
            points = tuple((x * each, y) for x, y in curves.curve(run, "val"))
            lines.append(doc.Line(f"{run.name}, validation", points, index, marked=True))
    word = "validation loss, training behind" if kind == "val" else "training loss"
    return doc.Chart(f"{word}, against {label}", label, "nats", tuple(lines), log_x=True)


def _setting(value: object) -> str:
    if type(value) is int:
        return f"{value:,}"
    return UNKNOWN if value is None else str(value)


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if name in ("step_ms", "predicted_step_ms"):
        return duration(value / 1e3)
    if name in ("mfu", "mfu_nanogpt"):
        return f"{100 * value:.1f} %"
    if name in ("best_val_loss", "val_noise"):
        return f"{value:.4f}"
    if name == "tflops":
        return tflops(value)
    if name == "train_hours":
        return f"{value:,.1f}" if value >= 1 else f"{value:.3g}"
    return count(value) if name in ("params", "flops_per_token", "tokens") else f"{value:,.0f}"


def _winner(verdict: GoalVerdict) -> str:
    if verdict.winner is None:
        return "no winner"
    if verdict.margin is None:
        return verdict.winner
    by = f"{100 * verdict.margin:.0f} %" if verdict.unit == "ratio" else f"{verdict.margin:.4f}"
    return f"{verdict.winner}, by {by}"


def _losses(same: Losses) -> tuple[str, tuple[doc.Row, ...]]:
    """A heading, and rows for a few points at which all runs have a loss."""
    word = "validation" if same.kind == "val" else "training"
    rows = []
    last = len(same.points) - 1
    shown = sorted({round(index * last / (ROWS - 1)) for index in range(ROWS)}) if last >= ROWS else range(last + 1)
    for point in (same.points[index] for index in shown):
        mark = "" if point.how == "read" else " ~"
        rows.append(doc.Row((f"{_place(same.at, point.x)}{mark}", *(f"{value:.4f}" for value in point.values))))
    between = "evaluations" if same.kind == "val" else "steps"
    drawn = f", ~ between two {between}" if any(point.how != "read" for point in same.points) else ""
    return f"{word} loss at {AXES[same.at]}{drawn}", tuple(rows)


def _place(at: str, x: float) -> str:
    if at == "hours":
        return f"{x:.2f} h" if x >= 0.1 else duration(3600 * x)
    return f"{x:.2e}" if at == "flops" else count(x)
