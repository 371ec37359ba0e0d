"""Watching a run while it goes: its log as it grows, and the card beside it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from oomph.errors import InputError, Problem
from oomph.runs.builder import Builder
from oomph.runs.lines import PIECE_BYTES, Cutter
from oomph.runs.model import Run, Source
from oomph.runs.nvml import Sample, Sampler, nothing
from oomph.runs.reader import read_config, read_piece
from oomph.runs.turns import Turn, Watch

EVERY_S = 2.0


class Clock(msgspec.Struct, frozen=True):
    """Time, so that tests can hand in their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Tail:
    """A growing file read on from where the last look ended. A file that shrinks is another one: read anew."""

    def __init__(self, path: Path, builder: Builder) -> None:
        self.path = path
        self.builder = builder
        self._begin()

    def _begin(self) -> None:
        self._offset = 0
        self._cutter = Cutter()
        self.builder.begin(Source(str(self.path)))

    def more(self) -> bool:
        """Read what is new; False where nothing is. A file that does not exist yet is empty."""
        try:
            with self.path.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                if size < self._offset:
                    self._begin()
                stream.seek(self._offset)
                grew = False
                while data := stream.read(PIECE_BYTES):
                    self._offset += len(data)
                    grew = True
                    for text in self._cutter.feed(data):
                        read_piece(self.builder, text)
                return grew
        except FileNotFoundError:
            return False
        except OSError as error:
            problem = Problem(str(self.path), "cannot be read", error.strerror or type(error).__name__)
            raise InputError(problem) from None


class Follower:
    """One run being watched."""

    def __init__(self, path: str | os.PathLike[str], sampler: Sampler = nothing, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        log = Path(path)
        self.builder = Builder(log.name if log.is_dir() else log.stem)
        if log.is_dir():  # of a run of `oomph train`
            if (log / "config.toml").is_file():
                read_config(self.builder, str(log / "config.toml"))
            log /= "metrics.jsonl"
        self.watch = Watch()
        self._tail = Tail(log, self.builder)
        self._sampler = sampler
        self._grew_at = self.clock.now()

    @property
    def run(self) -> Run:
        return self.builder.run

    @property
    def path(self) -> Path:
        return self._tail.path

    @property
    def exists(self) -> bool:
        """Whether the log is there yet."""
        return self._tail.path.exists()

    def look(self) -> list[Turn]:
        """Read on, look at the card, and say what turned."""
        if self._tail.more():
            self._grew_at = self.clock.now()
        samples = self._sampler()
        for sample in samples:
            _record(self.builder, sample)
        return self.watch.look(self.run, self.clock.now() - self._grew_at, samples)

    def turns(self, every_s: float = EVERY_S) -> Iterator[Turn]:
        """What turns, as it turns, until the run is over: finished, or out of memory."""
        while True:
            yield from self.look()
            if self.ended is not None:
                return
            self.clock.sleep(every_s)

    @property
    def ended(self) -> str | None:
        """Why there is nothing more to come; None while there may be."""
        if self.run.ooms:
            return "the run ended: out of memory"
        planned = self.run.settings.get("max_iters")
        steps = planned.value if planned is not None else self.run.printed.steps_planned
        last = self.run.last_step
        # nanoGPT makes one step more than max_iters says, and logs it; others stop one short of it.
        if type(steps) is int and last is not None and last >= steps - (self.run.program != "nanogpt"):
            return f"the run is finished: step {last:,} of {steps:,}"
        return None


def _record(builder: Builder, sample: Sample) -> None:
    """What the driver tells goes where an nvidia-smi screen would."""
    gpu = builder.gpu(sample.gpu)
    gpu.name, gpu.total_mib = sample.name, sample.total_mib
    told = {
        "used_mib": sample.used_mib,
        "utilization_percent": sample.utilization_percent,
        "watts": sample.watts,
        "celsius": sample.celsius,
    }
    gpu.readings.append(reading=gpu.readings.count, **{k: v for k, v in told.items() if v is not None})
    for pid, mib in sample.processes:
        builder.process(pid, "python", sample.gpu, mib)
