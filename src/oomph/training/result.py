"""What became of a run, held against its plan."""

from __future__ import annotations

from typing import Any

import msgspec

from oomph.planner import Plan
from oomph.training.memory import MemoryMeter
from oomph.units import duration


class Held(msgspec.Struct, frozen=True):
    """A predicted figure against the measured one."""

    predicted: float | None
    actual: float | None

    @property
    def error(self) -> float | None:
        """How far the prediction is off, as a share of what happened: +0.1 is ten percent too much."""
        return self.predicted / self.actual - 1 if self.predicted and self.actual else None

    def to_dict(self) -> dict[str, float | None]:
        return {"predicted": self.predicted, "actual": self.actual, "error": self.error}


class Result(msgspec.Struct, frozen=True):
    """The outcome of `oomph.train`."""

    out_dir: str
    steps: int  # done, over all processes that worked on the run
    finished: bool
    reason: str  # "all steps done", "Ctrl-C", ...
    loss: float | None
    val_loss: float | None
    best_val_loss: float | None
    tokens: int
    seconds: float  # of training, without evaluations and checkpoints
    memory_mib: Held  # at the highest: allocated on a GPU; the whole process on a CPU
    step_ms: Held
    shrunk: int  # how often memory ran out and the micro-batch was made smaller
    batch_size: int  # at the end
    interrupted: bool = False
    reserved_mib: Held = Held(None, None)  # on a CUDA GPU: what its allocator took from the card

    def to_dict(self) -> dict[str, Any]:
        """result.json."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value.to_dict() if isinstance(value, Held) else value for name, value in fields.items()}


def hold_memory(plan: Plan, meter: MemoryMeter) -> tuple[Held, Held]:
    """What was predicted and measured at the highest: on a GPU allocated and reserved, on a CPU the process.

    A plan for a CPU that was not measured does not know what a process takes before its first tensor: this one does.
    """
    memory = plan.memory
    if plan.device.kind != "cpu":
        reserved_mib = meter.reserved_mib()
        reserved = Held(None if reserved_mib is None else memory.reserved_mib, reserved_mib)
        return Held(memory.allocated_mib, meter.peak_mib()), reserved
    before_mib = 0.0 if memory.context_mib else meter.began_mib
    return Held(memory.total_mib + before_mib, meter.peak_mib()), Held(None, None)


def lines(result: Result, on_cpu: bool) -> list[str]:
    """The last words of a run."""
    said = [f"{result.reason} after {result.steps} steps, {duration(result.seconds)} of training"]
    if result.val_loss is not None:
        best = "" if result.best_val_loss is None else f", best {result.best_val_loss:.4f}"
        said.append(f"validation loss {result.val_loss:.4f}{best}")
    for name, held, unit in (
        ("memory of the process" if on_cpu else "memory allocated", result.memory_mib, "MiB"),
        ("memory reserved", result.reserved_mib, "MiB"),
        ("a step", result.step_ms, "ms"),
    ):
        if held.predicted is not None and held.actual is not None and held.error is not None:
            figures = f"{held.predicted:,.0f} {unit} predicted, {held.actual:,.0f} measured"
            said.append(f"{name}: {figures} ({held.error:+.0%})")
    return said
