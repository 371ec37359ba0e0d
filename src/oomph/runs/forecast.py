"""Losses to expect: from a run's own curve, with bounds, and before a run from published scaling laws."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import median

import msgspec

FARTHEST = 2.0  # a curve is never followed past so many times the steps it was seen for
LEAST_POINTS = 6
_EXPONENTS = tuple(
    0.05 * 1.12**n for n in range(32)
)  # 0.05 to 1.7: every exponent reported for language models is inside
_RESAMPLES = 60
_BINS = 48  # points a fit rests on: a longer curve is averaged into so many, evenly in log(step)
_SHARE = 0.9  # of the bounds


class Fit(msgspec.Struct, frozen=True):
    """loss = floor + scale · step^-exponent."""

    floor: float
    scale: float
    exponent: float
    residual: float  # root mean square

    def at(self, step: float) -> float:
        return self.floor + self.scale * math.pow(step, -self.exponent)


class Forecast(msgspec.Struct, frozen=True):
    """The loss at a step, and where it lies nine times in ten if the curve goes on as it went."""

    step: float
    loss: float
    low: float
    high: float
    perplexity: float
    seen_until: float  # the last step that the curve was seen at
    gain_per_doubling: float  # how much lower twice as many steps would bring it
    note: str


def perplexity(loss: float) -> float:
    """e^loss: among how many words the model hesitates."""
    return math.exp(min(loss, 700.0))


def fit(points: Sequence[tuple[float, float]]) -> Fit | None:
    """A power law with a floor through (step, loss), by least squares; None where points are too few or do not fall.

    For a given exponent floor and scale follow from linear regression, so that one search over exponents is all.
    """
    usable = [(x, y) for x, y in points if x > 0 and math.isfinite(y)]
    if len(usable) < LEAST_POINTS:
        return None
    bases = [[x**-exponent for x, _ in usable] for exponent in _EXPONENTS]
    return _best(bases, [y for _, y in usable])


def _best(bases: Sequence[Sequence[float]], losses: Sequence[float]) -> Fit | None:
    best: Fit | None = None
    for exponent, basis in zip(_EXPONENTS, bases, strict=True):
        floor, scale = _line(basis, losses)
        if floor < 0:  # a loss has no negative floor: the best line through the origin instead
            floor = 0.0
            scale = sum(map(_times, basis, losses)) / sum(b * b for b in basis)
        if scale <= 0:
            continue
        square = sum((floor + scale * b - y) ** 2 for b, y in zip(basis, losses, strict=True)) / len(losses)
        if best is None or square < best.residual:
            best = Fit(floor, scale, exponent, square)
    return None if best is None else msgspec.structs.replace(best, residual=math.sqrt(best.residual))


def _times(left: float, right: float) -> float:
    return left * right


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope by least squares."""
    n = len(xs)
    mean_x, mean_y = sum(xs) / n, sum(ys) / n
    spread = sum((x - mean_x) ** 2 for x in xs)
    if spread <= 0:
        return mean_y, 0.0
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    return mean_y - slope * mean_x, slope


def forecast(points: Sequence[tuple[float, float]], step: float, skip: float = 0.0) -> Forecast | None:
    """The loss at `step` if the curve goes on; None past twice the last step seen. `skip`: steps of warm-up.

    The bounds hold three things: the curves that residuals drawn anew would have given, the noise of one estimate, and
    by how much the curve's first part foretold its last wrongly, grown with the distance. They do not hold a change of
    learning rate: a cosine's end brings the loss below its curve.
    """
    settled = _averaged([(x, y) for x, y in points if x > max(skip, 0.0) and math.isfinite(y)])
    whole = fit(settled)
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
        note="if the curve goes on as it went; a falling learning rate would bring it lower",
    )


def _averaged(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `_BINS` points, evenly in log(step), each the median of its neighbours."""
    if len(points) <= _BINS:
        return list(points)
    first, last = math.log(points[0][0]), math.log(points[-1][0])
    groups: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        place = (math.log(x) - first) / (last - first) if last > first else 0.0
        groups.setdefault(min(_BINS - 1, int(place * _BINS)), []).append((x, y))
    return [(median(x for x, _ in group), median(y for _, y in group)) for _, group in sorted(groups.items())]


def _resampled(points: Sequence[tuple[float, float]], whole: Fit, step: float) -> list[float]:
    """What fits to the curve with its residuals drawn anew say for `step`."""
    draw = random.Random(0)
    bases = [[x**-exponent for x, _ in points] for exponent in _EXPONENTS]
    smooth = [whole.at(x) for x, _ in points]
    residuals = [y - s for (_, y), s in zip(points, smooth, strict=True)]
    found = []
    for _ in range(_RESAMPLES):
        again = _best(bases, [s + r for s, r in zip(smooth, draw.choices(residuals, k=len(points)), strict=True)])
        found.append(again.at(step) if again is not None else whole.at(step))
    return found


def _missed(points: Sequence[tuple[float, float]]) -> float:
    """By how much a fit to the points up to half the last step misses the last ones."""
    until = points[-1][0] / FARTHEST
    early = fit([point for point in points if point[0] <= until])
    if early is None:  # too few to try it: allow for the curve stopping to fall, or falling on in a straight line
        return abs(points[-1][1] - points[len(points) // 2][1])
    last = points[-max(1, len(points) // 8) :]
    return abs(sum(early.at(x) - y for x, y in last)) / len(last)


# --- before a run ---------------------------------------------------------------------------------


class ScalingLaw(msgspec.Struct, frozen=True):
    """loss = floor + a · parameters^-alpha + b · tokens^-beta."""

    name: str
    source: str
    floor: float
    a: float
    alpha: float
    b: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        return self.floor + self.a * math.pow(parameters, -self.alpha) + self.b * math.pow(tokens, -self.beta)


HOFFMANN = ScalingLaw(
    "Chinchilla", "Hoffmann et al. 2022, arXiv:2203.15556, equation 10", 1.69, 406.4, 0.34, 410.7, 0.28
)
BESIROGLU = ScalingLaw(
    "Chinchilla, fitted again", "Besiroglu et al. 2024, arXiv:2404.10102", 1.8172, 482.01, 0.3478, 2085.43, 0.3658
)
LAWS = (HOFFMANN, BESIROGLU)
TOKENS_PER_PARAMETER = 20.0  # Chinchilla's balance of data and size
_REUSE = 15.39  # R*_D of Muennighoff et al. 2023, arXiv:2305.16264: what repeated tokens are worth decays with it


class Expectation(msgspec.Struct, frozen=True):
    """The loss that published laws expect of a run, their spread as bounds."""

    low: float
    high: float
    tokens: float  # as many fresh tokens are worth as much as the run's own
    tokens_per_parameter: float
    laws: dict[str, float]
    note: str


def effective_tokens(tokens: float, dataset_tokens: float | None) -> float:
    """Fresh tokens that `tokens` from a smaller dataset are worth: the second to fourth pass nearly a fresh one."""
    if not dataset_tokens or tokens <= dataset_tokens:
        return tokens
    passes = tokens / dataset_tokens - 1
    return dataset_tokens * (1 + _REUSE * (1 - math.exp(-passes / _REUSE)))


def expect(parameters: float, tokens: float, dataset_tokens: float | None = None) -> Expectation:
    """What published scaling laws say of a model of so many parameters after so many tokens."""
    worth = effective_tokens(tokens, dataset_tokens)
    laws = {law.name: law.loss(parameters, worth) for law in LAWS}
    return Expectation(
        low=min(laws.values()),
        high=max(laws.values()),
        tokens=worth,
        tokens_per_parameter=tokens / parameters,
        laws=laws,
        note="fitted on other text, another vocabulary and finished schedules: a guide to about 0.3, not a forecast",
    )


def usual_learning_rate(parameters: float) -> float:
    """The peak learning rate for Adam and half a million tokens a step that Kaplan et al. 2020 fit.

    arXiv:2001.08361, equation D.1; `parameters` are those outside embeddings.
    """
    return max(1e-5, 0.003239 - 0.0001395 * math.log(max(parameters, 1.0)))
