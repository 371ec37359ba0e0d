"""The result of a run, compared with its plan."""

from __future__ import annotations

from typing import Any

import msgspec

from oomph.planning.plan import Plan
from oomph.training.memory import MemoryMeter
from oomph.units import duration


class PredictedVsActual(msgspec.Struct, frozen=True):
    """A predicted figure and the measured one."""

    predicted: float | None
    actual: float | None

    @property
    def error(self) -> float | None:
        """The prediction's relative error: +0.1 is ten percent too high."""
        return self.predicted / self.actual - 1 if self.predicted and self.actual else None

    def to_dict(self) -> dict[str, float | None]:
        return {"predicted": self.predicted, "actual": self.actual, "error": self.error}


class Result(msgspec.Struct, frozen=True):
    """What `oomph.train` returns."""

    out_dir: str
    steps: int  # done in all, over all processes that worked on the run
    finished: bool
    reason: str  # "all steps done", "stopped by Ctrl-C", ...
    loss: float | None
    val_loss: float | None
    best_val_loss: float | None
    tokens: int
    seconds: float  # of training steps, without evaluations and checkpoints
    memory_mib: PredictedVsActual  # peak: allocated on a GPU, the whole process on a CPU
    step_ms: PredictedVsActual
    shrunk: int  # how often memory ran out and the micro-batch was reduced
    batch_size: int  # at the end
    interrupted: bool = False
    reserved_mib: PredictedVsActual = PredictedVsActual(
        None, None
    )  # on a CUDA GPU: what its allocator took from the card

    def to_dict(self) -> dict[str, Any]:
        """The content of result.json."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return {
            name: value.to_dict() if isinstance(value, PredictedVsActual) else value for name, value in fields.items()
        }


def compare_memory(plan: Plan, meter: MemoryMeter) -> tuple[PredictedVsActual, PredictedVsActual]:
    """Peak memory, predicted and measured: allocated and reserved on a GPU, the process on a CPU.

    A plan for an unmeasured CPU does not know what a process takes before its first tensor; the meter does.
    """
    memory = plan.memory
    if plan.device.kind != "cpu":
        reserved_mib = meter.reserved_mib()
        reserved = PredictedVsActual(None if reserved_mib is None else memory.reserved_mib, reserved_mib)
        return PredictedVsActual(memory.allocated_mib, meter.peak_mib()), reserved
    before_mib = 0.0 if memory.context_mib else meter.began_mib
    return PredictedVsActual(memory.total_mib + before_mib, meter.peak_mib()), PredictedVsActual(None, None)


def lines(result: Result, on_cpu: bool) -> list[str]:
    """The summary printed at the end of a run."""
    summary = [f"{result.reason} after {result.steps} steps, {duration(result.seconds)} of training"]
    if result.val_loss is not None:
        best = "" if result.best_val_loss is None else f", best {result.best_val_loss:.4f}"
        summary.append(f"validation loss {result.val_loss:.4f}{best}")
    for name, figure, unit in (
        ("memory of the process" if on_cpu else "memory allocated", result.memory_mib, "MiB"),
        ("memory reserved", result.reserved_mib, "MiB"),
        ("a step", result.step_ms, "ms"),
    ):
        if figure.predicted is not None and figure.actual is not None and figure.error is not None:
            figures = f"{figure.predicted:,.0f} {unit} predicted, {figure.actual:,.0f} measured"
            summary.append(f"{name}: {figures} ({figure.error:+.0%})")
    return summary
