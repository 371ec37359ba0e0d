"""`LoggedRun`: everything that was read about one training run, and where it was read."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Provenance = Literal["read", "given", "inferred", "assumed", "default"]
Scalar = int | float | str | bool | None
OomPhase = Literal["loading", "forward", "backward", "optimizer", "evaluation", "unknown"]
Backend = Literal["cuda", "hip", "npu", "mps", "xpu", "cpu"]
OomMemory = Literal["card", "machine", "mps", "npu", "tpu", "open"]  # open: not stated
StepUnit = Literal["step", "iteration", "entry", "epoch"]  # what a row of `LoggedRun.steps` is counted in

# The column "kind" of a step: what its time contains besides the step itself.
STEADY, WARMING_UP, EVALUATING = 0, 1, 2
KIND = "kind"

STEP_COLUMNS = (
    "step",
    "loss",
    "ms",
    "mfu_percent",
    "tokens_per_s",
    "tflops",
    "lr",
    "grad_norm",
    "tokens",
    "memory_mib",
    KIND,
)
EVAL_COLUMNS = ("step", "train_loss", "val_loss", "val_bpb")
GPU_COLUMNS = ("reading", "used_mib", "utilization_percent", "watts", "celsius", "clock_mhz")

FROM_ZERO = ("nanogpt", "nanochat", "build-nanogpt", "oomph")  # programs that call their first step 0
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

    def extend(self, values: Sequence[float], keys: Sequence[float]) -> None:
        """Count the values of the rows with these keys."""
        total = sum(values)
        if not math.isfinite(total):
            for value, key in zip(values, keys, strict=True):
                self.add(value, key)
            return
        self.count += len(values)
        self.sum += total
        self.low = min(self.low, min(values))
        self.high = max(self.high, max(values))
        if self.first is None:
            self.first = float(values[0])
        self.last = float(values[-1])

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
        self.backward = 0  # rows whose key is below the one before: a restart, or two runs in one log
        self._rows: list[tuple[float, ...]] = []
        self._limit = max(kept, 2 * HEAD)
        self._stride = 1  # rows in a block
        self._block = 0  # where the next block begins
        self._pick = 0  # the row of it to keep
        self._last: tuple[float, ...] = ()
        self._last_is_kept = False
        self._random = random.Random(0)

    def append(self, **row: float) -> None:
        """Add a row. It must contain the key column."""
        values = tuple([row.get(name, math.nan) for name in self.columns])
        key = values[0]
        if self._last and key < self._last[0]:
            self.backward += 1
        for name, value in row.items():
            if name != KIND:
                self.totals[name].add(value, key)
        self._last_is_kept = self.count == self._pick
        if self._last_is_kept:
            self._rows.append(values)
            self._begin_block(self._block + self._stride)
            if len(self._rows) >= self._limit:
                self._thin()
        self.count += 1
        self._last = values

    def extend(self, columns: Mapping[str, Sequence[float]]) -> None:
        """Add several rows at once, given by column: much faster than one by one."""
        keys = columns[self.columns[0]]
        if not keys:
            return
        before = self._last[0] if self._last else -math.inf
        self.backward += (keys[0] < before) + sum(map(operator.lt, keys[1:], keys))
        for name, values in columns.items():
            if name != KIND:
                self.totals[name].extend(values, keys)
        given = [columns.get(name) for name in self.columns]
        end = self.count + len(keys)
        self._last_is_kept = False
        while self._pick < end:
            self._last_is_kept = self._pick == end - 1
            self._rows.append(_row(given, self._pick - self.count))
            self._begin_block(self._block + self._stride)
            if len(self._rows) >= self._limit:
                self._thin()
        self.count = end
        self._last = _row(given, -1)

    @property
    def last_key(self) -> float | None:
        """The key of the row added last."""
        return self._last[0] if self._last else None

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
        rows = [*self._rows, self._last] if self._last and not self._last_is_kept else self._rows
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


def _row(columns: Sequence[Sequence[float] | None], index: int) -> tuple[float, ...]:
    return tuple([math.nan if column is None else column[index] for column in columns])


def _finite(total: Total) -> dict[str, object]:
    plain: dict[str, object] = msgspec.to_builtins(total)
    plain["sum"] = float(f"{total.sum:.10g}")  # the order of adding shows in the last digits
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
    """Counts that the training program printed; None if it did not."""

    params: int | None = None  # as nanoGPT counts them, without position embeddings
    params_slack: int = 0  # rounding error on either side: "29.94M" is known to 5,000
    params_total: int | None = None  # others count everything
    params_trained: int | None = None  # fewer than all with LoRA
    decay_tensors: int | None = None
    decay_params: int | None = None
    no_decay_tensors: int | None = None
    no_decay_params: int | None = None
    tokens_per_step: int | None = None
    flops_per_token: float | None = None
    steps_planned: int | None = None
    mean_step_ms: float | None = None  # over the run so far, printed with an evaluation
    counted_steps: int | None = None  # DeepSpeed's step number
    skipped_steps: int | None = None  # of them, by its loss scaler
    iterations_per_step: int | None = None  # if a log counts both micro-steps and steps
    peak_allocated_mib: float | None = None  # torch's max_memory_allocated
    peak_reserved_mib: float | None = None  # torch's max_memory_reserved
    runtime_s: float | None = None  # of the whole run, as a Trainer prints it at its end
    rate_per_card: bool = False  # the printed tokens/s are of one card (torchtitan's tps)
    memory_word: str = "tensors"  # what a step's memory is called: "memory" if its name does not say more
    memory_in_gb: bool = False  # the log writes GB, which some programs take for 10⁹ bytes and others for 2³⁰
    mean_loss: float | None = None  # over the whole run, as a Trainer prints it at its end


class Process(msgspec.Struct):
    """A row of nvidia-smi's process table."""

    pid: int
    name: str
    gpu: int
    mib: float  # the latest; NaN on Windows, which does not report it
    most_mib: float
    where: str
    kind: str = "C"  # nvidia-smi's: C computes, G draws


class Gpu(msgspec.Struct):
    """A card as nvidia-smi, a log or an error message shows it."""

    index: int
    name: str | None = None
    total_mib: float | None = None  # nvidia-smi's
    torch_total_mib: float | None = None  # "total capacity" in an out-of-memory message, less than nvidia-smi's
    limit_watts: float | None = None  # power limit; distinguishes cards with the same memory
    nvidia: bool = True  # False for another vendor's card
    mig: bool = False  # cut into slices, each with its own memory
    windows: bool = False  # WDDM: no memory per process, and spills into main memory
    readings: Series = msgspec.field(default_factory=lambda: Series(GPU_COLUMNS, 1024))

    @property
    def used_mib(self) -> float | None:
        """The highest use of the card that was seen, all processes together."""
        total = self.readings.totals["used_mib"]
        return total.high if total.count else None


EXABYTE_MIB = 2.0**40  # torch prints no size from here on: the program computed a wrong one


class Oom(msgspec.Struct, kw_only=True):
    """An out-of-memory error as its message states it. MiB, to the two decimals that PyTorch prints."""

    where: str
    memory: OomMemory  # whose memory ran out
    backend: Backend = "cuda"
    library: str  # who reports it: "torch", "cuBLAS", "XLA", "the kernel", …
    gpu: int = 0
    tried_mib: float | None = None
    slack_mib: float = 0.0  # half of the last printed digit, of the figure printed most coarsely
    tried_slack_mib: float = 0.0
    total_mib: float | None = None  # of the card
    free_mib: float | None = None
    process_mib: float | None = None  # this process, including its CUDA context
    processes: dict[int, float] = msgspec.field(default_factory=dict)  # "Process 31872 has …", by its number
    allocated_mib: float | None = None
    reserved_mib: float | None = None
    unused_mib: float | None = None  # "reserved by PyTorch but unallocated"
    private_pools_mib: float | None = None
    allowed_mib: float | None = None  # the limit set by set_per_process_memory_fraction, or MPS's
    outside_mib: float | None = None  # MPS: "other allocations"
    shape: tuple[int, ...] = ()  # of the tensor, if the message or the failing line of code states it
    number_bytes: int | None = None  # size of one element of that tensor
    phase: OomPhase = "unknown"
    code: str | None = None  # the innermost frame of the user's own program in the traceback
    lines: tuple[str, ...] = ()  # of code, the innermost of the traceback last
    checkpointed: bool = False  # activations are recomputed: checkpointing is among the traceback's frames
    serving: bool = False  # the program answers requests, it does not train
    after_step: int | None = None  # the last step logged before the error
    old: bool = False  # a message of torch before 2.1, which has no expandable segments
    message: str = ""


class Crash(msgspec.Struct, frozen=True):
    """An error other than out of memory that ended the program."""

    what: str  # "KeyError: 'tokens'", "Segmentation fault"
    where: str
    code: str | None = None  # the innermost frame of the user's own program


class Progress(msgspec.Struct, frozen=True):
    """Where a progress bar stands."""

    step: int
    of: int
    ms: float | None  # of one step


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
    program: str | None = None  # recognised by its lines: "nanogpt", "torchtitan", …
    step_unit: StepUnit = "step"
    ranks: set[int] = msgspec.field(default_factory=set)  # seen as a label before lines
    copies: int = 1  # how often each step was printed, once per process
    settings: dict[str, KnownSetting] = msgspec.field(default_factory=dict)
    printed: PrintedCounts = msgspec.field(default_factory=PrintedCounts)
    gpus: dict[int, Gpu] = msgspec.field(default_factory=dict)
    processes: dict[int, Process] = msgspec.field(default_factory=dict)
    steps: Series = msgspec.field(default_factory=lambda: Series(STEP_COLUMNS))
    evals: Series = msgspec.field(default_factory=lambda: Series(EVAL_COLUMNS))
    places: dict[str, str] = msgspec.field(
        default_factory=dict
    )  # "steps", "evals": where the last is, in the log's words
    progress: Progress | None = None  # of the progress bar seen last
    ooms: list[Oom] = msgspec.field(default_factory=list)
    crash: Crash | None = None  # the last one
    events: list[LogEvent] = msgspec.field(default_factory=list)
    event_counts: dict[str, int] = msgspec.field(default_factory=dict)
    snapshots: list[Any] = msgspec.field(default_factory=list)  # step.snapshot.Recording
    unreadable: list[UnreadableLine] = msgspec.field(default_factory=list)  # a sample
    unreadable_count: int = 0
    first_unread: UnreadableLine | None = None  # the first line in no known format; reported if no line was read
    notes: list[str] = msgspec.field(default_factory=list)

    @property
    def process(self) -> Process | None:
        """The training process: the Python process with the most memory, else the process with the most memory."""
        known = [p for p in self.processes.values() if p.most_mib >= 1]  # in a container the list has 0 or nothing
        pythons = [p for p in known if "python" in p.name.lower() or p.name.lower().endswith(".py")]
        return max(pythons or known, key=lambda p: p.most_mib, default=None)

    @property
    def gpu(self) -> Gpu | None:
        """The card of the training process, or the one with the most memory in use."""
        process = self.process
        if process is not None and process.gpu in self.gpus:
            return self.gpus[process.gpu]
        return max(self.gpus.values(), key=lambda gpu: gpu.used_mib or 0.0, default=None)

    @property
    def has_happened(self) -> bool:
        """Whether the log has any step, progress bar, evaluation or error."""
        counted = self.progress or self.printed.counted_steps or "overflow" in self.event_counts
        return bool(self.steps.count or counted or self.evals.count or self.ooms or self.crash)

    @property
    def last_step(self) -> int | None:
        lasts = [series.totals["step"].high for series in (self.steps, self.evals) if series.count]
        return int(max(lasts)) if lasts else None

    @property
    def steps_done(self) -> int:
        """Steps done. Steps count from 0 or 1, and an evaluation comes before the step with its number."""
        from_zero = self.steps.totals["step"].low == 0 or self.program in FROM_ZERO
        logged = self.steps.totals["step"].high + from_zero if self.steps.count else 0
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
            "processes": [msgspec.json.decode(msgspec.json.encode(each)) for each in self.processes.values()],  # no NaN
            "step_unit": self.step_unit,
            "steps": self.steps.to_dict(),
            "evals": self.evals.to_dict(),
            "crash": msgspec.to_builtins(self.crash),
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
