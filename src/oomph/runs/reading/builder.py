"""`Builder`: the run being read. The format modules write into it; every list in it is bounded."""

from __future__ import annotations

import random
from collections.abc import Callable

from oomph.config.schema import keys
from oomph.config.values import coerce
from oomph.errors import Problem
from oomph.runs.run import (
    EVALUATING,
    STEADY,
    Gpu,
    KnownSetting,
    LogEvent,
    LoggedRun,
    LogProgram,
    LogSource,
    Process,
    Provenance,
    UnreadableLine,
)

# Kept at most; events, unreadable lines and out-of-memory errors are all counted.
EVENTS = 200
UNREADABLE = 32
PROCESSES = 256
GPUS = 64
OOMS = 32


class Builder:
    """A run being read, and the position in its sources."""

    def __init__(self, name: str) -> None:
        self.run = LoggedRun(name=name)
        self.source = LogSource(name)
        self.line = 0
        self.next_lines: Callable[[str], bool] | None = None  # gets the lines that follow first; False: not part of it
        self.frames: list[str] = []  # of the traceback being read: 'train.py:219 in estimate_loss'
        self.evaluated_step: int | None = None  # an evaluation was just printed; this step's time contains it
        self.pending_val_loss: float | None = None  # printed without its step, which is on the next line
        self.gpu_row: int | None = None  # nvidia-smi prints a card's number and name a line before its memory
        self._random = random.Random(0)

    @property
    def where(self) -> str:
        return f"{self.source.name}:{self.line}"

    def begin(self, source: LogSource) -> None:
        """Start another source."""
        self.source = source
        self.run.sources.append(source)
        self.line, self.next_lines, self.frames, self.gpu_row = 0, None, [], None

    def program(self, name: LogProgram) -> None:
        """Record which program wrote the log, from a line that only it writes."""
        if self.run.program is None:
            self.run.program = name

    def setting(self, key: str, value: object, how: Provenance = "read", where: str | None = None) -> bool:
        """Set a config key; False if the key is unknown or the value not allowed."""
        known = keys().get(key)
        if known is None:
            return False
        made = coerce(known, value, self.where)
        if isinstance(made, Problem):
            return False
        self.run.settings[key] = KnownSetting(made, how, where or self.where)
        return True

    def event(self, kind: str, text: str) -> None:
        """Count an event, and keep it while there is room."""
        counts = self.run.event_counts
        counts[kind] = counts.get(kind, 0) + 1
        if len(self.run.events) < EVENTS and counts[kind] <= EVENTS // 10:
            self.run.events.append(LogEvent(kind, self.where, text[:200], self.run.last_step))

    def cannot_read(self, what: str, text: str) -> None:
        """Count a line that looks like a known format but cannot be parsed; keep the first ones and a fair sample."""
        run = self.run
        run.unreadable_count += 1
        entry = UnreadableLine(self.source.name, self.line, what, text.strip()[:120])
        if len(run.unreadable) < UNREADABLE:
            run.unreadable.append(entry)
        elif (slot := self._random.randrange(run.unreadable_count)) < UNREADABLE // 2:
            run.unreadable[UNREADABLE // 2 + slot] = entry

    def gpu(self, index: int) -> Gpu:
        """The card with that number, created when first seen."""
        gpus = self.run.gpus
        if index in gpus:
            return gpus[index]
        gpu = Gpu(index)
        if len(gpus) < GPUS:
            gpus[index] = gpu
        return gpu

    def process(self, pid: int, name: str, gpu: int, mib: float) -> None:
        """Record the memory of a process on a card."""
        processes = self.run.processes
        if pid in processes:
            processes[pid].mib = mib
            processes[pid].most_mib = max(mib, processes[pid].most_mib)
        elif len(processes) < PROCESSES:
            processes[pid] = Process(pid, name, gpu, mib, mib, self.where)

    def evaluation(self, step: int, in_step_time: bool, **losses: float) -> None:
        """Add an evaluation. `in_step_time`: the time of the step printed next contains it."""
        self.run.evals.append(step=step, **losses)
        if in_step_time:
            self.evaluated_step = step

    def step_kind(self, step: int) -> int:
        """EVALUATING if this step's time contains the evaluation printed just before it, else STEADY."""
        contains = self.evaluated_step is not None and step == self.evaluated_step
        self.evaluated_step = None
        return EVALUATING if contains else STEADY
