"""What a report of a comparison says, before anyone decides how it looks: tables of words, and sentences."""

from __future__ import annotations

import msgspec

from oomph.runs.compare import Comparison
from oomph.runs.findings import tflops
from oomph.runs.losses import Losses
from oomph.runs.verdicts import Verdict
from oomph.units import count, duration

UNKNOWN = "–"
ROWS = 6  # of losses on one axis; JSON has them all
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


class Grid(msgspec.Struct, frozen=True):
    """A table with a row heading and one cell a run."""

    heading: str
    rows: tuple[tuple[str, tuple[str, ...]], ...]


class CompareSummary(msgspec.Struct, frozen=True):
    """A report in words and numbers."""

    runs: tuple[str, ...]
    verdicts: tuple[tuple[str, str, str], ...]  # goal, winner and margin, reason
    settings: Grid
    metrics: Grid
    losses: tuple[Grid, ...]
    forecasts: tuple[str, ...]
    not_comparable: tuple[str, ...]
    notes: tuple[str, ...]


def summarise_comparison(found: Comparison) -> CompareSummary:
    """The report of a comparison."""
    settings = tuple((key, tuple(_setting(value) for value in values)) for key, values in found.differences.items())
    metrics = tuple(
        (label, tuple(_figure(name, value) for value in found.metrics[name].values))
        for name, label in METRICS.items()
        if name in found.metrics
    )
    forecasts = [
        f"{name}: {each.loss:.3f} at step {each.step:,.0f} by its own curve, nine times in ten between "
        f"{each.low:.3f} and {each.high:.3f}"
        for name, each in found.forecasts.items()
    ]
    return CompareSummary(
        runs=tuple(found.runs),
        verdicts=tuple((each.goal, _winner(each), each.reason) for each in found.verdicts),
        settings=Grid("settings that differ", settings),
        metrics=Grid("figures", metrics),
        losses=tuple(_losses(each) for each in found.losses if each.points),
        forecasts=tuple(forecasts),
        not_comparable=tuple(found.not_comparable),
        notes=tuple(found.notes),
    )


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


def _winner(verdict: Verdict) -> str:
    if verdict.winner is None:
        return "no winner"
    if verdict.margin is None:
        return verdict.winner
    by = f"{100 * verdict.margin:.0f} %" if verdict.unit == "ratio" else f"{verdict.margin:.4f}"
    return f"{verdict.winner}, by {by}"


def _losses(same: Losses) -> Grid:
    word = "validation" if same.kind == "val" else "training"
    rows = []
    last = len(same.points) - 1
    shown = sorted({round(index * last / (ROWS - 1)) for index in range(ROWS)}) if last >= ROWS else range(last + 1)
    for point in (same.points[index] for index in shown):
        mark = "" if point.how == "read" else " ~"
        rows.append((f"{_place(same.at, point.x)}{mark}", tuple(f"{value:.4f}" for value in point.values)))
    between = "evaluations" if same.kind == "val" else "steps"
    drawn = f", ~ between two {between}" if any(point.how != "read" for point in same.points) else ""
    return Grid(f"{word} loss at {AXES[same.at]}{drawn}", tuple(rows))


def _place(at: str, x: float) -> str:
    if at == "hours":
        return f"{x:.2f} h" if x >= 0.1 else duration(3600 * x)
    return f"{x:.2e}" if at == "flops" else count(x)
