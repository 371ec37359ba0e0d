"""Which run wins at what, by how much, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from oomph.predict.run_time import NANOGPT_PEAK_FLOPS
from oomph.runs import curves
from oomph.runs.curves import Axis, LossCurve, Losses, expected_end, forecast
from oomph.runs.figures import Measured
from oomph.units import count, duration, tflops

CLEAR = 0.01  # speeds closer than this are equal
SIGMAS = 2.0  # losses closer than so many standard deviations are equal
SAME_START = 0.2  # nats: runs with one vocabulary start within this of each other
UNKNOWN_NOISE = 0.025  # nats, if the size of an evaluation is unknown: that of 10 batches; see curves.TOKEN_NOISE
_GOALS: tuple[tuple[str, Axis], ...] = (
    ("quality per token", "tokens"),
    ("quality per hour", "hours"),
    ("quality per FLOP", "flops"),
)
_UNITS = {"step": "steps", "tokens": "tokens", "flops": "FLOP", "hours": "h"}


class GoalVerdict(msgspec.Struct, frozen=True):
    """The result for one goal. `winner` is None for a draw, or if the logs do not show one."""

    goal: str
    winner: str | None
    margin: float | None  # over the next best: ratio minus one, or nats of loss
    unit: str
    reason: str


def verdicts(runs: Sequence[Measured], same: Sequence[Losses]) -> list[GoalVerdict]:
    """One verdict for each goal."""
    by_axis = {each.at: each for each in same}
    found = [_raw_speed(runs), _hardware_use(runs)]
    apart = unlike(runs)
    if apart is not None:
        names = (*(goal for goal, _ in _GOALS), "final loss")
        return found + [
            GoalVerdict(goal, None, None, "nats", f"the losses are not of the same thing: {apart}") for goal in names
        ]
    found += [_quality(runs, goal, by_axis[at]) for goal, at in _GOALS]
    found.append(_final(runs))
    return found


def unlike(runs: Sequence[Measured]) -> str | None:
    """Why the runs' losses cannot be compared (another vocabulary, other data); None if they can."""
    for key, what in (("vocab_size", "the vocabularies differ"), ("dataset", "the data differ")):
        values = [run.value(key) for run in runs]
        if None not in values and len(set(values)) > 1:
            return f"{what} ({_against([f'{value:,}' if type(value) is int else str(value) for value in values])})"
    firsts = [_first_loss(run) for run in runs]
    told = [first for first in firsts if first is not None]
    if len(told) == len(runs) and max(told) - min(told) > SAME_START:
        shown = _against([f"{run.name} {first:.2f}" for run, first in zip(runs, told, strict=True)])
        return f"they begin at different losses ({shown}), as with another tokenizer, other data or trained weights"
    return None


def _first_loss(run: Measured) -> float | None:
    """The loss before any learning, from an evaluation or step at the very start; None if the log has none."""
    for series, name in ((run.run.evals, "val_loss"), (run.run.steps, "loss")):
        curve = series.curve(name)
        if curve and curve[0][0] <= 1:
            return curve[0][1]
    return None


def sentence(runs: Sequence[Measured], found: Sequence[GoalVerdict], same: Sequence[Losses]) -> str:
    """The comparison in one sentence."""
    apart = unlike(runs)
    names = " and ".join(run.name for run in runs)
    if apart is not None:
        return f"No winner: {apart}"
    won = {each.goal: each.winner for each in found}
    token, hour, speed = won["quality per token"], won["quality per hour"], won["raw speed"]
    if token is not None and token == hour:
        return f"{token} learns more, per token and per hour"
    if token is not None and hour is not None:
        meet = _meeting(runs, same)
        return f"{token} learns more per token, {hour} more per hour" + (f"; they meet at {meet}" if meet else "")
    faster = f"; {speed} is faster" if speed is not None else ""
    if token is not None or hour is not None:
        what = "per token" if token is not None else "per hour"
        other = "per hour" if token is not None else "per token"
        return f"{token or hour} learns more {what}; {other} there is no winner{faster}"
    final = won["final loss"]
    if final is not None:
        return f"{final} ends at the lower loss{faster}"
    return f"No winner by what the logs of {names} show{faster}"


def _meeting(runs: Sequence[Measured], same: Sequence[Losses]) -> str | None:
    """Where two runs have the same loss after the same hours."""
    hours = next(each for each in same if each.at == "hours")
    placed = curves.placed(runs, "hours", [curves.curve(run, hours.kind) for run in runs])
    noise = math.hypot(*(curves.noise(run, hours.kind) or UNKNOWN_NOISE for run in runs))
    x = curves.crossing(placed, SIGMAS * noise) if placed is not None else None
    return None if x is None else _amount("hours", x)


def _raw_speed(runs: Sequence[Measured]) -> GoalVerdict:
    rates = [run.tokens_per_s for run in runs]
    shown = _against([f"{run.name} {rate:,.0f}" for run, rate in zip(runs, rates, strict=True) if rate])
    reason = f"tokens/s: {shown}"
    sizes = [run.flops_per_token for run in runs]
    if None not in sizes and max(s or 0 for s in sizes) > 1.05 * min(s or 0 for s in sizes):
        each = _against([f"{run.name} {count(size or 0)}" for run, size in zip(runs, sizes, strict=True)])
        reason += f"; a token costs {each} FLOP"
    return _highest("raw speed", runs, rates, reason)


def _hardware_use(runs: Sequence[Measured]) -> GoalVerdict:
    peaks = {run.peak_tflops for run in runs}
    one_card = len(peaks) == 1
    uses = [run.tflops if one_card or None in peaks else run.mfu for run in runs]
    parts = []
    for run in runs:
        if run.tflops is None:
            continue
        share = f", {run.mfu:.0%} of the card's {tflops(run.peak_tflops)}" if run.mfu and run.peak_tflops else ""
        a100 = f" ({run.mfu_nanogpt or 0:.1%} of an A100's {NANOGPT_PEAK_FLOPS / 1e12:.0f})"
        printed = a100 if run.run.program == "nanogpt" else ""
        parts.append(f"{run.name} {tflops(run.tflops)}{share}{printed}")
    verdict = _highest("hardware use", runs, uses, _against(parts))
    why = _why_busier(runs, verdict.winner)
    return msgspec.structs.replace(verdict, reason=f"{verdict.reason}; {why}" if why else verdict.reason)


def _why_busier(runs: Sequence[Measured], winner: str | None) -> str | None:
    """If the winner is wider: larger matrices, and less of the work is the vocabulary."""
    widths = {run.name: run.value("n_embd") for run in runs}
    won = widths.get(winner or "")
    others = [width for name, width in widths.items() if name != winner]
    if type(won) is not int or not all(type(width) is int and width < won for width in others):
        return None
    shares = [_vocabulary_share(run) for run in runs]
    text = f"it is wider ({won} against {_against([str(width) for width in others])}): larger matrices"
    if None not in shares:
        listed = _against([f"{run.name} {share:.0%}" for run, share in zip(runs, shares, strict=True)])
        text += f", and the vocabulary is a smaller share of the work ({listed})"
    return text


def _vocabulary_share(run: Measured) -> float | None:
    vocabulary, width = run.whole("vocab_size"), run.whole("n_embd")
    return 6 * vocabulary * width / run.flops_per_token if vocabulary and width and run.flops_per_token else None


def _highest(goal: str, runs: Sequence[Measured], values: Sequence[float | None], reason: str) -> GoalVerdict:
    known = sorted(((value, run.name) for run, value in zip(runs, values, strict=True) if value), reverse=True)
    if len(known) < 2:
        return GoalVerdict(
            goal, None, None, "ratio", "known for fewer than two runs" + (f" ({reason})" if reason else "")
        )
    margin = known[0][0] / known[1][0] - 1
    return GoalVerdict(goal, known[0][1] if margin > CLEAR else None, margin, "ratio", reason)


def _quality(runs: Sequence[Measured], goal: str, same: Losses) -> GoalVerdict:
    if not same.points:
        return _without_overlap(runs, goal, same)
    point = same.points[-1]
    where = f"at {_amount(same.at, point.x)}"
    found = _lowest(runs, goal, point.values, f"{same.kind} loss {where}", same.kind, point.how == "interpolated")
    if found.winner is not None and _across_a_gap(runs, same, point.x, found.winner):
        reason = f"{found.reason}; too far from an evaluation to tell"
        found = msgspec.structs.replace(found, winner=None, reason=reason)
    if same.kind == "train" and curves.kind_for(runs) == "val":
        why = "the evaluations do not overlap, so these are training losses of the steps"
        return msgspec.structs.replace(found, reason=f"{found.reason}; {why}")
    return found


def _across_a_gap(runs: Sequence[Measured], same: Losses, x: float, winner: str) -> bool:
    """Whether the order could be reversed, because the curves are known only far from this point."""
    placed = curves.placed(runs, same.at, [curves.curve(run, same.kind) for run in runs])
    if placed is None:
        return False
    bounds = {run.name: curves.bracket(points, x) for run, points in zip(runs, placed, strict=True)}
    return any(bounds[winner][1] >= low for name, (low, _) in bounds.items() if name != winner)


def _lowest(
    runs: Sequence[Measured], goal: str, values: Sequence[float], what: str, kind: str = "val", between: bool = False
) -> GoalVerdict:
    ranked = sorted(
        zip(values, (run.name for run in runs), (curves.noise(run, kind) for run in runs), strict=True),
        key=lambda entry: entry[0],
    )
    margin = ranked[1][0] - ranked[0][0]
    shown = _against([f"{run.name} {value:.4f}" for run, value in zip(runs, values, strict=True)])
    one = "evaluation" if kind == "val" else "step"
    reason = f"{what}: {shown}" + (f", interpolated between {one}s" if between else "")
    noises = [ranked[0][2], ranked[1][2]]
    if None in noises:
        reason += f"; the noise of one {one} is unknown, as its size is"
        clear = margin > SIGMAS * UNKNOWN_NOISE
    else:
        spread = math.hypot(*(noise or 0.0 for noise in noises))
        clear = margin > SIGMAS * spread
        reason += f"; their noise is {spread:.4f}, and another seed changes a run by more"
    return GoalVerdict(goal, ranked[0][1] if clear else None, margin, "nats", reason if clear else f"{reason}: a draw")


def _without_overlap(runs: Sequence[Measured], goal: str, same: Losses) -> GoalVerdict:
    """The verdict if curves do not overlap: one may still lead by being lower, sooner."""
    placed = curves.placed(runs, same.at, [curves.curve(run, same.kind) for run in runs])
    if placed is None:
        return GoalVerdict(goal, None, None, "nats", f"not every log gives its {_UNITS[same.at]} and losses")
    lowest = [min((y, x) for x, y in points) for points in placed]
    shown = _against(
        [f"{run.name} {y:.4f} after {_amount(same.at, x)}" for run, (y, x) in zip(runs, lowest, strict=True)]
    )
    leader = curves.reached_first(placed)
    if leader is None:
        return _extrapolated(runs, goal, same.at, placed) or GoalVerdict(
            goal, None, None, "nats", f"the logs do not overlap: {shown}"
        )
    # The margin is unknown: the losses are at different points.
    return GoalVerdict(goal, runs[leader].name, None, "nats", f"lower and sooner: {shown}")


def _extrapolated(runs: Sequence[Measured], goal: str, at: Axis, placed: Sequence[LossCurve]) -> GoalVerdict | None:
    """The shorter curves extrapolated to where the last one begins; None if that is more than twice their length."""
    x = max(points[0][0] for points in placed)
    found: list[tuple[float, float, float, str]] = []
    for run, points in zip(runs, placed, strict=True):
        if points[-1][0] >= x:
            value = curves.interpolate(points, x)
            noise = SIGMAS * (curves.val_noise(run) or UNKNOWN_NOISE)
            found.append((value, value - noise, value + noise, run.name))
        elif (ahead := forecast(points, x)) is not None:
            found.append((ahead.loss, ahead.low, ahead.high, run.name))
        else:
            return None
    shown = _against([f"{name} {value:.3f} ({low:.3f} to {high:.3f})" for value, low, high, name in found])
    found.sort()
    clear = found[0][2] < found[1][1]
    reason = f"extrapolated to {_amount(at, x)}: {shown}" + ("" if clear else ": a draw, within the uncertainty")
    return GoalVerdict(goal, found[0][3] if clear else None, found[1][0] - found[0][0], "nats", reason)


def _final(runs: Sequence[Measured]) -> GoalVerdict:
    """The lowest validation losses of finished runs, or the forecasts for their ends."""
    totals = [run.run.evals.totals["val_loss"] for run in runs]
    if not all(total.count for total in totals):
        return GoalVerdict("final loss", None, None, "nats", "not every run has a validation loss")
    if all(_finished(run) for run in runs):
        return _lowest(runs, "final loss", [total.low for total in totals], "lowest val loss")
    got = [f"{run.name} {total.low:.4f}, {_progress(run)}" for run, total in zip(runs, totals, strict=True)]
    so_far = f"not finished; so far {_against(got)}"
    ends = [expected_end(run) for run in runs]
    planned = {run.value("max_iters") for run in runs}
    if None in ends or len(planned) > 1 or any(end is not None and end.step not in planned for end in ends):
        return GoalVerdict("final loss", None, None, "nats", so_far)
    ranked = sorted((end.loss, end.low, end.high, run.name) for run, end in zip(runs, ends, strict=True) if end)
    clear = ranked[0][2] < ranked[1][1]
    shown = _against([f"{name} {loss:.3f} ({low:.3f} to {high:.3f})" for loss, low, high, name in ranked])
    reason = f"{so_far}; forecast {shown}" + ("" if clear else ": a draw, within the uncertainty")
    return GoalVerdict("final loss", ranked[0][3] if clear else None, ranked[1][0] - ranked[0][0], "nats", reason)


def _finished(run: Measured) -> bool:
    """Whether the log reaches the last step, or the last step is unknown."""
    planned = run.whole("max_iters")
    return planned is None or (run.run.last_step or 0) >= planned - 1


def _progress(run: Measured) -> str:
    planned = run.whole("max_iters")
    return f"{run.run.steps_done:,}" + (f" of {planned:,} steps" if planned is not None else " steps")


def _amount(at: Axis, x: float) -> str:
    if at == "hours":
        return f"{x:.2f} h" if x >= 0.1 else duration(3600 * x)
    if at == "flops":
        return f"{x:.2e} FLOP"
    return f"{count(x)} {_UNITS[at]}"


def _against(parts: Sequence[str]) -> str:
    return " against ".join(parts)
