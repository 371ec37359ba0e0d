"""`Measured`: what a run did (tokens/s, MFU, memory). `Evidence`: the same with the run's plan."""

from __future__ import annotations

import math
from statistics import median_low
from typing import Any, Literal

import msgspec

from oomph.config import LoadedConfig, TrainConfig
from oomph.config.settle import decided, left_open
from oomph.devices import Device
from oomph.planning.plan import Plan, plan
from oomph.predict.run_time import NANOGPT_PEAK_FLOPS
from oomph.runs import holding
from oomph.runs.holding import Holding
from oomph.runs.infer import Inference, infer
from oomph.runs.pace import StepPace, nanogpt_flops_per_step, step_pace
from oomph.runs.run import STEADY, LoggedRun, Oom
from oomph.step.parameters import count_printed
from oomph.units import MIB

AGREES = 0.15  # tolerance between the settings' FLOPs and those of the printed MFU
SAME_RUN = 0.3  # a plan that differs more from the readings is not this run's
FEW = 0.5  # share of the weights: a run that trains fewer has adapters
POSSIBLE = 1.02  # share of a card's peak; the excess over 1 allows for rounding


class MemoryReading(msgspec.Struct, frozen=True):
    """The highest memory that one source showed."""

    name: str
    mib: float
    of: Literal["process", "allocated", "reserved"] | None  # the plan's figure for the same thing; None: it has none


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run's figures; None if the log does not have them."""

    run: LoggedRun
    inference: Inference
    pace: StepPace | None
    params: int | None  # as its program prints them
    tokens_per_step: int | None
    flops_per_token: float | None
    tokens_per_s: float | None
    tflops: float | None  # useful TFLOP/s of one card, by nanoGPT's formula or as the log prints it; None if more than
    # one card can do: then the number of cards is not known
    mfu_nanogpt: float | None  # of an A100's 312 TFLOPS, as nanoGPT prints it
    mfu: float | None  # of the card's own peak
    peak_tflops: float | None
    workers: int | None  # processes, one per card; None if unknown
    least_cards: int | None = None  # the fewest that could reach this speed

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
        if run.process is not None and run.process.kind != "G":
            found.append(MemoryReading("the process, by nvidia-smi", run.process.most_mib, "process"))
        for recording in run.snapshots:
            found.append(MemoryReading("tensors at the snapshot's peak", recording.peak_bytes / MIB, "allocated"))
            found.append(MemoryReading("reserved, in the snapshot", recording.peak_reserved_bytes / MIB, "reserved"))
        if run.printed.peak_allocated_mib is not None:
            found.append(MemoryReading("tensors at the peak, by torch", run.printed.peak_allocated_mib, "allocated"))
        if run.printed.peak_reserved_mib is not None:
            found.append(MemoryReading("reserved at the peak, by torch", run.printed.peak_reserved_mib, "reserved"))
        logged = run.steps.totals["memory_mib"]
        if logged.count:
            device = self.inference.card.device
            if device is not None and device.kind == "cpu":  # there oomph train logs the process
                found.append(MemoryReading("the process, as logged", logged.high, "process"))
            elif run.program == "torchtitan":  # max_reserved_gib
                found.append(MemoryReading("reserved, as logged", logged.high, "reserved"))
            else:
                found.append(MemoryReading(f"{run.printed.memory_word}, as logged", logged.high, "allocated"))
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
    workers = world.value if world is not None and type(world.value) is int and world.how != "default" else None
    tflops = _tflops(run, pace, tokens, flops, workers or 1)
    peak = _peak_tflops(inference)
    least = math.ceil(tflops / peak) if tflops and peak and tflops > POSSIBLE * peak else None
    if least is not None:
        tflops = None
    return Measured(
        run=run,
        inference=inference,
        pace=pace,
        params=_params(inference, run),
        tokens_per_step=tokens,
        flops_per_token=flops,
        tokens_per_s=_tokens_per_s(run, pace, tokens),
        tflops=tflops,
        mfu_nanogpt=tflops * 1e12 / NANOGPT_PEAK_FLOPS if tflops else None,
        mfu=tflops / peak if tflops and peak else None,
        peak_tflops=peak,
        workers=workers,
        least_cards=least,
    )


def _tokens_per_s(run: LoggedRun, pace: StepPace | None, tokens: int | None) -> float | None:
    """Tokens per second of all cards, or of one if that is all the log prints."""
    if pace and tokens and run.step_unit == "step":
        return tokens / pace.step_ms * 1e3
    rows = zip(run.steps.column("tokens_per_s"), run.steps.column("kind"), strict=True)
    steady = [rate for rate, kind in rows if kind == STEADY and math.isfinite(rate)]
    return median_low(steady) if steady else run.steps.totals["tokens_per_s"].last  # as printed


def _tflops(
    run: LoggedRun, pace: StepPace | None, tokens: int | None, flops: float | None, workers: int
) -> float | None:
    printed = sorted(value for value in run.steps.column("tflops") if value > 0)
    if printed:
        return printed[len(printed) // 2]
    if pace is None or run.step_unit != "step":
        return None
    step = nanogpt_flops_per_step(run)
    if tokens and flops and (step is None or abs(flops * tokens / workers / step - 1) < AGREES):
        return flops * tokens / workers / pace.step_ms * 1e-9
    return step / pace.step_ms * 1e-9 if step else None  # by the log's own count, if the settings disagree


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
    """A run's figures and its plan, from which findings are made."""

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
            undecided = [key for key in left_open(loaded) if key not in changes]
            config = decided(msgspec.structs.replace(loaded.config, **changes), undecided)
            changed = LoadedConfig(config, loaded.sources, loaded.notes, loaded.files)
            self._variants[key] = plan(changed, self.plan.device)
        return self._variants[key]

    @property
    def process_mib(self) -> float | None:
        """Memory of the training process as nvidia-smi shows it."""
        process = self.run.process
        return process.most_mib if process is not None and process.kind != "G" else None

    @property
    def oom(self) -> Oom | None:
        """The last out-of-memory error, preferring those that state the requested size and the card's."""
        with_size = [oom for oom in self.run.ooms if oom.tried_mib is not None]
        full = [oom for oom in with_size if oom.total_mib is not None]
        found = full or with_size or self.run.ooms
        return found[-1] if found else None

    @property
    def has_adapters(self) -> bool:
        """Whether the log shows a model of which adapters are trained: by its counts, or by peft's code."""
        printed = self.run.printed
        few = printed.params_total and (printed.params_trained or printed.params_total) < FEW * printed.params_total
        return bool(few) or "adapters" in self.run.event_counts

    @property
    def recomputes(self) -> bool:
        """Whether the log shows that activations are computed again in backward: a line says so, or Unsloth, which
        does it unless told otherwise."""
        return self.run.program == "unsloth" or "checkpointing" in self.run.event_counts

    @property
    def holding(self) -> Holding | None:
        """Who holds the card: by the error's message, else by a screen."""
        return holding.of_message(self.oom) if self.oom is not None else holding.of_screen(self.run)

    @property
    def others_mib(self) -> float | None:
        """Memory that other programs hold on the card; None if unknown."""
        on_screen = holding.of_screen(self.run)
        if on_screen is not None:
            return on_screen.others_mib
        return self.holding.others_mib if self.holding is not None else None

    @property
    def memory_ratio(self) -> float:
        """Memory used as a share of the plan; 1 without a reading, or if the plan is not this run's."""
        for reading, predicted in self.readings()[:1]:
            ratio = reading.mib / predicted if predicted else 1.0
            return ratio if abs(ratio - 1) <= SAME_RUN else 1.0
        return 1.0

    def readings(self) -> list[tuple[MemoryReading, float]]:
        """Each memory reading that the plan also predicts, with the predicted MiB."""
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
    loaded, device = measured.inference.config, measured.inference.card.planned
    return None if loaded is None or device is None else plan(loaded, device)
