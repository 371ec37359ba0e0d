"""Detect a NaN loss, divergence, overfitting and slow-down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import msgspec

from oomph.runs.run import STEADY, LoggedRun, Total

LEAST_STEPS = 20  # with fewer losses nothing is judged
LEAST_NAN_NORMS = 3  # in a row at the end; fewer may be steps skipped by a loss scaler
LEAST_SAME = 8  # losses
LEAST_SAME_EVALUATIONS = 4
LASTING, ABOVE = 5, 0.05  # evaluations since the lowest one, all of them so much higher: no noise
SAME = 1e-3  # relative: of a validation loss that does not move
LEAST_JUMP = 2.0  # nats above every earlier loss: more than batches differ by
LEAST_RISE = 0.15  # nats; a smaller rise is noise
RECENT = 20  # "now" is the last twentieth of the run
MOST_RECENT = 100  # steps, at most
SLOWER = 1.15  # times the earlier step time; the middle 90 % of an undisturbed run is within 1 %
NEAR = 9  # steps around an evaluation
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


class NotFinite(msgspec.Struct, frozen=True):
    """NaN or infinite losses or gradient norms."""

    what: str  # "The loss"
    step: int  # the first
    times: int
    rows: int  # logged in all
    stays: bool  # all since the first are


def not_finite(run: LoggedRun) -> NotFinite | None:
    """The loss that is NaN or infinite, else the gradient norm; None if all are numbers."""
    for what, series, name in (
        ("The loss", run.steps, "loss"),
        ("The validation loss", run.evals, "val_loss"),
        ("The gradient norm", run.steps, "grad_norm"),
    ):
        total = series.totals[name]
        if not total.non_finite:
            continue
        first = total.first_non_finite_key or 0.0
        rows = zip(series.column(series.columns[0]), series.column(name), strict=True)
        stays = not any(math.isfinite(value) for key, value in rows if key >= first)
        if name == "grad_norm" and (not stays or total.non_finite < LEAST_NAN_NORMS) and total.count:
            continue  # a loss scaler skips such steps
        return NotFinite(what, int(first), total.non_finite, total.count + total.non_finite, stays)
    return None


def diverging(run: LoggedRun) -> Rise | None:
    """A training loss above its earlier level by more than the noise of single batches; None if it is not.

    Of a few steps only a jump is seen: the last one far above all before it.
    """
    points = run.steps.curve("loss")
    if len(points) < LEAST_STEPS:
        return _jumped(points)
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


def _jumped(points: Sequence[tuple[float, float]]) -> Rise | None:
    third = len(points) // 3
    if third >= 2:  # it rose and stayed up
        begin, end = points[:third], points[-third:]
        if min(y for _, y in end) - max(y for _, y in begin) > LEAST_JUMP:
            lowest_step, lowest = min(points, key=lambda point: point[1])
            return Rise(lowest, int(lowest_step), points[-1][1], int(points[-1][0]))
    *before, (step, now) = points or [(0.0, 0.0)]
    if not before or now - max(y for _, y in before) <= LEAST_JUMP:
        return None
    lowest_step, lowest = min(before, key=lambda point: point[1])
    return Rise(lowest, int(lowest_step), now, int(step))


def constant(run: LoggedRun) -> float | None:
    """The loss, if every logged one is the same to its last digit; None if they differ or are few."""
    return _same(run.steps.totals["loss"], LEAST_SAME)


def constant_evaluation(run: LoggedRun) -> float | None:
    """The validation loss, if every one is nearly the same; None if they differ or are few."""
    return _same(run.evals.totals["val_loss"], LEAST_SAME_EVALUATIONS, SAME)


def _same(total: Total, least: int, within: float = 0.0) -> float | None:
    same = total.count >= least and total.high - total.low <= within * total.low and total.low > 0
    return total.low if same else None


def overfitting(run: LoggedRun, noise: float | None) -> Overfit | None:
    """A validation loss above its lowest by more than noise while the training loss did not rise; None if not."""
    vals = run.evals.curve("val_loss")
    if len(vals) < 3:
        return None
    best_step, best = min(vals, key=lambda point: point[1])
    step, now = vals[-1]
    since = [val for at, val in vals if at > best_step]
    lasting = len(since) >= LASTING and min(since) > (1 + ABOVE) * best
    if step == best_step or (now - best <= max(3 * math.sqrt(2) * (noise or 0.017), 0.01) and not lasting):
        return None
    before, train = _train_loss(run, best_step), _train_loss(run, step)
    if train is None or before is None or train > before:
        return None  # both rise: that is divergence; and without a training loss nothing follows
    return Overfit(int(best_step), best, int(step), now, now - train)


def _train_loss(run: LoggedRun, step: float) -> float | None:
    """The training loss at an evaluation: printed with it, else the median of the steps around it."""
    trains = dict(run.evals.curve("train_loss"))
    if step in trains:
        return trains[step]
    points = run.steps.curve("loss")
    near = sorted(points, key=lambda point: abs(point[0] - step))[:NEAR]
    return median(loss for _, loss in near) if len(points) >= 2 * NEAR else None


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
    if not before or now <= SLOWER * before:
        return None
    fast, late = times[: -2 * size], sorted(times[-2 * size :])
    # A coarse clock (Windows': 15.6 ms) scatters as widely: most late steps must be above the median before them.
    return Slowing(before, now) if late[len(late) // 4] > sorted(fast)[: len(fast) // 2][-1] else None


def _levels(values: Sequence[float], size: int) -> list[float]:
    """Medians of consecutive stretches, aligned to the end."""
    return [median(values[end - size : end]) for end in range(len(values), size - 1, -size)][::-1]
