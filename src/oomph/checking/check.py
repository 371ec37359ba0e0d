"""`oomph.check`: run a few steps of a config on this machine and compare them with the plan."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from datetime import date
from importlib.util import find_spec
from typing import Any

import msgspec
from msgspec.structs import replace

from oomph import config as configs
from oomph import devices
from oomph.checking.launch import Ended, Job, JobDone, JobFailed, JobRefused, PowerWatch, StepDone, run_job
from oomph.config import LoadedConfig
from oomph.config.programs import TRANSFORMERS, release
from oomph.config.schema import DEEPSPEEDS
from oomph.config.settle import installed
from oomph.data.manifest import find_dataset
from oomph.devices import Device
from oomph.devices.cpu_rates import BUSY
from oomph.devices.ratios import HIGHEST, LOWEST, Ratios
from oomph.display import Displayed
from oomph.errors import InputError, Problem
from oomph.planning.notes import unrunnable
from oomph.planning.plan import Config, Plan, plan, with_imports
from oomph.predict import cost
from oomph.training.errors import DoesNotFitError


class CheckFigures(msgspec.Struct, frozen=True):
    """Predicted or measured figures. None: not predicted, or not measurable here."""

    allocated_mib: float | None = None  # peak of torch's tensors
    reserved_mib: float | None = None  # peak of CUDA's caching allocator
    process_mib: float | None = None  # the whole process, as nvidia-smi or the operating system shows it
    step_ms: float | None = None  # an optimizer step
    first_step_s: float | None = None  # the first step, which compiles
    watts: float | None = None  # of the card

    def nested(self) -> dict[str, dict[str, float]]:
        """As in the JSON: grouped into memory, time and power, without unknown figures."""
        groups = {
            "memory": {"allocated_mib": self.allocated_mib, "reserved_mib": self.reserved_mib}
            | {"process_mib": self.process_mib},
            "time": {"step_ms": self.step_ms, "first_step_s": self.first_step_s},
            "power": {"watts": self.watts},
        }
        return {name: {key: v for key, v in group.items() if v is not None} for name, group in groups.items()}


class Check(Displayed, msgspec.Struct, frozen=True):
    """What `oomph.check` returns. `to_dict` is the documented JSON."""

    plan: Plan  # without saved ratios
    predicted: CheckFigures
    measured: CheckFigures
    steps_ms: tuple[float, ...]  # of the steps after the first
    micro_steps: int  # run in each step
    data: str  # what the steps read
    how: str  # how allocated memory was measured
    waited: float = 0.0  # share of the timed steps in which other programs used the CPU
    failure: str | None = None  # why its steps did not finish
    out_of_memory: bool = False
    notes: tuple[str, ...] = ()
    ratios: Ratios | None = None  # what --save stores; None if nothing is worth storing

    @property
    def error(self) -> CheckFigures:
        """The relative error of each prediction: +0.1 is ten percent too high."""
        pairs = {
            name: (getattr(self.predicted, name), getattr(self.measured, name))
            for name in CheckFigures.__struct_fields__
        }
        return CheckFigures(**{name: said / was - 1 if said and was else None for name, (said, was) in pairs.items()})

    def __repr__(self) -> str:
        off = {name: f"{100 * value:+.1f} %" for name, value in msgspec.structs.asdict(self.error).items() if value}
        shown = self.failure or ", ".join(f"{name} {error}" for name, error in off.items())
        return f"<Check of {self.plan.program} on {self.plan.device.name}: {shown}>"

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON object."""
        config = self.plan.config
        return {
            "config": msgspec.to_builtins(config) | {"sources": dict(self.plan.loaded.sources)},
            **({"model": self.plan.traced} if self.plan.traced else {}),
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


CHECKED = ("nanogpt", "oomph", "hf", "trl", "torch")  # the programs that can be run
STEPS = 5  # timed, after the first
CPU_MICRO_STEPS = 2  # the first and a later one: on a CPU all of them could take minutes
RECORDED_STEPS = 1  # after the first, which allocates the optimizer's state

Tell = Callable[[str], None]


def check(
    config: Config = None,
    *,
    steps: int = STEPS,
    force: bool = False,
    model: str | None = None,
    tell: Tell | None = None,
    **keys: Any,
) -> Check:
    """Run a first and then `steps` optimizer steps of `config` on this machine; compare them with the plan.

    `config` and `keys` are what `oomph.plan` takes; `device` among them is where it runs. `model` is a Hugging Face
    config.json of any causal model, traced and run in place of the config's own. Raises `DoesNotFitError` if the plan
    says that it does not fit, unless `force`, and `InputError` if the input is wrong. A run that fails or runs out of
    memory is a result. `tell` gets short progress messages. Needs torch, and transformers for its models.
    """
    loaded, device = _settle(configs.as_loaded(config, keys, model), steps)
    planned = plan(loaded, device)
    problems = [] if loaded.model else unrunnable(planned.loaded, device.kind == "cpu")
    if problems:
        raise InputError(problems)
    if planned.memory.fits is False and not force:
        need, room = (f"{size:,.0f} MiB" for size in (planned.memory.total_mib, planned.memory.capacity_mib or 0.0))
        raise DoesNotFitError(f"the plan says that this run does not fit: it needs {need} of {room}")
    return _Checking(planned, steps, tell or (lambda _: None)).run()


def _settle(loaded: LoadedConfig, steps: int) -> tuple[LoadedConfig, Device]:
    """The config as it runs here, and the device it runs on."""
    if find_spec("torch") is None:
        raise InputError(Problem("oomph check", "needs torch; try: pip install 'oomph[train]'"))
    problems = _invalid(loaded, steps)
    if problems:
        raise InputError(problems)
    device = devices.detect(loaded.config.device)
    if device.kind not in ("cpu", "cuda") or (device.kind == "cpu" and _asked_for_a_gpu(loaded)):
        found = f"this machine's {device.name}"
        raise InputError(
            Problem(_where(loaded, "device"), "this device is not available", found=found, allowed="--device=cpu")
        )
    for package in ("torch", "transformers", "trl"):
        key, version = f"{package}_version", installed(package)
        if version is not None and not loaded.said(key):
            config = replace(loaded.config, **{key: version})
            loaded = replace(loaded, config=config, sources=loaded.sources | {key: "default: what runs here"})
    return loaded, device


def _asked_for_a_gpu(loaded: LoadedConfig) -> bool:
    return loaded.said("device") and loaded.config.device.partition(":")[0] != "cpu"


def _where(loaded: LoadedConfig, key: str) -> str:
    return loaded.sources[key] if loaded.said(key) else key


# Programs that can be planned but not checked.
_PROGRAMS = {
    "torchtune": "torchtune's own models; its description is held against traces of theirs",
    "litgpt": "litgpt's own model; its description is held against traces of it",
    "unsloth": "Unsloth's kernels, which need a GPU; with trainer = 'hf' it runs the model without them",
}
_NOT_RUN = (
    *(("deepspeed", stage, "a check does not run DeepSpeed") for stage in DEEPSPEEDS[1:]),
    ("model_type", "qwen", "Qwen's first models are not in transformers, and a check runs no code from the hub"),
)


def _invalid(loaded: LoadedConfig, steps: int) -> list[Problem]:
    config, model, problems = loaded.config, loaded.model, []
    if steps < 1:
        problems.append(Problem("--steps", "too few", found=str(steps), allowed="at least 1"))
    if config.trainer not in CHECKED:
        what = f"a check does not run {_PROGRAMS.get(config.trainer, config.trainer)}"
        problems.append(Problem(_where(loaded, "trainer"), what, config.trainer, ", ".join(CHECKED)))
    if (model or config.trainer in TRANSFORMERS) and find_spec("transformers") is None:
        what = "its model needs transformers; try: pip install 'oomph[hf]'"
        problems.append(Problem(model or _where(loaded, "trainer"), what))
    if config.trainer == "trl":
        problems += _invalid_for_trl(loaded)
    if config.method != "full" and find_spec("peft") is None:
        problems.append(Problem(_where(loaded, "method"), "needs peft; try: pip install peft"))
    if config.method == "qlora" or config.quantization not in (None, "off"):
        what, allowed = "a check runs no quantized base", "method = 'lora' or 'dora', quantization = 'off'"
        told = _where(loaded, "quantization" if loaded.said("quantization") else "method")
        problems.append(Problem(told, what, f"method = {config.method!r}", allowed))
    for key, value, what in _NOT_RUN:
        if getattr(config, key) == value:
            problems.append(Problem(_where(loaded, key), what, f"{key} = {value!r}", "another, or oomph plan"))
    if model and not model.endswith(".json"):
        what = "a check runs transformers' models, not one of your own"
        problems.append(Problem(f"--model {model}", what, allowed="a Hugging Face config.json"))
    if model and config.trainer == "oomph":
        what, allowed = "oomph train trains its own model only", "nanogpt, hf or torch"
        problems.append(Problem(_where(loaded, "trainer"), what, found=config.trainer, allowed=allowed))
    if config.eval_only:
        problems.append(
            Problem(_where(loaded, "eval_only"), "without training steps there is nothing to check", allowed="False")
        )
    if config.world_size > 1:
        what = "a check runs on one device"
        problems.append(
            Problem(_where(loaded, "world_size"), what, found=str(config.world_size), allowed="--world_size=1")
        )
    return problems


def _invalid_for_trl(loaded: LoadedConfig) -> list[Problem]:
    """What cannot be run by the SFTTrainer that is installed."""
    config, there, where = loaded.config, installed("trl"), _where(loaded, "trl_version")
    if there is None:
        return [Problem(_where(loaded, "trainer"), "needs trl; try: pip install trl")]
    problems = []
    if loaded.said("trl_version") and release(config.trl_version) != release(there):
        problems.append(Problem(where, "a check runs the TRL that is installed", config.trl_version, there))
    if loaded.model:
        problems.append(Problem(f"--model {loaded.model}", "SFTTrainer's loss is not traced", allowed="trainer = 'hf'"))
    own = (config.fused_loss or "trl", "trl")
    for key, value, runs in (
        ("packing", config.packing, "off"),
        ("fused_loss", *own),
    ):
        if value != runs:
            what = "a check runs SFTTrainer with its own loss, on rows of one length"
            problems.append(Problem(_where(loaded, key), what, f"{key} = {value!r}", f"{key} = {runs!r}"))
    return problems


class _Checking:
    """One check in progress."""

    def __init__(self, planned: Plan, steps: int, tell: Tell) -> None:
        self.plan, self.config, self.steps, self.tell = planned, planned.config, steps, tell
        self.on_cpu = planned.device.kind == "cpu"
        whole = self.config.gradient_accumulation_steps
        self.micro_steps = min(whole, CPU_MICRO_STEPS) if self.on_cpu else whole
        self.data = _data_folder(planned.loaded)
        self.stepped: list[StepDone] = []

    def run(self) -> Check:
        with PowerWatch() as power:

            def note(done: StepDone) -> None:
                self.stepped.append(done)
                if done.step == 0:
                    power.restart()
                self.tell(f"step {done.step} of {self.steps}: {1e3 * self._seconds(done):,.0f} ms")

            self.tell("starting torch")
            ended = run_job(self._job(self.steps, allocations=False), note, power.follow)
            if isinstance(ended, JobRefused):
                raise InputError(ended.problems)
            watts = power.watts()
        allocated_mib = None
        if isinstance(ended, JobDone):
            allocated_mib = ended.allocated_mib
            if self.on_cpu:
                recorded = self._record_allocations()
                allocated_mib = recorded.allocated_mib if isinstance(recorded, JobDone) else None
                ended = recorded if isinstance(recorded, JobFailed) else ended
        return self._result(ended, allocated_mib, watts)

    def _record_allocations(self) -> Ended:
        self.tell("running again to record every allocation")
        return run_job(self._job(RECORDED_STEPS, allocations=True), lambda _: None, lambda _: None)

    def _job(self, steps: int, allocations: bool) -> Job:
        device = "cpu" if self.on_cpu else self.config.device
        return Job(self.config, device, steps, self.micro_steps, allocations, self.data, self.plan.traced)

    def _seconds(self, done: StepDone) -> float:
        """Seconds of a whole step: micro-steps that were not run count like the later ones that were."""
        ran, whole = self.micro_steps, self.config.gradient_accumulation_steps
        later_s = done.rest_s / (ran - 1) * (whole - 1) if ran > 1 else 0.0
        return done.first_s + later_s + done.end_s

    def _in_processor_time(self, done: StepDone) -> float:
        """The same without the time in which this thread did not have the CPU."""
        clock_s = done.first_s + done.rest_s + done.end_s
        return self._seconds(done) * (min(1.0, done.processor_s / clock_s) if clock_s else 1.0)

    def _first_step_s(self) -> float | None:
        """The predicted first step with its compiling, in seconds; None without compiling."""
        time = self.plan.time
        return None if time is None or not time.compile_s else time.compile_s + time.step_ms / 1e3

    def _waited(self) -> float:
        """The share of the timed steps in which other programs used the CPU."""
        timed = self.stepped[1:]
        whole_s = sum(done.first_s + done.rest_s + done.end_s for done in timed)
        return sum(done.waited_s for done in timed) / whole_s if whole_s else 0.0

    def _result(self, ended: JobDone | JobFailed, allocated_mib: float | None, watts: float | None) -> Check:
        shared = self.on_cpu and self._waited() > BUSY
        seconds = [self._in_processor_time(done) if shared else self._seconds(done) for done in self.stepped]
        memory = self.plan.memory
        predicted = CheckFigures(
            allocated_mib=memory.allocated_mib,
            reserved_mib=None if self.on_cpu else memory.reserved_mib,
            process_mib=memory.total_mib,
            step_ms=self.plan.time.step_ms if self.plan.time else None,
            first_step_s=self._first_step_s(),
            watts=cost.drawn_watts(self.plan.device),
        )
        done = ended if isinstance(ended, JobDone) else None
        measured = CheckFigures(
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
            data=self.data or f"random tokens: there is no data/{self.config.dataset}",
            how="torch's profiler, every CPU allocation" if self.on_cpu else "torch.cuda.max_memory_allocated",
            failure=ended.reason if isinstance(ended, JobFailed) else None,
            out_of_memory=isinstance(ended, JobFailed) and ended.out_of_memory,
            waited=self._waited(),
            notes=tuple(self._notes(ended)),
            ratios=self._ratios(predicted, measured) if done and self._waited() <= BUSY else None,
        )

    def _notes(self, ended: JobDone | JobFailed) -> list[str]:
        notes = list(self.plan.notes)
        whole = self.config.gradient_accumulation_steps
        if self.micro_steps < whole:
            notes.append(
                f"{self.micro_steps} of {whole} micro-steps per step were run; the rest count as the last of them"
            )
        if self._waited() > BUSY:
            notes.append(
                f"Other programs used the CPU for {100 * self._waited():.0f} % of the time: "
                "steps are measured in processor time, and are not saved"
            )
        if self.on_cpu:
            notes.append("Power is measured on NVIDIA cards only")
        if isinstance(ended, JobFailed) and self.config.compile and not ended.out_of_memory:
            notes.append("--compile=False runs without a compiler")
        return notes

    def _ratios(self, predicted: CheckFigures, measured: CheckFigures) -> Ratios | None:
        """Measured over predicted, for later plans on this device."""
        ratio = measured.step_ms / predicted.step_ms if measured.step_ms and predicted.step_ms else None
        tensors = predicted.allocated_mib if self.on_cpu else predicted.reserved_mib
        beside_mib = measured.process_mib - tensors if measured.process_mib and tensors else None
        if beside_mib is not None:  # imports differ between programs
            device = self.plan.device
            beside_mib -= with_imports(device, self.config).context_mib - device.context_mib
        if ratio is not None and not LOWEST <= ratio <= HIGHEST:
            ratio = None  # something other than the device slowed the steps, or the prediction is wrong
        if ratio is beside_mib is measured.watts is None:
            return None
        how = "compiled" if self.config.compile else "eager"
        return Ratios(
            date=date.today().isoformat(),
            of=f"{self.plan.program}, {shape(self.plan)}, {how}, {self.config.dtype}",
            torch=self.config.torch_version,
            time=ratio,
            context_mib=max(0.0, beside_mib) if beside_mib is not None else None,
            watts=measured.watts,
        )


def shape(about: Plan) -> str:
    """The model in a few words; with its type, if the program has several."""
    config = about.config
    if about.traced:
        return f"{about.model.params:,} parameters"
    name = f"{config.model_type}, " if config.trainer in TRANSFORMERS else ""
    return f"{name}{config.n_layer} layers × {config.n_embd}"


def _data_folder(loaded: LoadedConfig) -> str | None:
    try:
        return str(find_dataset(loaded.config.dataset, loaded.data_roots()).resolve())
    except InputError:
        return None
