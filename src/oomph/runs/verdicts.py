"""Who wins for which goal, by how much, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from oomph.runs import losses
from oomph.runs.findings import tflops
from oomph.runs.forecast import FARTHEST, LEAST_POINTS, Forecast, forecast
from oomph.runs.losses import At, Losses
from oomph.runs.measured import Measured
from oomph.units import count, duration

CLEAR = 0.01  # speeds closer than this are equal
SIGMAS = 2.0  # losses closer than so many standard deviations are equal
_GOALS: tuple[tuple[str, At], ...] = (
    ("quality per token", "tokens"),
    ("quality per hour", "hours"),
    ("quality per FLOP", "flops"),
)
_UNITS = {"step": "steps", "tokens": "tokens", "flops": "FLOP", "hours": "h"}


class Verdict(msgspec.Struct, frozen=True):
    """The outcome for one goal. `winner` is None for a draw, or where it cannot be told."""

    goal: str
    winner: str | None
    margin: float | None  # over the next best: a ratio less one, or nats of loss
    unit: str
    reason: str


def verdicts(runs: Sequence[Measured], same: Sequence[Losses]) -> list[Verdict]:
    """A verdict for each goal."""
    by_axis = {each.at: each for each in same}
    found = [_raw_speed(runs), _hardware_use(runs)]
    found += [_quality(runs, goal, by_axis[at]) for goal, at in _GOALS]
    found.append(_final(runs))
    return found


def _raw_speed(runs: Sequence[Measured]) -> Verdict:
    rates = [run.tokens_per_s for run in runs]
    shown = _against([f"{run.name} {rate:,.0f}" for run, rate in zip(runs, rates, strict=True) if rate])
    reason = f"tokens a second: {shown}"
    sizes = [run.flops_per_token for run in runs]
    if None not in sizes and max(s or 0 for s in sizes) > 1.05 * min(s or 0 for s in sizes):
        each = _against([f"{run.name} {count(size or 0)}" for run, size in zip(runs, sizes, strict=True)])
        reason += f"; a token costs {each} FLOP"
    return _highest("raw speed", runs, rates, reason)


def _hardware_use(runs: Sequence[Measured]) -> Verdict:
    peaks = {run.peak_tflops for run in runs}
    one_card = len(peaks) == 1
    uses = [run.tflops if one_card or None in peaks else run.mfu for run in runs]
    parts = []
    for run in runs:
        if run.tflops is None:
            continue
        share = f", {run.mfu:.0%} of the card's {tflops(run.peak_tflops)}" if run.mfu and run.peak_tflops else ""
        printed = f" ({run.mfu_nanogpt or 0:.1%} of an A100's 312)" if run.run.program == "nanogpt" else ""
        parts.append(f"{run.name} {tflops(run.tflops)}{share}{printed}")
    verdict = _highest("hardware use", runs, uses, _against(parts))
    why = _why_busier(runs, verdict.winner)
    return msgspec.structs.replace(verdict, reason=f"{verdict.reason}; {why}" if why else verdict.reason)


def _why_busier(runs: Sequence[Measured], winner: str | None) -> str | None:
    """A wider model multiplies larger matrices, and spends less of its time on the vocabulary."""
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
    words, width = run.value("vocab_size"), run.value("n_embd")
    if type(words) is not int or type(width) is not int or not run.flops_per_token:
        return None
    return 6 * words * width / run.flops_per_token


def _highest(goal: str, runs: Sequence[Measured], values: Sequence[float | None], reason: str) -> Verdict:
    known = sorted(((value, run.name) for run, value in zip(runs, values, strict=True) if value), reverse=True)
    if len(known) < 2:
        return Verdict(goal, None, None, "ratio", "fewer than two runs tell" + (f" ({reason})" if reason else ""))
    margin = known[0][0] / known[1][0] - 1
    return Verdict(goal, known[0][1] if margin > CLEAR else None, margin, "ratio", reason)


def _quality(runs: Sequence[Measured], goal: str, same: Losses) -> Verdict:
    if not same.points:
        return _without_overlap(runs, goal, same)
    point = same.points[-1]
    where = f"at {_amount(same.at, point.x)}"
    found = _lowest(runs, goal, point.values, f"{same.kind} loss {where}", same.kind, point.how == "interpolated")
    if same.kind == "train" and losses.kind_for(runs) == "val":
        why = "the evaluations nowhere overlap here, so these are the steps' own losses"
        return msgspec.structs.replace(found, reason=f"{found.reason}; {why}")
    return found


def _lowest(
    runs: Sequence[Measured], goal: str, values: Sequence[float], what: str, kind: str = "val", between: bool = False
) -> Verdict:
    ranked = sorted(
        zip(values, (run.name for run in runs), (losses.noise(run, kind) for run in runs), strict=True),
        key=lambda entry: entry[0],
    )
    margin = ranked[1][0] - ranked[0][0]
    shown = _against([f"{run.name} {value:.4f}" for run, value in zip(runs, values, strict=True)])
    one = "evaluation" if kind == "val" else "step"
    reason = f"{what}: {shown}" + (f", interpolated between {one}s" if between else "")
    noises = [ranked[0][2], ranked[1][2]]
    if None in noises:
        reason += f"; how noisy one {one} is cannot be told: its size is not known"
        clear = margin > SIGMAS * 0.017
    else:
        spread = math.hypot(*(noise or 0.0 for noise in noises))
        clear = margin > SIGMAS * spread
        reason += f"; the {one}s' noise is {spread:.4f}, and another seed moves a run by more"
    return Verdict(goal, ranked[0][1] if clear else None, margin, "nats", reason if clear else f"{reason}: a draw")


def _without_overlap(runs: Sequence[Measured], goal: str, same: Losses) -> Verdict:
    """The curves nowhere stand at the same place: one may still lead, by being lower and sooner."""
    scales = [losses.scale(run, same.at) for run in runs]
    curves = [losses.curve(run, same.kind) for run in runs]
    if not all(scales) or not all(curves):
        return Verdict(goal, None, None, "nats", f"not every log tells its {_UNITS[same.at]} and losses")
    placed = [[(x * (each or 1.0), y) for x, y in points] for points, each in zip(curves, scales, strict=True)]
    lowest = [min((y, x) for x, y in points) for points in placed]
    shown = _against(
        [f"{run.name} {y:.4f} after {_amount(same.at, x)}" for run, (y, x) in zip(runs, lowest, strict=True)]
    )
    leader = losses.reached_first(placed)
    if leader is None:
        return _extrapolated(runs, goal, same.at, placed) or Verdict(
            goal, None, None, "nats", f"the logs do not overlap: {shown}"
        )
    # By how much is not known: the losses are of different places.
    return Verdict(goal, runs[leader].name, None, "nats", f"lower and sooner: {shown}")


def _extrapolated(runs: Sequence[Measured], goal: str, at: At, placed: Sequence[losses.Points]) -> Verdict | None:
    """The shorter curves followed to where the last one begins, if that is at most twice as far as they go."""
    x = max(points[0][0] for points in placed)
    found: list[tuple[float, float, float, str]] = []
    for run, points in zip(runs, placed, strict=True):
        if points[-1][0] >= x:
            value = losses.interpolate(points, x)
            noise = SIGMAS * (losses.val_noise(run) or 0.017)
            found.append((value, value - noise, value + noise, run.name))
        elif (ahead := forecast(points, x)) is not None:
            found.append((ahead.loss, ahead.low, ahead.high, run.name))
        else:
            return None
    shown = _against([f"{name} {value:.3f} ({low:.3f} to {high:.3f})" for value, low, high, name in found])
    found.sort()
    clear = found[0][2] < found[1][1]
    reason = f"extrapolated to {_amount(at, x)}: {shown}" + ("" if clear else ": a draw, within the uncertainty")
    return Verdict(goal, found[0][3] if clear else None, found[1][0] - found[0][0], "nats", reason)


def _final(runs: Sequence[Measured]) -> Verdict:
    """The lowest validation loss of each run that is finished, or what its curve foretells for its end."""
    totals = [run.run.evals.totals["val_loss"] for run in runs]
    if not all(total.count for total in totals):
        return Verdict("final loss", None, None, "nats", "not every run has a validation loss")
    if all(_finished(run) for run in runs):
        return _lowest(runs, "final loss", [total.low for total in totals], "lowest val loss")
    got = [f"{run.name} {total.low:.4f}, {_progress(run)}" for run, total in zip(runs, totals, strict=True)]
    so_far = f"not finished: so far {_against(got)}"
    ends = [expected_end(run) for run in runs]
    planned = {run.value("max_iters") for run in runs}
    if None in ends or len(planned) > 1 or any(end is not None and end.step not in planned for end in ends):
        return Verdict("final loss", None, None, "nats", so_far)
    ranked = sorted((end.loss, end.low, end.high, run.name) for run, end in zip(runs, ends, strict=True) if end)
    clear = ranked[0][2] < ranked[1][1]
    shown = _against([f"{name} {loss:.3f} ({low:.3f} to {high:.3f})" for loss, low, high, name in ranked])
    reason = f"{so_far}; by their own curves {shown}" + ("" if clear else ": a draw, within the uncertainty")
    return Verdict("final loss", ranked[0][3] if clear else None, ranked[1][0] - ranked[0][0], "nats", reason)


def _finished(run: Measured) -> bool:
    """Whether the log goes to the last step, or nobody says which that is."""
    planned = run.value("max_iters")
    return type(planned) is not int or (run.run.last_step or 0) >= planned - 1


def _progress(run: Measured) -> str:
    planned = run.value("max_iters")
    return f"{run.run.steps_done:,}" + (f" of {planned:,} steps" if type(planned) is int else " steps")


def expected_end(run: Measured) -> Forecast | None:
    """The validation loss to expect at the run's last step, or at twice the steps it has made if that is less."""
    points = losses.curve(run, "val")
    planned, warm_up = run.value("max_iters"), run.value("warmup_iters")
    if not points or type(planned) is not int or planned <= points[-1][0]:
        return None
    end = min(float(planned), FARTHEST * points[-1][0])
    return forecast(points, end, float(warm_up) if type(warm_up) is int else 0.0)


def why_no_forecast(run: Measured) -> str | None:
    """What an unfinished run's log lacks to foretell its end; None where it is foretold, or is over."""
    points, planned, warm_up = losses.curve(run, "val"), run.value("max_iters"), run.value("warmup_iters")
    if expected_end(run) is not None or (points and type(planned) is int and planned <= points[-1][0]):
        return None
    if type(planned) is not int:
        return "max_iters is not known"
    skip = warm_up if type(warm_up) is int else 0
    usable = sum(x > skip for x, _ in points)
    if usable < LEAST_POINTS:
        after = f" after the {skip:,} steps of warm-up" if skip else ""
        counted = "1 validation loss" if usable == 1 else f"{usable} validation losses"
        return f"{counted}{after}, and a curve needs {LEAST_POINTS}"
    return "its validation losses do not fall along a curve"


def _amount(at: At, x: float) -> str:
    if at == "hours":
        return f"{x:.2f} h" if x >= 0.1 else duration(3600 * x)
    if at == "flops":
        return f"{x:.2e} FLOP"
    return f"{count(x)} {_UNITS[at]}"


def _against(parts: Sequence[str]) -> str:
    return " against ".join(parts)
