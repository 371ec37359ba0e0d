"""Loss curves of several runs along one axis: their noise, where one leads, and forecasts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Literal

import msgspec

from oomph.runs.figures import Measured

Axis = Literal["step", "tokens", "flops", "hours"]
LossCurve = Sequence[tuple[float, float]]  # (step or place on an axis, loss), by rising first number

NEIGHBOURS = 10  # steps on either side over which a training loss is smoothed
AXES: tuple[Axis, ...] = ("step", "tokens", "flops", "hours")
MOST_POINTS = 12
# Measured: a validation loss over 20 batches of 12 × 64 characters has a standard deviation of 0.017 (nanoGPT on
# Shakespeare). That is 2.1 nats per token, divided by the square root of the number of tokens.
TOKEN_NOISE = 0.017 * math.sqrt(20 * 12 * 64)
PRINTED = 0.5e-4  # losses are printed with four decimals


class LossPoint(msgspec.Struct, frozen=True):
    """The losses of all runs at one point of an axis."""

    x: float
    values: list[float]
    how: Literal["read", "interpolated"]


class Losses(msgspec.Struct, frozen=True):
    """The losses of all runs along one axis."""

    at: Axis
    kind: Literal["val", "train"]
    points: list[LossPoint]  # empty if the runs do not overlap


def val_noise(run: Measured) -> float | None:
    """Standard deviation of one validation loss; None if the size of an evaluation is unknown."""
    sizes = [size for key in ("eval_iters", "batch_size", "block_size") if (size := run.whole(key)) is not None]
    return math.hypot(TOKEN_NOISE / math.sqrt(math.prod(sizes)), PRINTED) if len(sizes) == 3 else None


def noise(run: Measured, kind: str) -> float | None:
    """Standard deviation of one loss: of an evaluation, or of one step's batch."""
    if kind == "val":
        return val_noise(run)
    return math.hypot(TOKEN_NOISE / math.sqrt(run.tokens_per_step), PRINTED) if run.tokens_per_step else None


def kind_for(runs: Sequence[Measured]) -> Literal["val", "train"]:
    """Validation losses if every run has one beyond step 0, else training losses."""
    return "val" if all(any(x > 0 for x, _ in run.run.evals.curve("val_loss")) for run in runs) else "train"


def curve(run: Measured, kind: str) -> LossCurve:
    """(step, loss) of one run."""
    if kind == "val":
        points = run.run.evals.curve("val_loss")
    else:
        points = run.run.evals.curve("train_loss")
        if len(points) < 2:
            points = run.run.steps.curve("loss")
    return [(x, y) for x, y in points if x > 0]


def scale(run: Measured, at: Axis) -> float | None:
    """The length of one step on an axis; None if unknown."""
    tokens, flops, speed = run.tokens_per_step, run.flops_per_token, run.pace
    if at == "step":
        return 1.0
    if run.run.step_unit in ("entry", "epoch"):
        return None  # the number of steps is unknown
    if at == "tokens":
        return float(tokens) if tokens else None
    if at == "flops":
        return flops * tokens if flops and tokens else None
    return speed.step_ms / 3.6e6 if speed is not None else None  # without evaluations and saving


def placed(runs: Sequence[Measured], at: Axis, losses: Sequence[LossCurve]) -> list[LossCurve] | None:
    """The curves, given by steps, along another axis; None if one is empty or the axis of a run is unknown."""
    scales = [each for run in runs if (each := scale(run, at))]
    if len(scales) < len(runs) or not all(losses):
        return None
    return [[(x * each, y) for x, y in points] for each, points in zip(scales, losses, strict=True)]


def at_axis(runs: Sequence[Measured], at: Axis, kind: Literal["val", "train"]) -> Losses:
    """The losses of all runs where their curves overlap: interpolated, never extrapolated."""
    curves = placed(runs, at, [curve(run, kind) for run in runs])
    if curves is None:
        return Losses(at, kind, [])
    low, high = max(points[0][0] for points in curves), min(points[-1][0] for points in curves)
    slack = 1e-9 * high
    places = sorted({x for points in curves for x, _ in points if low - slack <= x <= high + slack})
    shared = [x for x in places if all(_has(points, x) for points in curves)]
    return Losses(at, kind, [_point(curves, x) for x in _spread(shared or places)])


def by_steps(runs: Sequence[Measured], at: Axis) -> Losses:
    """Smoothed training losses of the steps at common points: for runs whose evaluations do not overlap."""
    steps = [[(x, y) for x, y in run.run.steps.curve("loss") if x > 0] for run in runs]
    curves = placed(runs, at, [_smoothed(points) for points in steps])
    if curves is None or any(len(points) < 2 * NEIGHBOURS for points in curves):
        return Losses(at, "train", [])
    low, high = max(points[0][0] for points in curves), min(points[-1][0] for points in curves)
    if low >= high:
        return Losses(at, "train", [])
    places = [low * (high / low) ** (index / (MOST_POINTS - 1)) for index in range(MOST_POINTS - 1)]
    return Losses(at, "train", [_point(curves, x) for x in (*places, high)])


def _smoothed(points: LossCurve) -> LossCurve:
    """The median of each point and its neighbours, equally many on each side."""
    values = [y for _, y in points]
    last = len(points) - 1
    found = []
    for index, (x, _) in enumerate(points):
        reach = min(NEIGHBOURS, index, last - index)
        found.append((x, median(values[index - reach : index + reach + 1])))
    return found


def _point(curves: Sequence[LossCurve], x: float) -> LossPoint:
    read = all(_has(points, x) for points in curves)
    return LossPoint(x, [interpolate(points, x) for points in curves], "read" if read else "interpolated")


def _has(points: LossCurve, x: float) -> bool:
    return any(math.isclose(x, other, rel_tol=1e-9) for other, _ in points)


def _spread(places: Sequence[float]) -> list[float]:
    """At most `MOST_POINTS` of them, including the first and the last."""
    if len(places) <= MOST_POINTS:
        return list(places)
    return [places[round(index * (len(places) - 1) / (MOST_POINTS - 1))] for index in range(MOST_POINTS)]


def interpolate(points: LossCurve, x: float) -> float:
    """The loss at `x`, linear in log(x) between its neighbours; beyond the ends, the value at the end."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            share = (math.log(x) - math.log(x0)) / (math.log(x1) - math.log(x0)) if x1 > x0 else 0.0
            return y0 + share * (y1 - y0)
    return points[0][1] if x < points[0][0] else points[-1][1]


GAP = 1.5  # ratio of neighbouring steps above which the curve between them is unknown


def bracket(points: LossCurve, x: float) -> tuple[float, float]:
    """The lowest and the highest loss that a falling curve may have at `x`: those of its neighbours across a gap."""
    value = interpolate(points, x)
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 < x < x1 and x1 > GAP * x0:
            return min(y0, y1), max(y0, y1)
    return value, value


def crossing(curves: Sequence[LossCurve], least: float) -> float | None:
    """Where two curves cross for good: apart by at least `least` before and after, in the other order; None if not."""
    if len(curves) != 2 or not all(curves):
        return None
    low, high = max(points[0][0] for points in curves), min(points[-1][0] for points in curves)
    if not 0 < low < high:
        return None
    places = [low * (high / low) ** (index / _PLACES) for index in range(_PLACES + 1)]
    gaps = [(x, interpolate(curves[0], x) - interpolate(curves[1], x)) for x in places]
    clear = [(x, gap) for x, gap in gaps if abs(gap) >= least]
    turns = [(x0, x1) for (x0, g0), (x1, g1) in pairwise(clear) if g0 * g1 < 0]
    return math.sqrt(turns[0][0] * turns[0][1]) if len(turns) == 1 else None


_PLACES = 64


def reached_first(curves: Sequence[LossCurve]) -> int | None:
    """The index of the run that got below every other run's lowest loss, and sooner; None if there is none."""
    ends = [min(((y, x) for x, y in points), default=(math.inf, math.inf)) for points in curves]
    for index, (loss, when) in enumerate(ends):
        others = [end for other, end in enumerate(ends) if other != index]
        if others and all(loss < y and when <= x for y, x in others):
            return index
    return None


# --- forecasts -------------------------------------------------------------------------------------

FARTHEST = 2.0  # a curve is extrapolated to at most so many times its last step
LEAST_POINTS = 6
_EXPONENTS = tuple(0.05 * 1.12**n for n in range(32))  # 0.05 to 1.7: covers those reported for language models
_RESAMPLES = 60
_BINS = 48  # a longer curve is averaged into so many points, even in log(step)
_SHARE = 0.9  # of the interval


class PowerLaw(msgspec.Struct, frozen=True):
    """loss = floor + scale · step^-exponent."""

    floor: float
    scale: float
    exponent: float
    residual: float  # root mean square

    def at(self, step: float) -> float:
        return self.floor + self.scale * math.pow(step, -self.exponent)


class Forecast(msgspec.Struct, frozen=True):
    """The loss at a step, with a 90 % interval if the curve continues."""

    step: float
    loss: float
    low: float
    high: float
    perplexity: float
    seen_until: float  # the last step of the curve
    gain_per_doubling: float  # how much lower the loss would be after twice as many steps
    note: str


def perplexity(loss: float) -> float:
    """e^loss."""
    return math.exp(min(loss, 700.0))


def fit_power_law(points: LossCurve) -> PowerLaw | None:
    """A power law with a floor through (step, loss), by least squares; None if points are too few or do not fall.

    For a given exponent, floor and scale follow from linear regression, so only the exponent is searched.
    """
    usable = [(x, y) for x, y in points if x > 0 and math.isfinite(y)]
    if len(usable) < LEAST_POINTS:
        return None
    bases = [[x**-exponent for x, _ in usable] for exponent in _EXPONENTS]
    return _best(bases, [y for _, y in usable])


def _best(bases: Sequence[Sequence[float]], losses: Sequence[float]) -> PowerLaw | None:
    best: PowerLaw | None = None
    for exponent, basis in zip(_EXPONENTS, bases, strict=True):
        floor, scale = _line(basis, losses)
        if floor < 0:  # a loss has no negative floor: use the best line through the origin
            floor = 0.0
            scale = sum(b * y for b, y in zip(basis, losses, strict=True)) / sum(b * b for b in basis)
        if scale <= 0:
            continue
        square = sum((floor + scale * b - y) ** 2 for b, y in zip(basis, losses, strict=True)) / len(losses)
        if best is None or square < best.residual:
            best = PowerLaw(floor, scale, exponent, square)
    return None if best is None else msgspec.structs.replace(best, residual=math.sqrt(best.residual))


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope by least squares."""
    n = len(xs)
    mean_x, mean_y = sum(xs) / n, sum(ys) / n
    spread = sum((x - mean_x) ** 2 for x in xs)
    if spread <= 0:
        return mean_y, 0.0
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    return mean_y - slope * mean_x, slope


def forecast(points: LossCurve, step: float, skip: float = 0.0) -> Forecast | None:
    """The loss at `step` if the curve continues; None past twice the last step seen. `skip`: warm-up steps to ignore.

    The interval covers three things: bootstrapped residuals, the noise of one estimate, and the error with which the
    first half of the curve predicts the last points, scaled by the distance. It does not cover a change of the learning
    rate: the end of a cosine schedule brings the loss below its curve.
    """
    settled = _averaged([(x, y) for x, y in points if x > max(skip, 0.0) and math.isfinite(y)])
    whole = fit_power_law(settled)
    if whole is None:
        return None
    seen = settled[-1][0]
    if step > FARTHEST * seen * (1 + 1e-9):
        return None
    middle = whole.at(step)
    drawn = sorted(_resampled(settled, whole, step))
    noise = 1.645 * whole.residual
    missed = _missed(settled) * max(0.0, math.log2(step / seen)) if step > seen else 0.0
    edge = int((1 - _SHARE) / 2 * len(drawn))
    low = min(middle, drawn[edge]) - noise - missed
    high = max(middle, drawn[-1 - edge]) + noise + missed
    return Forecast(
        step=step,
        loss=middle,
        low=max(0.0, low),
        high=high,
        perplexity=perplexity(middle),
        seen_until=seen,
        gain_per_doubling=middle - whole.at(2 * step),
        note="if the curve continues; a decaying learning rate would bring it lower",
    )


def _averaged(points: LossCurve) -> LossCurve:
    """At most `_BINS` points, even in log(step), each the median of its bin."""
    if len(points) <= _BINS:
        return list(points)
    first, last = math.log(points[0][0]), math.log(points[-1][0])
    groups: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        place = (math.log(x) - first) / (last - first) if last > first else 0.0
        groups.setdefault(min(_BINS - 1, int(place * _BINS)), []).append((x, y))
    return [(median(x for x, _ in group), median(y for _, y in group)) for _, group in sorted(groups.items())]


def _resampled(points: LossCurve, whole: PowerLaw, step: float) -> list[float]:
    """Predictions for `step` from fits with bootstrapped residuals."""
    draw = random.Random(0)
    bases = [[x**-exponent for x, _ in points] for exponent in _EXPONENTS]
    smooth = [whole.at(x) for x, _ in points]
    residuals = [y - s for (_, y), s in zip(points, smooth, strict=True)]
    found = []
    for _ in range(_RESAMPLES):
        again = _best(bases, [s + r for s, r in zip(smooth, draw.choices(residuals, k=len(points)), strict=True)])
        found.append(again.at(step) if again is not None else whole.at(step))
    return found


def _missed(points: LossCurve) -> float:
    """The error of a fit to the first half of the steps at the last points."""
    until = points[-1][0] / FARTHEST
    early = fit_power_law([point for point in points if point[0] <= until])
    if early is None:  # too few to try: allow for a curve that stops falling, or falls in a straight line
        return abs(points[-1][1] - points[len(points) // 2][1])
    last = points[-max(1, len(points) // 8) :]
    return abs(sum(early.at(x) - y for x, y in last)) / len(last)


def expected_end(run: Measured) -> Forecast | None:
    """The validation loss to expect at the end of the run, or at twice its steps so far if that is less."""
    points = curve(run, "val")
    planned = run.whole("max_iters")
    if not points or planned is None or planned <= points[-1][0]:
        return None
    return forecast(points, min(planned, FARTHEST * points[-1][0]), run.whole("warmup_iters") or 0)


def why_no_forecast(run: Measured) -> str | None:
    """Why an unfinished run has no forecast; None if it has one, or is finished."""
    points, planned, skip = curve(run, "val"), run.whole("max_iters"), run.whole("warmup_iters") or 0
    if planned is None:
        return "max_iters is unknown"
    if expected_end(run) is not None or (points and planned <= points[-1][0]):
        return None
    usable = sum(x > skip for x, _ in points)
    if usable < LEAST_POINTS:
        after = f" after the {skip:,} steps of warm-up" if skip else ""
        counted = "1 validation loss" if usable == 1 else f"{usable} validation losses"
        return f"{counted}{after}; {LEAST_POINTS} are needed"
    return "its validation losses do not fall along a curve"
