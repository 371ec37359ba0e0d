"""`LoggedRun`: everything that was read about one training run, and where it was read."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

Provenance = Literal["read", "given", "inferred", "assumed", "default"]
Scalar = int | float | str | bool | None
LogProgram = Literal["nanogpt", "nanochat", "build-nanogpt", "oomph"]
OomPhase = Literal["forward", "backward", "optimizer", "evaluation", "unknown"]

# The column "kind" of a step: what its time contains besides the step itself.
STEADY, WARMING_UP, EVALUATING = 0, 1, 2
KIND = "kind"

STEP_COLUMNS = (
    "step",
    "loss",
    "ms",
    "mfu_percent",
    "tokens_per_s",
    "lr",
    "grad_norm",
    "tokens",
    "memory_mib",
    KIND,
)
EVAL_COLUMNS = ("step", "train_loss", "val_loss", "val_bpb")
GPU_COLUMNS = ("reading", "used_mib", "utilization_percent", "watts", "celsius")

HEAD = 64  # rows at the start that are always kept: they show compilation and warm-up
KEPT = 4096  # rows kept at most


# --- tables of numbers -----------------------------------------------------------------------------


class Total(msgspec.Struct):
    """Exact totals of a column, over every row seen."""

    count: int = 0  # finite values
    non_finite: int = 0
    sum: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    first: float | None = None
    last: float | None = None  # the last finite value
    first_non_finite_key: float | None = None  # the key (step) of the first NaN or infinity

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None

    def add(self, value: float, key: float) -> None:
        """Count one value of the row with that key."""
        if not math.isfinite(value):
            self.non_finite += 1
            if self.first_non_finite_key is None:
                self.first_non_finite_key = float(key)
            return
        value = float(value)
        self.count += 1
        self.sum += value
        self.low = min(self.low, value)
        self.high = max(self.high, value)
        if self.first is None:
            self.first = value
        self.last = value


class Series:
    """A table of numbers in constant memory: exact totals of each column and a sample of the rows.

    The sample holds the first `HEAD` rows and one random row from each following block. When it is full, every second
    row is dropped and blocks double in size. The row is random because steps that contain an evaluation come at regular
    intervals, which every n-th row could hit or miss. The first column is the key (the step); missing values are NaN.
    """

    def __init__(self, columns: Sequence[str], kept: int = KEPT) -> None:
        self.columns = tuple(columns)
        self.totals = {name: Total() for name in self.columns if name != KIND}
        self.count = 0  # rows seen, kept or not
        self.backward = 0  # rows whose key is not above the one before: a restart, or two runs in one log
        self._rows: list[tuple[float, ...]] = []
        self._limit = max(kept, 2 * HEAD)
        self._stride = 1  # rows in a block
        self._block = 0  # where the next block begins
        self._pick = 0  # the row of it to keep
        self._last: tuple[float, ...] = ()
        self._random = random.Random(0)

    def append(self, **row: float) -> None:
        """Add a row. It must contain the key column."""
        values = tuple([row.get(name, math.nan) for name in self.columns])
        key = values[0]
        if self._last and key <= self._last[0]:
            self.backward += 1
        for name, value in row.items():
            if name != KIND:
                self.totals[name].add(value, key)
        if self.count == self._pick:
            self._rows.append(values)
            self._begin_block(self._block + self._stride)
            if len(self._rows) >= self._limit:
                self._thin()
        self.count += 1
        self._last = values

    def _begin_block(self, start: int) -> None:
        self._block = start
        self._pick = start + int(self._random.random() * self._stride)

    def _thin(self) -> None:
        """Of each two neighbours after the head, keep one at random."""
        size = len(self._rows)
        chosen = [index + self._random.getrandbits(1) for index in range(HEAD, size - 1, 2)]
        self._rows = self._rows[:HEAD] + [self._rows[index] for index in chosen]
        self._stride *= 2
        self._begin_block(self._block)

    def column(self, name: str) -> list[float]:
        """The kept values of a column in the order they were read, always including the last row."""
        rows = self._rows if not self._last or self._rows[-1] is self._last else [*self._rows, self._last]
        index = self.columns.index(name)
        return [float(row[index]) for row in rows]

    def curve(self, name: str) -> list[tuple[float, float]]:
        """(key, value) of the kept rows that have both, by rising key; of equal keys the last read counts."""
        points = dict(zip(self.column(self.columns[0]), self.column(name), strict=True))
        return sorted((x, y) for x, y in points.items() if math.isfinite(x) and math.isfinite(y))

    def to_dict(self) -> dict[str, object]:
        """Count, totals and kept rows for JSON; NaN and infinities are null."""
        totals = {name: _finite(total) for name, total in self.totals.items() if total.count or total.non_finite}
        names = [name for name in self.columns if name in totals or name == KIND]
        kept = {name: [v if math.isfinite(v) else None for v in self.column(name)] for name in names}
        return {"count": self.count, "totals": totals, "kept": kept}


def _finite(total: Total) -> dict[str, object]:
    plain: dict[str, object] = msgspec.to_builtins(total)
    return {name: v for name, v in plain.items() if v is not None and (not isinstance(v, float) or math.isfinite(v))}


# --- what a log contains ---------------------------------------------------------------------------


class KnownSetting(msgspec.Struct, frozen=True):
    """The value of a config key, and how it is known."""

    value: Scalar
    how: Provenance
    where: str  # "train.log:12", "--batch_size=8", or the reasoning of an inference


class LogSource(msgspec.Struct):
    """One file, or standard input."""

    name: str
    lines: int = 0
    characters: int = 0
    cut_off: bool = False  # the last line has no newline


class PrintedCounts(msgspec.Struct):
    """Counts that the training program printed; None where it did not."""

    params: int | None = None  # as nanoGPT counts them, without position embeddings
    params_slack: int = 0  # rounding error on either side: "29.94M" is known to 5,000
    params_total: int | None = None  # nanochat counts everything
    decay_tensors: int | None = None
    decay_params: int | None = None
    no_decay_tensors: int | None = None
    no_decay_params: int | None = None
    tokens_per_step: int | None = None
    flops_per_token: float | None = None
    steps_planned: int | None = None
    peak_allocated_mib: float | None = None  # torch's max_memory_allocated


class Process(msgspec.Struct):
    """A row of nvidia-smi's process table."""

    pid: int
    name: str
    gpu: int
    mib: float  # the latest
    most_mib: float
    where: str


class Gpu(msgspec.Struct):
    """A card as nvidia-smi, a log or an error message shows it."""

    index: int
    name: str | None = None
    total_mib: float | None = None  # nvidia-smi's
    torch_total_mib: float | None = None  # "total capacity" in an out-of-memory message, less than nvidia-smi's
    limit_watts: float | None = None  # power limit; distinguishes cards with the same memory
    readings: Series = msgspec.field(default_factory=lambda: Series(GPU_COLUMNS, 1024))

    @property
    def used_mib(self) -> float | None:
        """The highest use of the card that was seen, all processes together."""
        total = self.readings.totals["used_mib"]
        return total.high if total.count else None


class Oom(msgspec.Struct, kw_only=True):
    """An out-of-memory error. MiB, to the two decimals that PyTorch prints."""

    where: str
    generation: str  # "cached" (torch up to 1.3), "reserved" (1.4 to 2.0), "process" (2.1 and later), "mps", "bare"
    gpu: int = 0
    tried_mib: float | None = None
    tried_slack_mib: float = 0.0  # half of the last printed digit
    total_mib: float | None = None  # of the card
    free_mib: float | None = None
    process_mib: float | None = None  # this process, including its CUDA context
    others_mib: float | None = None  # other processes named in the message
    allocated_mib: float | None = None
    reserved_mib: float | None = None
    private_pools_mib: float | None = None
    allowed_mib: float | None = None  # the limit set by set_per_process_memory_fraction
    phase: OomPhase = "unknown"
    code: str | None = None  # the innermost frame of the user's own program in the traceback
    after_step: int | None = None  # the last step logged before the error
    message: str = ""


class LogEvent(msgspec.Struct, frozen=True):
    """Something in a log besides numbers: compiling, a checkpoint, a restart."""

    kind: str
    where: str
    text: str
    step: int | None = None


class UnreadableLine(msgspec.Struct, frozen=True):
    """A line that looks like a known format but cannot be parsed."""

    source: str
    line: int
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.what}: {self.text!r}"


class LoggedRun(msgspec.Struct, kw_only=True):
    """One training run as its logs show it."""

    name: str
    sources: list[LogSource] = msgspec.field(default_factory=list)
    program: LogProgram | None = None
    settings: dict[str, KnownSetting] = msgspec.field(default_factory=dict)
    printed: PrintedCounts = msgspec.field(default_factory=PrintedCounts)
    gpus: dict[int, Gpu] = msgspec.field(default_factory=dict)
    processes: dict[int, Process] = msgspec.field(default_factory=dict)
    steps: Series = msgspec.field(default_factory=lambda: Series(STEP_COLUMNS))
    evals: Series = msgspec.field(default_factory=lambda: Series(EVAL_COLUMNS))
    ooms: list[Oom] = msgspec.field(default_factory=list)
    events: list[LogEvent] = msgspec.field(default_factory=list)
    event_counts: dict[str, int] = msgspec.field(default_factory=dict)
    snapshots: list[Any] = msgspec.field(default_factory=list)  # step.snapshot.Recording
    unreadable: list[UnreadableLine] = msgspec.field(default_factory=list)  # a sample
    unreadable_count: int = 0
    notes: list[str] = msgspec.field(default_factory=list)

    @property
    def process(self) -> Process | None:
        """The training process: the Python process with the most memory, else the process with the most memory."""
        pythons = [p for p in self.processes.values() if "python" in p.name.lower() or p.name.lower().endswith(".py")]
        return max(pythons or self.processes.values(), key=lambda p: p.most_mib, default=None)

    @property
    def gpu(self) -> Gpu | None:
        """The card of the training process, or the one with the most memory in use."""
        process = self.process
        if process is not None and process.gpu in self.gpus:
            return self.gpus[process.gpu]
        return max(self.gpus.values(), key=lambda gpu: gpu.used_mib or 0.0, default=None)

    @property
    def last_step(self) -> int | None:
        lasts = [series.totals["step"].high for series in (self.steps, self.evals) if series.count]
        return int(max(lasts)) if lasts else None

    @property
    def steps_done(self) -> int:
        """Steps done. Steps count from 0, and an evaluation comes before the step with its number."""
        logged = self.steps.totals["step"].high + 1 if self.steps.count else 0
        return int(max(logged, self.evals.totals["step"].high if self.evals.count else 0))

    def to_dict(self) -> dict[str, Any]:
        """The run for JSON."""
        plain: dict[str, Any] = {
            "name": self.name,
            "program": self.program,
            "sources": msgspec.to_builtins(self.sources),
            "config": msgspec.to_builtins(self.settings),
            "printed": {k: v for k, v in msgspec.to_builtins(self.printed).items() if v is not None},
            "gpus": [_gpu(gpu) for gpu in self.gpus.values()],
            "processes": [msgspec.to_builtins(process) for process in self.processes.values()],
            "steps": self.steps.to_dict(),
            "evals": self.evals.to_dict(),
            "ooms": [{k: v for k, v in msgspec.to_builtins(oom).items() if v is not None} for oom in self.ooms],
            "events": msgspec.to_builtins(self.events),
            "event_counts": self.event_counts,
            "unreadable": [str(line) for line in self.unreadable],
            "unreadable_count": self.unreadable_count,
            "notes": self.notes,
        }
        return plain


def _gpu(gpu: Gpu) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "name": gpu.name,
        "total_mib": gpu.total_mib,
        "torch_total_mib": gpu.torch_total_mib,
        "limit_watts": gpu.limit_watts,
        "readings": gpu.readings.to_dict(),
    }
