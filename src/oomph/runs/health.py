"""Is the training well? Losses that are no numbers, rise, or fall on one side only; steps that slow down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import msgspec

from oomph.runs.model import STEADY, Run

LEAST_STEPS = 20  # below that, a loss's ups and downs tell nothing
LEAST_RISE = 0.15  # nats: a smaller rise is the luck of a few batches
RECENT = 20  # the last twentieth of the run is "now"
MOST_RECENT = 100  # steps, at most
SLOWER = 1.15  # times the step time it had: the middle 90 % of an undisturbed run lies within 1 %
CHUNKS = 24  # a run's steps are looked at in so many stretches


class Rise(msgspec.Struct, frozen=True):
    """A loss that went up again."""

    lowest: float
    lowest_step: int
    now: float
    step: int

    @property
    def by(self) -> float:
        return self.now - self.lowest


class Overfit(msgspec.Struct, frozen=True):
    """A validation loss that rises while the training loss falls."""

    best_step: int
    best_val: float
    step: int
    val: float
    train: float | None
    gap: float | None  # validation less training loss


class Slowing(msgspec.Struct, frozen=True):
    """Steps that take longer than they did."""

    before_ms: float
    now_ms: float


def not_finite(run: Run) -> tuple[int, int] | None:
    """The first step whose loss was no number, and how many there were; None where all are numbers."""
    found = [total for total in (run.steps.totals["loss"], run.evals.totals["val_loss"]) if total.non_finite]
    if not found:
        return None
    first = min(total.first_non_finite_key or 0.0 for total in found)
    return int(first), sum(total.non_finite for total in found)


def diverging(run: Run) -> Rise | None:
    """A training loss that stands well above where it was, beyond the noise of single batches."""
    points = run.steps.curve("loss")
    if len(points) < LEAST_STEPS:
        return None
    size = min(MOST_RECENT, max(5, len(points) // RECENT))
    stretches = [points[end - size : end] for end in range(len(points), size - 1, -size)][::-1]
    if len(stretches) < 3:
        return None
    levels = [median(y for _, y in stretch) for stretch in stretches]
    lowest = min(range(len(levels) - 1), key=lambda index: levels[index])
    now = levels[-1]
    noise = 1.4826 * median(abs(y - now) for _, y in stretches[-1])  # of single batches, outliers left out
    if now - levels[lowest] <= max(LEAST_RISE, 3 * noise):
        return None
    return Rise(levels[lowest], int(stretches[lowest][-1][0]), now, int(points[-1][0]))


def overfitting(run: Run, noise: float | None) -> Overfit | None:
    """A validation loss beyond its lowest by more than noise, the training loss no higher than it was then."""
    vals = run.evals.curve("val_loss")
    if len(vals) < 3:
        return None
    best_step, best = min(vals, key=lambda point: point[1])
    step, now = vals[-1]
    if step == best_step or now - best <= max(3 * math.sqrt(2) * (noise or 0.017), 0.01):
        return None
    trains = dict(run.evals.curve("train_loss"))
    before, train = trains.get(best_step), trains.get(step)
    if train is not None and before is not None and train > before:
        return None  # both rise: that is divergence
    return Overfit(int(best_step), best, int(step), now, train, None if train is None else now - train)


def slowing(run: Run) -> Slowing | None:
    """The last stretch of steady steps against the fastest before it."""
    steps = run.steps
    rows = zip(steps.column("ms"), steps.column("kind"), strict=True)
    times = [ms for ms, kind in rows if kind == STEADY and math.isfinite(ms) and ms > 0]
    if len(times) < 2 * LEAST_STEPS:
        return None
    size = max(5, len(times) // CHUNKS)
    levels = _levels(times, size)
    before = min(levels[:-2], default=0.0)
    # Two stretches, so that one pause (a checkpoint, another program's moment) is no slowing.
    now = min(levels[-2:])
    return Slowing(before, now) if before and now > SLOWER * before else None


def _levels(values: Sequence[float], size: int) -> list[float]:
    """Medians of neighbouring stretches, counted from the end."""
    return [median(values[end - size : end]) for end in range(len(values), size - 1, -size)][::-1]
