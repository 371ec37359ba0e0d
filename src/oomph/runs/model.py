"""`Run`: everything that was read of one training run, and where it stood."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from oomph.runs.series import Series

How = Literal["read", "given", "inferred", "assumed", "default"]
Scalar = int | float | str | bool | None
Program = Literal["nanogpt", "nanochat", "build-nanogpt", "oomph"]
Phase = Literal["forward", "backward", "optimizer", "evaluation", "unknown"]

# What a step's time holds besides the step.
STEADY, WARMING_UP, EVALUATING = 0, 1, 2

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
    "kind",
)
EVAL_COLUMNS = ("step", "train_loss", "val_loss", "val_bpb")
GPU_COLUMNS = ("reading", "used_mib", "utilization_percent", "watts", "celsius")


class Setting(msgspec.Struct, frozen=True):
    """The value of a config key, and how it is known."""

    value: Scalar
    how: How
    where: str  # "train.log:12", "--batch_size=8", or the reasoning of an inference


class Source(msgspec.Struct):
    """One file, or standard input."""

    name: str
    lines: int = 0
    characters: int = 0
    cut_off: bool = False  # the last line has no end


class Printed(msgspec.Struct):
    """Counts that a training program prints of itself; None where it did not."""

    params: int | None = None  # as nanoGPT counts them: without position embeddings
    params_slack: int = 0  # what rounding hides on either side: "29.94M" is known to 5,000
    params_total: int | None = None  # nanochat's count of everything
    decay_tensors: int | None = None
    decay_params: int | None = None
    no_decay_tensors: int | None = None
    no_decay_params: int | None = None
    tokens_per_step: int | None = None
    flops_per_token: float | None = None
    steps_planned: int | None = None
    peak_allocated_mib: float | None = None  # torch's max_memory_allocated


class Process(msgspec.Struct):
    """A line of nvidia-smi's process table."""

    pid: int
    name: str
    gpu: int
    mib: float  # the latest
    most_mib: float
    where: str


class Gpu(msgspec.Struct):
    """One card as nvidia-smi, a log or an error message shows it."""

    index: int
    name: str | None = None
    total_mib: float | None = None  # nvidia-smi's
    torch_total_mib: float | None = None  # "total capacity" of an out-of-memory message: less than nvidia-smi's
    limit_watts: float | None = None  # the power limit on nvidia-smi's screen: it tells cards of one memory apart
    readings: Series = msgspec.field(default_factory=lambda: Series(GPU_COLUMNS, 1024))

    @property
    def used_mib(self) -> float | None:
        """The most that was seen in use on the card, by every process."""
        total = self.readings.totals["used_mib"]
        return total.high if total.count else None


class Oom(msgspec.Struct, kw_only=True):
    """An out-of-memory error. Figures in MiB, known to the two decimals that PyTorch prints."""

    where: str
    generation: str  # "cached" (torch up to 1.3), "reserved" (1.4 to 2.0), "process" (2.1 and later), "mps", "bare"
    gpu: int = 0
    tried_mib: float | None = None
    tried_slack_mib: float = 0.0  # half of the last printed digit
    total_mib: float | None = None  # of the card
    free_mib: float | None = None
    process_mib: float | None = None  # this process, its CUDA context included
    others_mib: float | None = None  # other processes that the message names
    allocated_mib: float | None = None
    reserved_mib: float | None = None
    private_pools_mib: float | None = None
    allowed_mib: float | None = None  # where set_per_process_memory_fraction sets a limit
    phase: Phase = "unknown"
    code: str | None = None  # the innermost line of the user's own program in the traceback
    after_step: int | None = None  # the last step logged before it
    message: str = ""


class Event(msgspec.Struct, frozen=True):
    """Something a log says that is no number: compiling, a checkpoint, a restart."""

    kind: str
    where: str
    text: str
    step: int | None = None


class Unreadable(msgspec.Struct, frozen=True):
    """A line that looks like one of a known format and is not."""

    source: str
    line: int
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.what}: {self.text!r}"


class Run(msgspec.Struct, kw_only=True):
    """One training run as its logs tell it."""

    name: str
    sources: list[Source] = msgspec.field(default_factory=list)
    program: Program | None = None
    settings: dict[str, Setting] = msgspec.field(default_factory=dict)
    printed: Printed = msgspec.field(default_factory=Printed)
    gpus: dict[int, Gpu] = msgspec.field(default_factory=dict)
    processes: dict[int, Process] = msgspec.field(default_factory=dict)
    steps: Series = msgspec.field(default_factory=lambda: Series(STEP_COLUMNS))
    evals: Series = msgspec.field(default_factory=lambda: Series(EVAL_COLUMNS))
    ooms: list[Oom] = msgspec.field(default_factory=list)
    events: list[Event] = msgspec.field(default_factory=list)
    event_counts: dict[str, int] = msgspec.field(default_factory=dict)
    snapshots: list[Any] = msgspec.field(default_factory=list)  # step.snapshot.Recording
    unreadable: list[Unreadable] = msgspec.field(default_factory=list)  # a sample
    unreadable_count: int = 0
    notes: list[str] = msgspec.field(default_factory=list)

    @property
    def process(self) -> Process | None:
        """The process that trains: the largest Python, or the only compute process."""
        pythons = [p for p in self.processes.values() if "python" in p.name.lower() or p.name.lower().endswith(".py")]
        return max(pythons or self.processes.values(), key=lambda p: p.most_mib, default=None)

    @property
    def gpu(self) -> Gpu | None:
        """The card of the training process, or the one most used."""
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
        """How many steps were made. They are counted from 0, and an evaluation comes before the step of its number."""
        logged = self.steps.totals["step"].high + 1 if self.steps.count else 0
        return int(max(logged, self.evals.totals["step"].high if self.evals.count else 0))

    def to_dict(self) -> dict[str, Any]:
        """The run as plain values for JSON."""
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
