"""A comparison as pictures: losses against tokens, hours and FLOPs, and the throughput."""

from __future__ import annotations

from oomph.report import plot
from oomph.report.explain_svg import throughput
from oomph.report.plot import Chart, Line
from oomph.runs import losses
from oomph.runs.compare import Comparison
from oomph.runs.losses import At
from oomph.runs.measured import Measured

AXES: tuple[tuple[At, str], ...] = (("tokens", "tokens"), ("hours", "hours of steps"), ("flops", "FLOPs"))


def comparison_to_svg(found: Comparison) -> str:
    """The picture as a self-contained SVG document."""
    charts = [_losses(found.measured, at, label) for at, label in AXES]
    charts.append(throughput(found.measured))
    won = "; ".join(f"{each.goal}: {each.winner}" for each in found.verdicts if each.winner is not None)
    return plot.sheet(" against ".join(found.runs), won or "no goal has a clear winner", charts, found.runs)


def _losses(runs: list[Measured], at: At, label: str) -> Chart:
    """Training losses of single steps behind, validation losses marked in front, where every run has them."""
    kind = losses.kind_for(runs)
    lines = []
    for index, run in enumerate(runs):
        each = losses.scale(run, at)
        if not each:
            continue
        steps = [(x * each, y) for x, y in run.run.steps.curve("loss")]
        lines.append(Line(f"{run.name}, training", plot.smooth(steps), index, faint=kind == "val"))
        if kind == "val":
            points = tuple((x * each, y) for x, y in losses.curve(run, "val"))
            lines.append(Line(f"{run.name}, validation", points, index, marked=True))
    word = "validation loss, training behind" if kind == "val" else "training loss"
    return Chart(f"{word}, against {label}", label, "nats", tuple(lines), log_x=True)
