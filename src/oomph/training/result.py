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
    memory_mib: Held
    step_ms: Held
    shrunk: int  # how often memory ran out and the micro-batch was made smaller
    batch_size: int  # at the end
    interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """result.json."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return fields | {"memory_mib": self.memory_mib.to_dict(), "step_ms": self.step_ms.to_dict()}


def hold_against(plan: Plan, meter: MemoryMeter, step_ms: float | None) -> tuple[Held, Held]:
    """Memory and time: as predicted, and as they were."""
    planned_ms = plan.time.step_ms if plan.time else None
    return Held(plan.memory.allocated_mib, meter.peak_mib()), Held(planned_ms, step_ms)


def lines(result: Result) -> list[str]:
    """The last words of a run."""
    said = [f"{result.reason} after {result.steps} steps, {duration(result.seconds)} of training"]
    if result.val_loss is not None:
        best = "" if result.best_val_loss is None else f", best {result.best_val_loss:.4f}"
        said.append(f"validation loss {result.val_loss:.4f}{best}")
    for name, held, unit in (("memory", result.memory_mib, "MiB"), ("a step", result.step_ms, "ms")):
        if held.predicted is not None and held.actual is not None and held.error is not None:
            figures = f"{held.predicted:,.0f} {unit} predicted, {held.actual:,.0f} measured"
            said.append(f"{name}: {figures} ({held.error:+.0%})")
    return said
