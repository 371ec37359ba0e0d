"""Watch a running program: read its log as it grows, poll the card, and report what changes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec

from oomph.devices.nvml import Sample, Sampler, nothing
from oomph.errors import InputError, Problem
from oomph.runs import health
from oomph.runs.curves import perplexity
from oomph.runs.findings import Severity
from oomph.runs.reading.builder import Builder
from oomph.runs.reading.reader import CHUNK_BYTES, LineSplitter, read_config, read_lines
from oomph.runs.run import STEADY, LoggedRun, LogSource
from oomph.units import duration

EVERY_S = 2.0
SILENT_STEPS = 8.0  # times the step time without a new line: then the log is silent
LEAST_SILENT_S = 90.0
COMPILING_S = 900.0  # before the first step: a large model may compile for this long
FULL = 0.97  # of the card's memory
IDLE_PERCENT = 15.0
IDLE_LOOKS = 3  # in a row
HOT_CELSIUS = 87.0  # where GeForce and workstation cards start to lower their clock
GROWN = 1.10  # times the memory in use after SETTLED_STEPS
SETTLED_STEPS = 20  # after the first optimizer step and evaluation


class WallClock(msgspec.Struct, frozen=True):
    """The clock; tests replace it."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Notice(msgspec.Struct, frozen=True):
    """Something that began or ended. The `id` is stable, the words are not."""

    id: str
    severity: Severity
    text: str


class Follower:
    """A run being watched. Raises `InputError` if its log or config cannot be read."""

    def __init__(
        self, path: str | os.PathLike[str], sampler: Sampler = nothing, clock: WallClock | None = None
    ) -> None:
        self.clock = clock or WallClock()
        log = Path(path)
        self.builder = Builder(log.name if log.is_dir() else log.stem)
        if log.is_dir():  # a run of `oomph train`
            if (log / "config.toml").is_file():
                read_config(self.builder, str(log / "config.toml"))
            log /= "metrics.jsonl"
        self.watcher = Watcher()
        self._file = GrowingFile(log, self.builder)
        self._sampler = sampler
        self._grew_at = self.clock.now()

    @property
    def run(self) -> LoggedRun:
        return self.builder.run

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def quiet_s(self) -> float:
        """Seconds since the log last grew."""
        return self.clock.now() - self._grew_at

    def look(self, most_bytes: int | None = None) -> list[Notice]:
        """What changed, after reading at most so many new bytes and polling the card."""
        if self._file.read_more(most_bytes):
            self._grew_at = self.clock.now()
        samples = self._sampler()
        for sample in samples:
            _record(self.builder, sample)
        return self.watcher.look(self.run, self.quiet_s, samples)

    @property
    def ended(self) -> str | None:
        """Why the run is over; None while it may continue."""
        if self.run.ooms:
            return "the run ended: out of memory"
        planned = self.run.settings.get("max_iters")
        steps = planned.value if planned is not None else self.run.printed.steps_planned
        last = self.run.last_step
        # nanoGPT also runs and logs step max_iters itself; other programs stop one step before.
        if type(steps) is int and last is not None and last >= steps - (self.run.program != "nanogpt"):
            return f"the run is finished: step {last:,} of {steps:,}"
        return None


class GrowingFile:
    """A log that grows. A file that shrinks is a new one and is read from its start."""

    def __init__(self, path: Path, builder: Builder) -> None:
        self.path = path
        self.builder = builder
        self._begin()

    def _begin(self) -> None:
        self._offset = 0
        self._splitter = LineSplitter()
        self.builder.begin(LogSource(str(self.path)))

    def read_more(self, most_bytes: int | None = None) -> bool:
        """Read at most so many new bytes; False if there are none. A missing file counts as empty."""
        try:
            with self.path.open("rb") as stream:
                if os.fstat(stream.fileno()).st_size < self._offset:
                    self._begin()
                stream.seek(self._offset)
                grew = False
                end = self._offset + most_bytes if most_bytes is not None else None
                while (end is None or self._offset < end) and (data := stream.read(CHUNK_BYTES)):
                    self._offset += len(data)
                    grew = True
                    for text in self._splitter.feed(data):
                        read_lines(self.builder, text)
                return grew
        except FileNotFoundError:
            return False
        except OSError as error:
            problem = Problem(str(self.path), "cannot be read", error.strerror or type(error).__name__)
            raise InputError(problem) from None


def _record(builder: Builder, sample: Sample) -> None:
    """Store what the driver reports, as if it were nvidia-smi output."""
    gpu = builder.gpu(sample.gpu)
    gpu.name, gpu.total_mib = sample.name, sample.total_mib
    row = {
        "used_mib": sample.used_mib,
        "utilization_percent": sample.utilization_percent,
        "watts": sample.watts,
        "celsius": sample.celsius,
    }
    gpu.readings.append(reading=gpu.readings.count, **{k: v for k, v in row.items() if v is not None})
    for pid, mib in sample.processes:
        builder.process(pid, "python", sample.gpu, mib)


class Watcher:
    """Compares each look with the last one, so that nothing is reported twice."""

    def __init__(self) -> None:
        self._on: set[str] = set()  # ids of conditions that hold now
        self._seen_evals = 0
        self._seen_ooms = 0
        self._seen_backward = 0
        self._idle = 0
        self._settled_mib: float | None = None

    @property
    def failing(self) -> bool:
        """Whether an error holds now."""
        return bool(self._on & {"not_finite", "diverging", "oom"})

    def look(self, run: LoggedRun, quiet_s: float, samples: Sequence[Sample] = ()) -> list[Notice]:
        """New notices. `quiet_s`: seconds since the log last grew."""
        notices = [*self._evaluations(run), *self._losses(run), *self._speed(run, quiet_s), *self._failures(run)]
        if samples:
            notices += self._card(run, max(samples, key=lambda sample: sample.used_mib))
        return notices

    def _switch(
        self, name: str, on: bool, severity: Severity, begins: str, ends: str | None = None
    ) -> Iterator[Notice]:
        """A notice if something begins or ends."""
        if on and name not in self._on:
            self._on.add(name)
            yield Notice(name, severity, begins)
        elif not on and name in self._on:
            self._on.discard(name)
            if ends is not None:
                yield Notice(f"{name}_over", "info", ends)

    # --- the log -----------------------------------------------------------------------------------

    def _evaluations(self, run: LoggedRun) -> Iterator[Notice]:
        new = run.evals.count - self._seen_evals
        self._seen_evals = run.evals.count
        curve = run.evals.curve("val_loss")
        if new <= 0 or not curve:
            return
        step, loss = curve[-1]
        best = min((y for _, y in curve[:-1]), default=None)
        text = f"step {step:,.0f}: validation loss {loss:.4f}, perplexity {perplexity(loss):,.1f}"
        if best is not None:
            text += f", {abs(loss - best):.4f} {'above' if loss > best else 'below'} the best so far"
        yield Notice("evaluation", "info", text)

    def _losses(self, run: LoggedRun) -> Iterator[Notice]:
        lost = health.not_finite(run)
        text = (
            f"{lost.what.lower()} is NaN since step {lost.step:,}: stop the run, its weights are lost" if lost else ""
        )
        yield from self._switch("not_finite", lost is not None and lost.stays, "error", text)
        rise = health.diverging(run)
        text = ""
        if rise:
            text = f"the training loss rises: {rise.lowest:.3f} around step {rise.lowest_step:,}, now {rise.now:.3f}"
        yield from self._switch("diverging", rise is not None, "error", text, "the training loss is back down")
        over = health.overfitting(run, None)
        text = ""
        if over:
            text = f"overfitting: the validation loss rises since step {over.best_step:,} while the training loss falls"
        yield from self._switch("overfitting", over is not None, "warning", text, "the validation loss falls again")

    def _speed(self, run: LoggedRun, quiet_s: float) -> Iterator[Notice]:
        if run.steps.backward > self._seen_backward:
            self._seen_backward = run.steps.backward
            last = run.steps.totals["step"].last or 0
            yield Notice("restarted", "warning", f"the step count went back to {last:,.0f}: the run was restarted")
        slow = health.slowing(run)
        text = (
            f"steps got slower: {duration(slow.before_ms / 1e3)} before, {duration(slow.now_ms / 1e3)} now"
            if slow
            else ""
        )
        yield from self._switch("slowing", slow is not None, "warning", text, "steps are as fast as before")
        text = f"nothing new in the log for {duration(quiet_s)}: it hangs, has ended, or is in a long evaluation"
        yield from self._switch("silent", quiet_s > _allowed_silence_s(run), "warning", text, "the log continues")

    def _failures(self, run: LoggedRun) -> Iterator[Notice]:
        for oom in run.ooms[self._seen_ooms :]:
            self._on.add("oom")
            size = f": {oom.tried_mib:,.0f} MiB asked for" if oom.tried_mib is not None else ""
            yield Notice("oom", "error", f"out of memory ({oom.phase}){size}")
        self._seen_ooms = len(run.ooms)

    # --- the card ----------------------------------------------------------------------------------

    def _card(self, run: LoggedRun, sample: Sample) -> Iterator[Notice]:
        used, total = sample.used_mib, sample.total_mib
        text = f"the card's memory is full: {used:,.0f} of {total:,.0f} MiB"
        full = bool(total) and used / total > FULL
        yield from self._switch("full", full, "warning", text, "the card has free memory again")
        if run.steps.count >= SETTLED_STEPS and self._settled_mib is None:
            self._settled_mib = used
        settled = self._settled_mib or 0.0
        text = f"memory in use grew from {settled:,.0f} to {used:,.0f} MiB since the run settled"
        grown = self._settled_mib is not None and used > GROWN * settled
        yield from self._switch("grown", grown, "warning", text, "memory in use is back down")
        use = sample.utilization_percent
        self._idle = self._idle + 1 if use is not None and use < IDLE_PERCENT else 0
        text = f"the card is idle ({use or 0:.0f} %): the run waits for data, saves, or has ended"
        yield from self._switch("idle", self._idle >= IDLE_LOOKS, "warning", text, "the card works again")
        hot = sample.celsius is not None and sample.celsius >= HOT_CELSIUS
        text = f"the card is at {sample.celsius or 0:.0f} °C and will lower its clock"
        yield from self._switch("hot", hot, "warning", text, "the card has cooled down")


def _allowed_silence_s(run: LoggedRun) -> float:
    """Seconds without a line that are normal: a few steps, or twice the longest step seen (with an evaluation)."""
    times = run.steps.totals["ms"]
    if not times.count:
        return COMPILING_S
    steps = run.steps.totals["step"]
    steps_per_line = max(1.0, (steps.high - steps.low) / max(1, run.steps.count - 1))
    rows = zip(run.steps.column("ms"), run.steps.column("kind"), strict=True)
    steady = [ms for ms, kind in rows if kind == STEADY and ms > 0] or [times.high]
    return max(LEAST_SILENT_S, SILENT_STEPS * steps_per_line * median(steady) / 1e3, 2 * times.high / 1e3)
