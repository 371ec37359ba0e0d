"""Losses of several runs at the same step, tokens, FLOPs and hours, and how much of a difference is noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Literal

import msgspec

from oomph.runs.measured import Measured

At = Literal["step", "tokens", "flops", "hours"]
Points = list[tuple[float, float]]

NEIGHBOURS = 10  # steps on either side over which a training loss is smoothed
AXES: tuple[At, ...] = ("step", "tokens", "flops", "hours")
MOST_POINTS = 12
# A validation estimate over 20 batches of 12 × 64 characters was measured to vary by 0.017 from one draw to the next
# (nanoGPT on Shakespeare, standard deviation): 2.1 nats a token, whose mean narrows with the root of their number.
TOKEN_NOISE = 0.017 * math.sqrt(20 * 12 * 64)
PRINTED = 0.5e-4  # four decimals


class Point(msgspec.Struct, frozen=True):
    """The losses of all runs at one place."""

    x: float
    values: list[float]
    how: Literal["read", "interpolated"]


class Losses(msgspec.Struct, frozen=True):
    """The same axis for all runs."""

    at: At
    kind: Literal["val", "train"]
    points: list[Point]  # empty where the runs do not overlap


def val_noise(run: Measured) -> float | None:
    """Standard deviation of one validation loss; None where the size of an evaluation is not known."""
    sizes = [run.value(key) for key in ("eval_iters", "batch_size", "block_size")]
    tokens = 1
    for size in sizes:
        if type(size) is not int:
            return None
        tokens *= size
    return math.hypot(TOKEN_NOISE / math.sqrt(tokens), PRINTED)


def noise(run: Measured, kind: str) -> float | None:
    """Standard deviation of one loss of that kind: of an evaluation, or of one step's batch."""
    if kind == "val":
        return val_noise(run)
    return math.hypot(TOKEN_NOISE / math.sqrt(run.tokens_per_step), PRINTED) if run.tokens_per_step else None


def kind_for(runs: Sequence[Measured]) -> Literal["val", "train"]:
    """Validation losses where every run has one beyond step 0, else training losses."""
    return "val" if all(any(x > 0 for x, _ in run.run.evals.curve("val_loss")) for run in runs) else "train"


def curve(run: Measured, kind: str) -> Points:
    """(step, loss) of one run."""
    if kind == "val":
        points = run.run.evals.curve("val_loss")
    else:
        points = run.run.evals.curve("train_loss")
        if len(points) < 2:
            points = run.run.steps.curve("loss")
    return [(x, y) for x, y in points if x > 0]


def scale(run: Measured, at: At) -> float | None:
    """What one step is on an axis; None where that is not known."""
    tokens, flops, speed = run.tokens_per_step, run.flops_per_token, run.pace
    if at == "step":
        return 1.0
    if at == "tokens":
        return float(tokens) if tokens else None
    if at == "flops":
        return flops * tokens if flops and tokens else None
    return speed.step_ms / 3.6e6 if speed is not None else None  # evaluations and saving left out


def at_axis(runs: Sequence[Measured], at: At, kind: Literal["val", "train"]) -> Losses:
    """The losses of all runs where their curves overlap: interpolated within what was logged, never beyond."""
    scales = [scale(run, at) for run in runs]
    curves = [curve(run, kind) for run in runs]
    if any(not each for each in scales) or any(not points for points in curves):
        return Losses(at, kind, [])
    placed = [[(x * (each or 1.0), y) for x, y in points] for each, points in zip(scales, curves, strict=True)]
    low, high = max(points[0][0] for points in placed), min(points[-1][0] for points in placed)
    slack = 1e-9 * high
    places = sorted({x for points in placed for x, _ in points if low - slack <= x <= high + slack})
    shared = [x for x in places if all(_has(points, x) for points in placed)]
    return Losses(at, kind, [_point(placed, x) for x in _spread(shared or places)])


def by_steps(runs: Sequence[Measured], at: At) -> Losses:
    """Training losses of the steps, smoothed, at the same places: for runs whose evaluations nowhere overlap."""
    scales = [scale(run, at) for run in runs]
    curves = [_smoothed([(x, y) for x, y in run.run.steps.curve("loss") if x > 0]) for run in runs]
    if any(not each for each in scales) or any(len(points) < 2 * NEIGHBOURS for points in curves):
        return Losses(at, "train", [])
    placed = [[(x * (each or 1.0), y) for x, y in points] for each, points in zip(scales, curves, strict=True)]
    low, high = max(points[0][0] for points in placed), min(points[-1][0] for points in placed)
    if low >= high:
        return Losses(at, "train", [])
    places = [low * (high / low) ** (index / (MOST_POINTS - 1)) for index in range(MOST_POINTS - 1)]
    return Losses(at, "train", [_point(placed, x) for x in (*places, high)])


def _smoothed(points: Points) -> Points:
    """The median of each point and its neighbours, as many on one side as on the other."""
    values = [y for _, y in points]
    last = len(points) - 1
    found = []
    for index, (x, _) in enumerate(points):
        reach = min(NEIGHBOURS, index, last - index)
        found.append((x, median(values[index - reach : index + reach + 1])))
    return found


def _point(placed: Sequence[Points], x: float) -> Point:
    read = all(_has(points, x) for points in placed)
    return Point(x, [interpolate(points, x) for points in placed], "read" if read else "interpolated")


def _has(points: Points, x: float) -> bool:
    return any(math.isclose(x, other, rel_tol=1e-9) for other, _ in points)


def _spread(places: Sequence[float]) -> list[float]:
    """At most `MOST_POINTS` of them, the first and the last among them."""
    if len(places) <= MOST_POINTS:
        return list(places)
    return [places[round(index * (len(places) - 1) / (MOST_POINTS - 1))] for index in range(MOST_POINTS)]


def interpolate(points: Points, x: float) -> float:
    """The loss at `x`, in a straight line over log(x) between the neighbours; the end's own value at the ends."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            share = (math.log(x) - math.log(x0)) / (math.log(x1) - math.log(x0)) if x1 > x0 else 0.0
            return y0 + share * (y1 - y0)
    return points[0][1] if x < points[0][0] else points[-1][1]


def reached_first(placed: Sequence[Points]) -> int | None:
    """The run that is already below every other's lowest loss, and sooner: it leads without any extrapolation."""
    ends = [min(((y, x) for x, y in points), default=(math.inf, math.inf)) for points in placed]
    for index, (loss, when) in enumerate(ends):
        others = [end for other, end in enumerate(ends) if other != index]
        if others and all(loss < y and when <= x for y, x in others):
            return index
    return None
