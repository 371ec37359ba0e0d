"""`Case`: a run, its prediction, and what was observed of its memory: all that findings are drawn from."""

from __future__ import annotations

from typing import Any

import msgspec

from oomph.config import LoadedConfig, TrainConfig
from oomph.devices import Device
from oomph.planner import Plan, plan
from oomph.runs.measured import Measured
from oomph.runs.model import Oom, Run
from oomph.units import MIB


class Reading(msgspec.Struct, frozen=True):
    """A memory figure that was seen, and the predicted one it belongs to."""

    name: str
    observed_mib: float
    predicted_mib: float | None


class Case:
    """One run held against its plan. Plans of the same run with a change are made on demand and kept."""

    def __init__(self, measured: Measured, asked: Plan | None) -> None:
        self.measured = measured
        self.plan = asked
        self._variants: dict[tuple[tuple[str, Any], ...], Plan] = {}

    @property
    def run(self) -> Run:
        return self.measured.run

    @property
    def device(self) -> Device | None:
        return self.plan.device if self.plan is not None else self.measured.inference.card.device

    @property
    def config(self) -> TrainConfig | None:
        """The settings, as settled for the device where there is a plan."""
        if self.plan is not None:
            return self.plan.config
        loaded = self.measured.inference.config
        return None if loaded is None else loaded.config

    @property
    def is_nanogpt(self) -> bool:
        return self.config is not None and self.config.trainer == "nanogpt"

    def whole(self, key: str) -> int | None:
        """A setting that is a whole number and known."""
        value = self.measured.value(key)
        return value if type(value) is int else None

    @property
    def planned_steps(self) -> int | None:
        """How many steps the run is to make, where what was read or given tells; a default of ours does not."""
        return self.whole("max_iters") or self.run.printed.steps_planned

    def variant(self, **changes: Any) -> Plan:
        """The same run planned with a change. Only where there is a plan."""
        assert self.plan is not None
        key = tuple(sorted(changes.items()))
        if key not in self._variants:
            loaded = self.plan.loaded
            config = msgspec.structs.replace(loaded.config, **changes)
            changed = LoadedConfig(config, loaded.sources, loaded.notes, loaded.files)
            self._variants[key] = plan(changed, self.plan.device)
        return self._variants[key]

    # --- memory as it was seen ------------------------------------------------------------------------

    @property
    def process_mib(self) -> float | None:
        """The training process's memory as nvidia-smi shows it."""
        return self.run.process.most_mib if self.run.process is not None else None

    @property
    def oom(self) -> Oom | None:
        """The out-of-memory error that tells most; the last of several."""
        told = [oom for oom in self.run.ooms if oom.tried_mib is not None]
        found = told or self.run.ooms
        return found[-1] if found else None

    @property
    def others_mib(self) -> float | None:
        """What other programs hold on the card; None where nothing tells."""
        gpu, process = self.run.gpu, self.process_mib
        if gpu is not None and gpu.used_mib is not None and process is not None:
            return max(0.0, gpu.used_mib - process)
        oom = self.oom
        if oom is None:
            return None
        if None not in (oom.total_mib, oom.free_mib, oom.process_mib):
            return max(0.0, (oom.total_mib or 0.0) - (oom.free_mib or 0.0) - (oom.process_mib or 0.0))
        return oom.others_mib

    def readings(self) -> list[Reading]:
        """Every figure that a prediction can be held against."""
        memory = None if self.plan is None else self.plan.memory
        found: list[Reading] = []

        def add(name: str, observed_mib: float | None, predicted_mib: float | None) -> None:
            if observed_mib is not None:
                found.append(Reading(name, observed_mib, predicted_mib))

        total, allocated, reserved = (
            (memory.total_mib, memory.allocated_mib, memory.reserved_mib) if memory is not None else (None, None, None)
        )
        add("the process, by nvidia-smi", self.process_mib, total)
        for recording in self.run.snapshots:
            add("tensors at the peak of the snapshot", recording.peak_bytes / MIB, allocated)
            add("reserved, in the snapshot", recording.peak_reserved_bytes / MIB, reserved)
        add("tensors at the peak, by torch", self.run.printed.peak_allocated_mib, allocated)
        logged = self.run.steps.totals["memory_mib"]
        high_mib = logged.high if logged.count else None
        if self.plan is not None and self.plan.device.kind == "cpu":  # oomph train's figure is the process there
            add("the process, as logged", high_mib, total if self.plan.memory.context_mib else None)
        else:
            add("tensors, as logged", high_mib, allocated)
        return found


def predict(measured: Measured) -> Plan | None:
    """The prediction, where the log tells enough. nanochat's model is another one."""
    loaded, device = measured.inference.config, measured.inference.card.device
    if loaded is None or device is None or measured.run.program == "nanochat":
        return None
    return plan(loaded, device)
