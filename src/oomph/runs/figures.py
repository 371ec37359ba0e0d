"""`Measured`: what a run did (tokens/s, MFU, memory). `Evidence`: the same with the run's plan."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from oomph.config import LoadedConfig, TrainConfig
from oomph.config.settle import decided, left_open
from oomph.devices import Device
from oomph.planning.plan import Plan, plan
from oomph.predict.run_time import NANOGPT_PEAK_FLOPS
from oomph.runs.infer import Inference, infer
from oomph.runs.pace import StepPace, nanogpt_flops_per_step, step_pace
from oomph.runs.run import LoggedRun, Oom
from oomph.step.parameters import count_printed
from oomph.units import MIB


class MemoryReading(msgspec.Struct, frozen=True):
    """The highest memory that one source showed."""

    name: str
    mib: float
    of: Literal["process", "allocated", "reserved"] | None  # the plan's figure for the same thing; None: it has none


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run's figures; None where the log does not give them."""

    run: LoggedRun
    inference: Inference
    pace: StepPace | None
    params: int | None  # as its program prints them
    tokens_per_step: int | None
    flops_per_token: float | None
    tokens_per_s: float | None
    tflops: float | None  # useful TFLOP/s per device, by nanoGPT's formula
    mfu_nanogpt: float | None  # of an A100's 312 TFLOPS, as nanoGPT prints it
    mfu: float | None  # of the card's own peak
    peak_tflops: float | None

    @property
    def name(self) -> str:
        return self.run.name

    def value(self, key: str) -> object:
        """The value of a setting; None if unknown."""
        setting = self.inference.settings.get(key)
        return None if setting is None else setting.value

    def whole(self, key: str) -> int | None:
        """The value of a setting if it is a known whole number."""
        value = self.value(key)
        return value if type(value) is int else None

    def memory(self) -> list[MemoryReading]:
        """Every memory figure of the run, the most direct first."""
        run, found = self.run, list[MemoryReading]()
        if run.process is not None:
            found.append(MemoryReading("the process, by nvidia-smi", run.process.most_mib, "process"))
        for recording in run.snapshots:
            found.append(MemoryReading("tensors at the snapshot's peak", recording.peak_bytes / MIB, "allocated"))
            found.append(MemoryReading("reserved, in the snapshot", recording.peak_reserved_bytes / MIB, "reserved"))
        if run.printed.peak_allocated_mib is not None:
            found.append(MemoryReading("tensors at the peak, by torch", run.printed.peak_allocated_mib, "allocated"))
        logged = run.steps.totals["memory_mib"]
        if logged.count:
            device = self.inference.card.device
            if device is not None and device.kind == "cpu":  # there oomph train logs the process
                found.append(MemoryReading("the process, as logged", logged.high, "process"))
            else:
                found.append(MemoryReading("tensors, as logged", logged.high, "allocated"))
        failed = [oom.process_mib for oom in run.ooms if oom.process_mib is not None]
        if failed:
            found.append(MemoryReading("the process, when it ran out of memory", max(failed), None))
        if run.gpu is not None and run.gpu.used_mib is not None:
            found.append(MemoryReading("the whole card, by nvidia-smi", run.gpu.used_mib, None))
        return found


def measure(run: LoggedRun, gpu: str | None = None) -> Measured:
    """The run's figures. `gpu` names the card if the log does not. Raises `InputError` for an unknown card."""
    inference = infer(run, gpu)
    pace = step_pace(run)
    tokens, flops = inference.tokens_per_step, inference.flops_per_token
    world = inference.settings.get("world_size")
    workers = world.value if world is not None and type(world.value) is int else 1
    tflops = _tflops(run, pace, tokens, flops, workers)
    peak = _peak_tflops(inference)
    return Measured(
        run=run,
        inference=inference,
        pace=pace,
        params=_params(inference, run),
        tokens_per_step=tokens,
        flops_per_token=flops,
        tokens_per_s=tokens / pace.step_ms * 1e3 if pace and tokens else run.steps.totals["tokens_per_s"].mean,
        tflops=tflops,
        mfu_nanogpt=tflops * 1e12 / NANOGPT_PEAK_FLOPS if tflops else None,
        mfu=tflops / peak if tflops and peak else None,
        peak_tflops=peak,
    )


def _tflops(
    run: LoggedRun, pace: StepPace | None, tokens: int | None, flops: float | None, workers: int
) -> float | None:
    if pace is None:
        return None
    if tokens and flops:
        return flops * tokens / workers / pace.step_ms * 1e-9
    step = nanogpt_flops_per_step(run)
    return step / pace.step_ms * 1e-9 if step else None


def _peak_tflops(inference: Inference) -> float | None:
    device = inference.card.device
    if device is None:
        return None
    setting = inference.settings.get("dtype")
    dtype = setting.value if setting is not None and isinstance(setting.value, str) else None
    return device.peak_tflops(dtype or ("bfloat16" if device.has_bf16 else "float16"))


def _params(inference: Inference, run: LoggedRun) -> int | None:
    if inference.config is not None:
        return count_printed(inference.config.config)
    return run.printed.params or run.printed.params_total


# --- with the plan ---------------------------------------------------------------------------------


class Evidence:
    """A run's figures and its plan: what findings are drawn from."""

    def __init__(self, measured: Measured, predicted: Plan | None) -> None:
        self.measured = measured
        self.plan = predicted  # None if the log does not give enough, or the card is unknown
        self._variants: dict[tuple[tuple[str, Any], ...], Plan] = {}

    @property
    def run(self) -> LoggedRun:
        return self.measured.run

    @property
    def device(self) -> Device | None:
        return self.plan.device if self.plan is not None else self.measured.inference.card.device

    @property
    def config(self) -> TrainConfig | None:
        """The settings; those of the plan if there is one."""
        if self.plan is not None:
            return self.plan.config
        loaded = self.measured.inference.config
        return None if loaded is None else loaded.config

    @property
    def planned_steps(self) -> int | None:
        """Steps the run is meant to make, if the log or the user says so; oomph's own default does not count."""
        return self.measured.whole("max_iters") or self.run.printed.steps_planned

    def variant(self, **changes: Any) -> Plan:
        """The plan of the same run with changed keys; planned once. Needs a plan."""
        assert self.plan is not None
        key = tuple(sorted(changes.items()))
        if key not in self._variants:
            loaded = self.plan.loaded
            config = decided(msgspec.structs.replace(loaded.config, **changes), left_open(loaded))
            changed = LoadedConfig(config, loaded.sources, loaded.notes, loaded.files)
            self._variants[key] = plan(changed, self.plan.device)
        return self._variants[key]

    @property
    def process_mib(self) -> float | None:
        """Memory of the training process as nvidia-smi shows it."""
        return self.run.process.most_mib if self.run.process is not None else None

    @property
    def oom(self) -> Oom | None:
        """The last out-of-memory error that says how much was asked for, else the last one."""
        with_size = [oom for oom in self.run.ooms if oom.tried_mib is not None]
        found = with_size or self.run.ooms
        return found[-1] if found else None

    @property
    def others_mib(self) -> float | None:
        """Memory that other programs hold on the card; None if unknown."""
        gpu, process = self.run.gpu, self.process_mib
        if gpu is not None and gpu.used_mib is not None and process is not None:
            return max(0.0, gpu.used_mib - process)
        oom = self.oom
        if oom is None:
            return None
        if oom.total_mib is not None and oom.free_mib is not None and oom.process_mib is not None:
            return max(0.0, oom.total_mib - oom.free_mib - oom.process_mib)
        return oom.others_mib

    def readings(self) -> list[tuple[MemoryReading, float]]:
        """Each memory reading that the plan predicts too, with the predicted MiB."""
        pairs = [(each, predicted_mib(self.plan, each)) for each in self.measured.memory()]
        return [(each, predicted) for each, predicted in pairs if predicted is not None]


def predicted_mib(predicted: Plan | None, reading: MemoryReading) -> float | None:
    """The plan's figure for the same thing as the reading; None if it has none."""
    if predicted is None:
        return None
    memory = predicted.memory
    if reading.of == "allocated":
        return memory.allocated_mib
    if reading.of == "reserved":
        return memory.reserved_mib
    on_cpu_without_python = predicted.device.kind == "cpu" and not memory.context_mib
    return memory.total_mib if reading.of == "process" and not on_cpu_without_python else None


def predict(measured: Measured) -> Plan | None:
    """The run's plan, if the log gives enough."""
    loaded, device = measured.inference.config, measured.inference.card.device
    return None if loaded is None or device is None else plan(loaded, device)
