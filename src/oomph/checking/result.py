"""What a check found: predicted, measured, and how far the one is from the other."""

from __future__ import annotations

from typing import Any

import msgspec

from oomph.devices.ratios import Ratios
from oomph.planner import Plan


class Figures(msgspec.Struct, frozen=True):
    """One set of figures. What is not predicted, or cannot be measured here, is None."""

    allocated_mib: float | None = None  # torch's tensors at the fullest moment
    reserved_mib: float | None = None  # what CUDA's caching allocator has taken
    process_mib: float | None = None  # the whole process, as nvidia-smi or the operating system shows it
    step_ms: float | None = None  # an optimizer step
    first_step_s: float | None = None  # the first one, which compiles
    watts: float | None = None  # of the card

    def nested(self) -> dict[str, dict[str, float]]:
        """As the JSON has them: memory and time apart, what is not known left out."""
        groups = {
            "memory": {"allocated_mib": self.allocated_mib, "reserved_mib": self.reserved_mib}
            | {"process_mib": self.process_mib},
            "time": {"step_ms": self.step_ms, "first_step_s": self.first_step_s},
            "power": {"watts": self.watts},
        }
        return {name: {key: v for key, v in group.items() if v is not None} for name, group in groups.items()}


class Check(msgspec.Struct, frozen=True):
    """The outcome of `oomph.check`. `to_dict` is the JSON contract."""

    plan: Plan  # made without earlier ratios
    predicted: Figures
    measured: Figures
    steps_ms: tuple[float, ...]  # of the steps after the first
    micro_steps: int  # of each step, really run
    data: str  # what it read
    how: str  # how allocated memory was measured
    waited: float = 0.0  # the share of the timed steps in which other programs had the CPU
    failure: str | None = None  # why it did not get through its steps
    out_of_memory: bool = False
    notes: tuple[str, ...] = ()
    ratios: Ratios | None = None  # what --save keeps; None where nothing is worth keeping

    @property
    def error(self) -> Figures:
        """How far the prediction is off, as a share of what happened: +0.1 is ten percent too much."""
        pairs = {
            name: (getattr(self.predicted, name), getattr(self.measured, name)) for name in Figures.__struct_fields__
        }
        return Figures(**{name: said / was - 1 if said and was else None for name, (said, was) in pairs.items()})

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON object."""
        config = self.plan.config
        return {
            "config": msgspec.to_builtins(config) | {"sources": dict(self.plan.loaded.sources)},
            "device": msgspec.to_builtins(self.plan.device),
            "outcome": "out of memory" if self.out_of_memory else "failed" if self.failure else "measured",
            **({"reason": self.failure} if self.failure else {}),
            "predicted": self.predicted.nested(),
            "measured": self.measured.nested(),
            "error": self.error.nested(),
            "steps_ms": list(self.steps_ms),
            "micro_steps": self.micro_steps,
            "data": self.data,
            "allocated_by": self.how,
            "waited": self.waited,
            **({"ratios": msgspec.to_builtins(self.ratios)} if self.ratios else {}),
            "notes": list(self.notes),
        }
