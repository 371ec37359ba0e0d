"""The result of a run, compared with its plan."""

from __future__ import annotations

import shlex
from collections import deque
from statistics import median
from typing import Any

import msgspec
import torch

from oomph.devices.cpu_rates import BUSY, waited_s, waits_s
from oomph.planning.plan import Plan
from oomph.training.memory import MemoryMeter
from oomph.units import duration

_STEPS = 1000  # the last steps, whose median is the step time


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
    steps: int  # done in total, over all processes that worked on the run
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
    ranks_mib: tuple[PredictedVsActual, ...] = ()  # memory_mib of each rank, if there are several
    again: bool = False  # it was asked to stop and restart later: the command's exit code says so
    waited: float = 0.0  # share of the steps in which other programs had the CPU; if large, step_ms is processor time

    def to_dict(self) -> dict[str, Any]:
        """The content of result.json."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return {
            name: [each.to_dict() for each in value]
            if isinstance(value, tuple)
            else value.to_dict()
            if isinstance(value, PredictedVsActual)
            else value
            for name, value in fields.items()
        }


class StepTimes:
    """The time of steps after warm-up: the median of the last ones."""

    def __init__(self, device: torch.device) -> None:
        self.on_cpu = device.type == "cpu"
        self._steps: deque[tuple[float, float]] = deque(maxlen=_STEPS)  # wall-clock and processor seconds
        self._clock_s = 0.0
        self._waits = waits_s()

    def add(self, clock_s: float, processor_s: float) -> None:
        """Add one step."""
        if not self._clock_s:
            self._waits = waits_s()  # waits are counted from the first step after warm-up
        self._clock_s += clock_s
        self._steps.append((clock_s, processor_s))

    def usual_ms(self) -> tuple[float | None, float]:
        """Milliseconds of the median step, and the share of the time in which it waited for other programs.

        On a CPU shared with other programs it is processor time, which a prediction can be compared with.
        """
        if not self._steps:
            return None, 0.0
        waited = min(1.0, waited_s(self._waits) / self._clock_s) if self.on_cpu else 0.0
        return median(step[waited > BUSY] for step in self._steps) * 1e3, waited


def compare_memory(plan: Plan, meter: MemoryMeter) -> tuple[PredictedVsActual, PredictedVsActual]:
    """Peak memory, predicted and measured: allocated and reserved on a GPU, the process on a CPU."""
    memory = plan.memory
    if plan.device.kind != "cpu":
        reserved_mib = meter.reserved_mib()
        reserved = PredictedVsActual(None if reserved_mib is None else memory.reserved_mib, reserved_mib)
        return PredictedVsActual(memory.allocated_mib, meter.peak_mib()), reserved
    return PredictedVsActual(memory.total_mib, meter.peak_mib()), PredictedVsActual(None, None)


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
            way = f"{abs(figure.error):.0%}".replace("%", " %") + (" too high" if figure.error > 0 else " too low")
            summary.append(f"{name}: {figures}: the prediction is {way}")
    if result.waited > BUSY and result.step_ms.error is not None:
        others = f"{result.waited:.0%}".replace("%", " %")
        summary.append(f"steps are measured in processor time: other programs had the CPU for {others} of the clock's")
    if result.ranks_mib:
        errors = [each.error for each in result.ranks_mib if each.error is not None]
        if errors:
            summary.append(f"memory of all {len(result.ranks_mib)} ranks: {min(errors):+.0%} to {max(errors):+.0%}")
    if result.best_val_loss is not None:
        summary.append(f"→ oomph sample {shlex.quote(result.out_dir)}  writes text with it")
    return summary
