"""An explanation as pictures: the losses, the throughput, and the memory at its peak."""

from __future__ import annotations

from oomph.planner import Plan
from oomph.report import plot, svg
from oomph.report.plot import Chart, Line
from oomph.report.summary import summarise
from oomph.runs.explain import Explanation
from oomph.runs.measured import Measured
from oomph.runs.model import STEADY
from oomph.runs.verdicts import expected_end

SEEN = 0.05  # of the device's memory
TRAINING, VALIDATION = 0, 1


def explanation_to_svg(explanation: Explanation) -> str:
    """The picture as a self-contained SVG document."""
    measured, plan = explanation.measured, explanation.plan
    charts = [chart for chart in (_losses(measured), throughput([measured])) if chart.is_drawable]
    memory = svg.to_svg(summarise([plan]), [plan]) if plan is not None and _fills(plan) else ""
    if not charts:
        return memory or plot.sheet(measured.name, "nothing that could be drawn", [], [])
    page = plot.sheet(measured.name, _subtitle(explanation), charts, ("training loss", "validation loss"))
    return _below(page, memory, len(charts)) if memory else page


def _fills(plan: Plan) -> bool:
    """Whether the run takes enough of the device's memory to see it in a picture."""
    return plan.memory.capacity_mib is None or plan.memory.total_mib > SEEN * plan.memory.capacity_mib


def _subtitle(explanation: Explanation) -> str:
    worst = [finding.title for finding in explanation.findings if finding.severity != "info"]
    return "; ".join(worst[:2]) or "nothing is wrong, as far as the log tells"


def _losses(measured: Measured) -> Chart:
    tokens = measured.tokens_per_step
    each = float(tokens) if tokens else 1.0
    steps = [(x * each, y) for x, y in measured.run.steps.curve("loss")]
    vals = [(x * each, y) for x, y in measured.run.evals.curve("val_loss")]
    lines = [
        Line("training loss, single steps", tuple(steps), TRAINING, faint=True),
        Line("training loss", plot.smooth(steps), TRAINING),
        Line("validation loss", tuple(vals), VALIDATION, marked=True, band=_ahead(measured, each)),
    ]
    return Chart("loss", "tokens" if tokens else "steps", "nats", tuple(lines), log_x=True)


def _ahead(measured: Measured, each: float) -> tuple[tuple[float, float, float], ...]:
    """Where the run's own curve leads, with its bounds."""
    end = expected_end(measured)
    curve = measured.run.evals.curve("val_loss")
    if end is None or not curve:
        return ()
    step, loss = curve[-1]
    return ((step * each, loss, loss), (end.step * each, end.low, end.high))


def throughput(runs: list[Measured]) -> Chart:
    """Tokens a second of steady steps, or steps a minute where a step's tokens are not known."""
    known = all(run.tokens_per_step for run in runs)
    lines = []
    for index, run in enumerate(runs):
        steps = run.run.steps
        rows = zip(steps.column("step"), steps.column("ms"), steps.column("kind"), strict=True)
        size = float(run.tokens_per_step or 0) if known else 60.0
        points = sorted((step, size / ms * 1e3) for step, ms, kind in rows if kind == STEADY and ms > 0)
        lines.append(Line(run.name, plot.smooth(points, 9), index))
    return Chart("throughput", "steps", "tokens a second" if known else "steps a minute", tuple(lines), from_zero=True)


def _below(page: str, memory: str, columns: int) -> str:
    """One document under another."""
    height = float(page.split('height="', 1)[1].split('"', 1)[0])
    below = float(memory.split('height="', 1)[1].split('"', 1)[0])
    width = max(svg.WIDTH, min(columns, 2) * plot.WIDTH)
    nested = page.replace("<svg ", '<svg x="0" ', 1) + memory.replace("<svg ", f'<svg y="{height:.0f}" ', 1)
    total = round(height + below)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" width="{width}" height="{total}">'
        f'<style>{plot.STYLE}</style><rect class="bg" width="{width}" height="{total}"/>{nested}</svg>\n'
    )
