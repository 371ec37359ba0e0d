"""How fast a run goes: the time of its steady steps, without warm-up and evaluations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

import msgspec

from oomph.predict.run_time import NANOGPT_PEAK_FLOPS
from oomph.runs.run import EVALUATING, STEADY, LoggedRun

STALLED = 1.5  # a step that takes this many times the median waited for something
LEAST_MFU = 0.5  # percent; below, the two printed decimals are too coarse
WARM_UP_STEPS = 5  # at most, if the log does not mark them
FEW_BARS = 8  # a progress bar's speed is a running mean: of a few, the last is nearest


class StepPace(msgspec.Struct, frozen=True):
    """The speed of the steady steps."""

    step_ms: float  # median
    low_ms: float  # of the middle 90 %
    high_ms: float
    steps: int  # steady steps measured (a sample of a long log)
    stalled: float  # share of them slower than 1.5 times the median
    first_ms: float | None  # the very first step, which includes compilation
    warm_up_steps: int
    evaluation_ms: float | None  # what an evaluation adds to its step
    mfu_percent: float | None  # as printed, median over steady steps


def step_pace(run: LoggedRun) -> StepPace | None:
    """The run's pace; None if no step was timed."""
    steps = run.steps
    columns = [steps.column(name) for name in ("step", "ms", "kind", "mfu_percent")]
    timed = [row for row in zip(*columns, strict=True) if math.isfinite(row[1]) and row[1] > 0]
    steady = [row for row in timed if row[2] == STEADY] or timed[1:] or timed
    if not steady:
        return None
    warm = 0
    if len(steady) > 2 * WARM_UP_STEPS:  # some programs do not mark their warm-up: leave out a slow start
        middle = median(row[1] for row in steady)
        while warm < WARM_UP_STEPS and steady[warm][1] > STALLED * middle:
            warm += 1
    steady = steady[warm:]
    times = sorted(row[1] for row in steady)
    # Iterations of a step differ, because one contains the optimizer: their mean counts.
    middle = fmean(times) if run.step_unit == "iteration" else median(times)
    if run.progress is not None and run.progress.ms is not None and steady[-1][1] == run.progress.ms:
        middle = run.progress.ms if len(steady) < FEW_BARS else middle
    mfus = [row[3] for row in steady if math.isfinite(row[3]) and row[3] > 0]
    extra = [row[1] - middle for row in timed[1:] if row[2] == EVALUATING]
    return StepPace(
        step_ms=middle,
        low_ms=_quantile(times, 0.05),
        high_ms=_quantile(times, 0.95),
        steps=len(times),
        stalled=sum(ms > STALLED * middle for ms in times) / len(times),
        first_ms=timed[0][1] if steps.totals["step"].first == timed[0][0] else None,
        warm_up_steps=warm + sum(row[2] not in (STEADY, EVALUATING) for row in timed),
        evaluation_ms=median(extra) if extra and median(extra) > 0.2 * middle else None,
        mfu_percent=median(mfus) if mfus else None,
    )


def nanogpt_flops_per_step(run: LoggedRun) -> float | None:
    """FLOPs per step and device implied by the MFU and step time that nanoGPT prints; None for other programs."""
    if run.program != "nanogpt":
        return None
    steps = run.steps
    rows = zip(steps.column("ms"), steps.column("mfu_percent"), steps.column("kind"), strict=True)
    steady = sorted(ms * mfu for ms, mfu, kind in rows if kind == STEADY and ms > 0 and mfu >= LEAST_MFU)
    # The printed MFU is a running mean that each evaluation lowers for about twenty steps: use its upper part.
    return _quantile(steady, 0.75) * 1e-5 * NANOGPT_PEAK_FLOPS if steady else None  # ms and %: 1e-3 and 1e-2


def _quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile by linear interpolation."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
