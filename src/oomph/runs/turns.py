"""What turns in a run that is being watched: each thing is said when it begins, and again when it is over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

from oomph.runs import forecast, health
from oomph.runs.findings import Severity
from oomph.runs.model import STEADY, Run
from oomph.runs.nvml import Sample
from oomph.units import duration

SILENT_STEPS = 8.0  # no line for so many steps' time
LEAST_SILENT_S = 90.0
COMPILING_S = 900.0  # before the first step: compilation of a large model
FULL = 0.97  # of the card's memory
IDLE_PERCENT = 15.0
IDLE_LOOKS = 3  # in a row
HOT_CELSIUS = 87.0  # where GeForce and workstation cards begin to lower their clock
GROWN = 1.10  # times the memory that the run had when it was under way
SETTLED_STEPS = 20  # by then the first optimizer step and the first evaluation are over


class Turn(msgspec.Struct, frozen=True):
    """One line of a watch."""

    severity: Severity
    text: str


class Watch:
    """What has been said so far, so that nothing is said twice."""

    def __init__(self) -> None:
        self._on: set[str] = set()
        self._seen_evals = 0
        self._seen_ooms = 0
        self._seen_backward = 0
        self._idle = 0
        self._settled_mib: float | None = None

    @property
    def failing(self) -> bool:
        """Whether an error holds now."""
        return bool(self._on & {"not finite", "diverging", "oom"})

    def look(self, run: Run, quiet_s: float, samples: Sequence[Sample] = ()) -> list[Turn]:
        """What is new. `quiet_s` is how long ago the log last grew."""
        turns = [*self._evaluations(run), *self._losses(run), *self._pace(run, quiet_s), *self._failures(run)]
        for sample in samples[:1] if len(samples) == 1 else self._busiest(samples):
            turns += self._card(run, sample)
        return turns

    def _switch(self, key: str, on: bool, begins: Turn, ends: str | None = None) -> Iterator[Turn]:
        """A turn where something begins, or is over."""
        if on and key not in self._on:
            self._on.add(key)
            yield begins
        elif not on and key in self._on:
            self._on.discard(key)
            if ends is not None:
                yield Turn("info", ends)

    # --- the log -----------------------------------------------------------------------------------

    def _evaluations(self, run: Run) -> Iterator[Turn]:
        new = run.evals.count - self._seen_evals
        self._seen_evals = run.evals.count
        curve = run.evals.curve("val_loss")
        if new <= 0 or not curve:
            return
        step, loss = curve[-1]
        before = min((y for _, y in curve[:-1]), default=None)
        against = (
            ""
            if before is None
            else f", {abs(loss - before):.4f} {'above' if loss > before else 'below'} the best before"
        )
        said = f"step {step:,.0f}: validation loss {loss:.4f}, perplexity {forecast.perplexity(loss):,.1f}{against}"
        yield Turn("info", said)

    def _losses(self, run: Run) -> Iterator[Turn]:
        lost = health.not_finite(run)
        text = f"the loss is no number since step {lost[0]:,}: stop the run, its weights are lost" if lost else ""
        yield from self._switch("not finite", lost is not None, Turn("error", text))
        rise = health.diverging(run)
        text = (
            f"the training loss rises: {rise.lowest:.3f} around step {rise.lowest_step:,}, now {rise.now:.3f}"
            if rise
            else ""
        )
        yield from self._switch(
            "diverging", rise is not None, Turn("error", text), "the training loss is back where it was"
        )
        over = health.overfitting(run, None)
        text = (
            f"the validation loss rises since step {over.best_step:,} while the training loss falls: it overfits"
            if over
            else ""
        )
        yield from self._switch(
            "overfitting", over is not None, Turn("warning", text), "the validation loss falls again"
        )

    def _pace(self, run: Run, quiet_s: float) -> Iterator[Turn]:
        if run.steps.backward > self._seen_backward:
            self._seen_backward = run.steps.backward
            yield Turn(
                "warning", f"the step count went back to {run.steps.totals['step'].last or 0:,.0f}: started again"
            )
        slow = health.slowing(run)
        text = (
            f"steps have become slower: {duration(slow.before_ms / 1e3)} before, {duration(slow.now_ms / 1e3)} now"
            if slow
            else ""
        )
        yield from self._switch("slow", slow is not None, Turn("warning", text), "steps are as fast as before")
        allowed = _allowed_silence(run)
        text = f"nothing new in the log for {duration(quiet_s)}: it hangs, has ended, or is in a long evaluation"
        yield from self._switch("silent", quiet_s > allowed, Turn("warning", text), "the log goes on")

    def _failures(self, run: Run) -> Iterator[Turn]:
        for oom in run.ooms[self._seen_ooms :]:
            self._on.add("oom")
            size = f": {oom.tried_mib:,.0f} MiB asked for" if oom.tried_mib is not None else ""
            yield Turn("error", f"out of memory ({oom.phase}){size}")
        self._seen_ooms = len(run.ooms)

    # --- the card ----------------------------------------------------------------------------------

    @staticmethod
    def _busiest(samples: Sequence[Sample]) -> list[Sample]:
        return sorted(samples, key=lambda sample: -sample.used_mib)[:1]

    def _card(self, run: Run, sample: Sample) -> Iterator[Turn]:
        share = sample.used_mib / sample.total_mib if sample.total_mib else 0.0
        text = f"the card's memory is full: {sample.used_mib:,.0f} of {sample.total_mib:,.0f} MiB"
        yield from self._switch("full", share > FULL, Turn("warning", text), "the card has memory left again")
        if run.steps.count >= SETTLED_STEPS and self._settled_mib is None:
            self._settled_mib = sample.used_mib
        grown = self._settled_mib is not None and sample.used_mib > GROWN * self._settled_mib
        text = (
            f"memory in use grew from {self._settled_mib or 0:,.0f} to {sample.used_mib:,.0f} MiB since the run settled"
        )
        yield from self._switch("grown", grown, Turn("warning", text), "memory in use is back")
        use = sample.utilization_percent
        self._idle = self._idle + 1 if use is not None and use < IDLE_PERCENT else 0
        text = f"the card idles ({use or 0:.0f} %): the run waits for data, saves, or has ended"
        yield from self._switch("idle", self._idle >= IDLE_LOOKS, Turn("warning", text), "the card works again")
        hot = sample.celsius is not None and sample.celsius >= HOT_CELSIUS
        text = f"the card is at {sample.celsius or 0:.0f} °C: it will lower its clock"
        yield from self._switch("hot", hot, Turn("warning", text), "the card has cooled down")


def _allowed_silence(run: Run) -> float:
    """Seconds without a line that mean nothing: some steps, or the longest that was seen (an evaluation)."""
    times = run.steps.totals["ms"]
    if not times.count:
        return COMPILING_S
    steps = run.steps.totals["step"]
    apart = max(1.0, (steps.high - steps.low) / max(1, run.steps.count - 1))  # steps to a line
    rows = zip(run.steps.column("ms"), run.steps.column("kind"), strict=True)
    steady = [ms for ms, kind in rows if kind == STEADY and ms > 0] or [times.high]
    return max(LEAST_SILENT_S, SILENT_STEPS * apart * median(steady) / 1e3, 2 * times.high / 1e3)
