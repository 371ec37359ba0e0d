"""Detect a NaN loss, divergence, overfitting and slow-down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import msgspec

from oomph.runs.run import STEADY, LoggedRun

LEAST_STEPS = 20  # fewer losses are only noise
LEAST_RISE = 0.15  # nats; a smaller rise is noise
RECENT = 20  # "now" is the last twentieth of the run
MOST_RECENT = 100  # steps, at most
SLOWER = 1.15  # times the earlier step time; the middle 90 % of an undisturbed run is within 1 %
CHUNKS = 24  # stretches of steps that are compared


class Rise(msgspec.Struct, frozen=True):
    """A loss that rose again."""

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
    gap: float | None  # validation less training loss


class Slowing(msgspec.Struct, frozen=True):
    """Steps that got slower."""

    before_ms: float
    now_ms: float


def not_finite(run: LoggedRun) -> tuple[int, int] | None:
    """The first step with a NaN or infinite loss, and how many there were; None if there was none."""
    found = [total for total in (run.steps.totals["loss"], run.evals.totals["val_loss"]) if total.non_finite]
    if not found:
        return None
    first = min(total.first_non_finite_key or 0.0 for total in found)
    return int(first), sum(total.non_finite for total in found)


def diverging(run: LoggedRun) -> Rise | None:
    """A training loss above its earlier level by more than the noise of single batches; None if it is not."""
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
    noise = 1.4826 * median(abs(y - now) for _, y in stretches[-1])  # of single batches, robust to outliers
    if now - levels[lowest] <= max(LEAST_RISE, 3 * noise):
        return None
    return Rise(levels[lowest], int(stretches[lowest][-1][0]), now, int(points[-1][0]))


def overfitting(run: LoggedRun, noise: float | None) -> Overfit | None:
    """A validation loss above its lowest by more than noise while the training loss did not rise; None if not."""
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
    return Overfit(int(best_step), best, int(step), now, None if train is None else now - train)


def slowing(run: LoggedRun) -> Slowing | None:
    """The latest steady steps if they are slower than the fastest stretch before them, else None."""
    steps = run.steps
    rows = zip(steps.column("ms"), steps.column("kind"), strict=True)
    times = [ms for ms, kind in rows if kind == STEADY and math.isfinite(ms) and ms > 0]
    if len(times) < 2 * LEAST_STEPS:
        return None
    size = max(5, len(times) // CHUNKS)
    levels = _levels(times, size)
    before = min(levels[:-2], default=0.0)
    # Two stretches, so that one pause (a checkpoint, another program) does not count.
    now = min(levels[-2:])
    return Slowing(before, now) if before and now > SLOWER * before else None


def _levels(values: Sequence[float], size: int) -> list[float]:
    """Medians of consecutive stretches, aligned to the end."""
    return [median(values[end - size : end]) for end in range(len(values), size - 1, -size)][::-1]
