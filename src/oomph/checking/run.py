"""`oomph.check`: really run a few steps of a config on this machine, and hold the plan against them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from datetime import date
from importlib.util import find_spec

from msgspec.structs import replace

from oomph import config as configs
from oomph import devices
from oomph.checking.launch import PowerWatch, run_job
from oomph.checking.result import Check, Figures
from oomph.checking.wire import Done, Failed, Job, Stepped
from oomph.config import LoadedConfig
from oomph.config.refused import refused
from oomph.data.manifest import find_dataset
from oomph.devices import Device
from oomph.devices.busy import BUSY
from oomph.devices.rates import torch_version
from oomph.devices.ratios import HIGHEST, LOWEST, Ratios
from oomph.errors import InputError, Problem
from oomph.planner import Config, Plan, plan, with_optimizer
from oomph.predict import cost

STEPS = 5  # timed, after the first
CPU_MICRO_STEPS = 2  # a first one and a later one: what a CPU needs minutes for is not done forty times
WATCHED_STEPS = 1  # after the first: the optimizer's state is there from then on

Tell = Callable[[str], None]


class DoesNotFitError(Exception):
    """The plan says that the run does not fit, and nobody insisted."""


def check(config: Config = None, *, steps: int = STEPS, force: bool = False, tell: Tell | None = None) -> Check:
    """Run `steps` optimizer steps of `config`, after a first one, on this machine; predicted against measured.

    `config` is what `oomph.plan` takes, its `device` the one to run on. A run that the plan says does not fit is
    refused with `DoesNotFitError` unless `force`. `tell` is told in a few words what goes on. Needs torch. Raises
    `InputError` where the input is wrong; a run that fails, or runs out of memory, is a result.
    """
    loaded, device = _settle(configs.as_loaded(config), steps)
    planned = plan(loaded, device)
    if problems := refused(planned.loaded, device.kind == "cpu"):
        raise InputError(problems)
    if planned.memory.fits is False and not force:
        need, room = (f"{size:,.0f} MiB" for size in (planned.memory.total_mib, planned.memory.capacity_mib or 0.0))
        raise DoesNotFitError(f"the plan says that this run does not fit: {need}, where {room} are free")
    return _Checking(planned, steps, tell or (lambda _: None)).run()


def _settle(loaded: LoadedConfig, steps: int) -> tuple[LoadedConfig, Device]:
    """The config as it will run here, and this machine's device for it."""
    if find_spec("torch") is None:
        raise InputError(Problem("oomph check", "needs torch", allowed="after: pip install 'oomph[train]'"))
    problems = _impossible(loaded, steps)
    if problems:
        raise InputError(problems)
    device = devices.detect(loaded.config.device)
    if device.kind not in ("cpu", "cuda") or (device.kind == "cpu" and _asked_for_a_gpu(loaded)):
        found = f"this machine's {device.name}"
        raise InputError(Problem(_where(loaded, "device"), "no such device here", found=found, allowed="--device=cpu"))
    version = (torch_version() or "").partition("+")[0].partition("a")[0].partition("rc")[0]
    if not loaded.said("torch_version") and version[:1].isdigit():
        config = replace(loaded.config, torch_version=version)
        loaded = replace(loaded, config=config, sources=loaded.sources | {"torch_version": "default: what runs here"})
    return loaded, device


def _asked_for_a_gpu(loaded: LoadedConfig) -> bool:
    return loaded.said("device") and loaded.config.device.partition(":")[0] != "cpu"


def _where(loaded: LoadedConfig, key: str) -> str:
    return loaded.sources[key] if loaded.said(key) else key


def _impossible(loaded: LoadedConfig, steps: int) -> list[Problem]:
    config, problems = loaded.config, []
    if steps < 1:
        problems.append(Problem("--steps", "too few", found=str(steps), allowed="at least 1"))
    if config.eval_only:
        problems.append(Problem(_where(loaded, "eval_only"), "there is no training step to check", allowed="False"))
    if config.world_size > 1:
        what = "a check runs on one device"
        problems.append(
            Problem(_where(loaded, "world_size"), what, found=str(config.world_size), allowed="--world_size=1")
        )
    return problems


class _Checking:
    """One check under way."""

    def __init__(self, planned: Plan, steps: int, tell: Tell) -> None:
        self.plan, self.config, self.steps, self.tell = planned, planned.config, steps, tell
        self.on_cpu = planned.device.kind == "cpu"
        whole = self.config.gradient_accumulation_steps
        self.micro_steps = min(whole, CPU_MICRO_STEPS) if self.on_cpu else whole
        self.data = _data_folder(planned.loaded)
        self.stepped: list[Stepped] = []

    def run(self) -> Check:
        with PowerWatch() as power:

            def note(done: Stepped) -> None:
                self.stepped.append(done)
                if done.step == 0:
                    power.restart()
                self.tell(f"step {done.step} of {self.steps}: {1e3 * self._seconds(done):,.0f} ms")

            self.tell("starting torch")
            ended = run_job(self._job(self.steps, allocations=False), note, power.follow)
            watts = power.watts()
        allocated_mib = None
        if isinstance(ended, Done):
            allocated_mib = ended.allocated_mib
            if self.on_cpu:
                watched = self._watch_allocations()
                allocated_mib = watched.allocated_mib if isinstance(watched, Done) else None
                ended = watched if isinstance(watched, Failed) else ended
        return self._result(ended, allocated_mib, watts)

    def _watch_allocations(self) -> Done | Failed:
        self.tell("once more, with an eye on every allocation")
        return run_job(self._job(WATCHED_STEPS, allocations=True), lambda _: None, lambda _: None)

    def _job(self, steps: int, allocations: bool) -> Job:
        device = "cpu" if self.on_cpu else self.config.device
        return Job(self.config, device, steps, self.micro_steps, allocations, self.data)

    def _seconds(self, done: Stepped) -> float:
        """A whole step: micro-steps that were not run take as long as the later ones that were."""
        ran, whole = self.micro_steps, self.config.gradient_accumulation_steps
        later_s = done.rest_s / (ran - 1) * (whole - 1) if ran > 1 else 0.0
        return done.first_s + later_s + done.end_s

    def _first_step_s(self) -> float | None:
        """A step and its compiling; not predicted where nothing is compiled: what it waits for is not the device."""
        time = self.plan.time
        return None if time is None or not time.compile_s else time.compile_s + time.step_ms / 1e3

    def _waited(self) -> float:
        """The share of the timed steps in which other programs had the CPU."""
        timed = self.stepped[1:]
        whole_s = sum(done.first_s + done.rest_s + done.end_s for done in timed)
        return sum(done.waited_s for done in timed) / whole_s if whole_s else 0.0

    def _result(self, ended: Done | Failed, allocated_mib: float | None, watts: float | None) -> Check:
        seconds = [self._seconds(done) for done in self.stepped]
        memory = self.plan.memory
        predicted = Figures(
            allocated_mib=memory.allocated_mib,
            reserved_mib=None if self.on_cpu else memory.reserved_mib,
            process_mib=memory.total_mib,
            step_ms=self.plan.time.step_ms if self.plan.time else None,
            first_step_s=self._first_step_s(),
            watts=cost.drawn_watts(self.plan.device),
        )
        done = ended if isinstance(ended, Done) else None
        measured = Figures(
            allocated_mib=allocated_mib,
            reserved_mib=done.reserved_mib if done else None,
            process_mib=done.process_mib if done else None,
            step_ms=1e3 * statistics.median(seconds[1:]) if len(seconds) > 1 else None,
            first_step_s=seconds[0] if seconds else None,
            watts=watts,
        )
        return Check(
            plan=self.plan,
            predicted=predicted,
            measured=measured,
            steps_ms=tuple(1e3 * s for s in seconds[1:]),
            micro_steps=self.micro_steps,
            data=self.data or f"random tokens: no data/{self.config.dataset} here",
            how="torch's profiler, every CPU allocation" if self.on_cpu else "torch.cuda.max_memory_allocated",
            failure=ended.reason if isinstance(ended, Failed) else None,
            out_of_memory=isinstance(ended, Failed) and ended.out_of_memory,
            waited=self._waited(),
            notes=tuple(self._notes(ended)),
            ratios=self._ratios(predicted, measured) if done and self._waited() <= BUSY else None,
        )

    def _notes(self, ended: Done | Failed) -> list[str]:
        notes = list(self.plan.notes)
        whole = self.config.gradient_accumulation_steps
        if self.micro_steps < whole:
            notes.append(
                f"{self.micro_steps} of {whole} micro-steps a step were run; the rest is counted as the last of them"
            )
        if self._waited() > BUSY:
            notes.append(
                f"Other programs had the CPU for {100 * self._waited():.0f} % of the time: "
                "the times are not this machine's, and are not kept"
            )
        if self.on_cpu:
            notes.append("Power is measured on NVIDIA cards alone")
        if isinstance(ended, Failed) and self.config.compile and not ended.out_of_memory:
            notes.append("--compile=False runs it without a compiler")
        return notes

    def _ratios(self, predicted: Figures, measured: Figures) -> Ratios | None:
        """What a later plan for this device can use."""
        ratio = measured.step_ms / predicted.step_ms if measured.step_ms and predicted.step_ms else None
        tensors = predicted.allocated_mib if self.on_cpu else predicted.reserved_mib
        beside_mib = measured.process_mib - tensors if measured.process_mib and tensors else None
        if beside_mib is not None:  # what one program's optimizer imports is not the other's
            device = self.plan.device
            beside_mib -= with_optimizer(device, self.config).context_mib - device.context_mib
        if ratio is not None and not LOWEST <= ratio <= HIGHEST:
            ratio = None  # something else than the device held the steps up, or the prediction is wrong
        if ratio is beside_mib is measured.watts is None:
            return None
        how = "compiled" if self.config.compile else "eager"
        return Ratios(
            date=date.today().isoformat(),
            of=f"{self.plan.program}, {self.config.n_layer} layers × {self.config.n_embd}, {how}, {self.config.dtype}",
            torch=self.config.torch_version,
            time=ratio,
            context_mib=max(0.0, beside_mib) if beside_mib is not None else None,
            watts=measured.watts,
        )


def _data_folder(loaded: LoadedConfig) -> str | None:
    try:
        return str(find_dataset(loaded.config.dataset, loaded.data_roots()).resolve())
    except InputError:
        return None
