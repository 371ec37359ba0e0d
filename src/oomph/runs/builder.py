"""`Builder`: what the readers of the single formats write into, with every list bounded."""

from __future__ import annotations

import random
from collections.abc import Callable

from oomph.config.keys import keys
from oomph.config.values import coerce
from oomph.errors import Problem
from oomph.runs.columns import Spans
from oomph.runs.model import EVALUATING, STEADY, Event, Gpu, How, Process, Program, Run, Setting, Source, Unreadable

EVENTS = 200  # kept of each run; all are counted
UNREADABLE = 32
PROCESSES = 256
GPUS = 64
OOMS = 32

Follower = Callable[[str], bool]  # given each line that follows; False: "not mine"
# Where the values of a line stand, and what to do with those of many lines of its form.
Columnar = tuple[Callable[[str], Spans | None], Callable[[dict[str, list[float]]], None]]


class Builder:
    """A run in the making, and where in which source the reading stands."""

    def __init__(self, name: str) -> None:
        self.run = Run(name=name)
        self.source = Source(name)
        self.line = 0
        self.follower: Follower | None = None
        self.columnar: Columnar | None = None  # of the follower
        self.frames: list[str] = []  # of the traceback being read: 'train.py:219 in estimate_loss'
        self.evaluated_step: int | None = None  # an evaluation was printed; this step's time contains it
        self.pending_val_loss: float | None = None  # printed without its step, which the next line gives
        self.gpu_row: tuple[int, str] | None = None  # nvidia-smi prints a card's name one line before its memory
        self._random = random.Random(0)

    @property
    def where(self) -> str:
        return f"{self.source.name}:{self.line}"

    def begin(self, source: Source) -> None:
        """Go on with another source."""
        self.source = source
        self.run.sources.append(source)
        self.line, self.follower, self.columnar, self.frames, self.gpu_row = 0, None, None, [], None

    def program(self, name: Program) -> None:
        """Which program wrote the log, by a line that only it writes."""
        if self.run.program is None:
            self.run.program = name

    def setting(self, key: str, value: object, how: How = "read", where: str | None = None) -> bool:
        """Take a config key's value; False where the key is none of ours or the value is not allowed."""
        known = keys().get(key)
        if known is None:
            return False
        made = coerce(known, value, self.where)
        if isinstance(made, Problem):
            return False
        self.run.settings[key] = Setting(made, how, where or self.where)
        return True

    def event(self, kind: str, text: str) -> None:
        counts = self.run.event_counts
        counts[kind] = counts.get(kind, 0) + 1
        if len(self.run.events) < EVENTS and counts[kind] <= EVENTS // 10:
            self.run.events.append(Event(kind, self.where, text[:200], self.run.last_step))

    def cannot_read(self, what: str, text: str) -> None:
        """Count a line that looks like a known format and is not; keep a fair sample of them."""
        run = self.run
        run.unreadable_count += 1
        entry = Unreadable(self.source.name, self.line, what, text.strip()[:120])
        if len(run.unreadable) < UNREADABLE:
            run.unreadable.append(entry)
        elif (slot := self._random.randrange(run.unreadable_count)) < UNREADABLE // 2:
            run.unreadable[UNREADABLE // 2 + slot] = entry  # the first half stays: the first lines tell most

    def gpu(self, index: int) -> Gpu:
        """The card of that number, made on first sight."""
        gpus = self.run.gpus
        if index not in gpus and len(gpus) >= GPUS:
            return Gpu(index)
        return gpus.setdefault(index, Gpu(index))

    def process(self, pid: int, name: str, gpu: int, mib: float) -> None:
        """A process that holds memory on a card."""
        processes = self.run.processes
        if pid in processes:
            processes[pid].mib = mib
            processes[pid].most_mib = max(mib, processes[pid].most_mib)
        elif len(processes) < PROCESSES:
            processes[pid] = Process(pid, name, gpu, mib, mib, self.where)

    def evaluation(self, step: int, in_step_time: bool, **losses: float) -> None:
        """Losses over held-out (and training) batches. `in_step_time`: the program's next step time contains it."""
        self.run.evals.append(step=step, **losses)
        if in_step_time:
            self.evaluated_step = step

    def step_kind(self, step: int) -> int:
        """Whether this step's time contains the evaluation printed just before it."""
        contains = self.evaluated_step is not None and step == self.evaluated_step
        self.evaluated_step = None
        return EVALUATING if contains else STEADY
