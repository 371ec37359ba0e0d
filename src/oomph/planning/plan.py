"""`plan`: a config on a device, and the `Plan` that says what the run will need."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from oomph import config as configs
from oomph import devices
from oomph.config import LoadedConfig, TrainConfig
from oomph.config.schema import TRANSFORMERS
from oomph.devices import Device
from oomph.errors import InputError, Problem, nearest
from oomph.planning.notes import about_own_model, notes
from oomph.predict import clock, cost
from oomph.predict.memory import Footprint, footprint
from oomph.predict.run_time import Time as Time
from oomph.predict.run_time import predict_time
from oomph.predict.run_time import tokens_per_step as tokens_per_step
from oomph.step import build as steps
from oomph.step import parameters as params
from oomph.step.collector import uncollected
from oomph.step.models import unknown_targets
from oomph.step.ops import Kernel, Phase, Step
from oomph.step.parameters import Parameter

PROGRAMS = {
    "nanogpt": "nanoGPT", "oomph": "oomph train", "hf": "transformers' Trainer", "torch": "a plain PyTorch loop",
    "nanochat": "nanochat",
}  # fmt: skip
OTHER_TRAINER = {"nanogpt": "oomph", "oomph": "nanogpt"}  # whose plan is shown beside that of the one asked for
Config = LoadedConfig | TrainConfig | Mapping[str, Any] | str | os.PathLike[str] | None
POSITIONS = "transformer.wpe.weight"  # nanoGPT counts its parameters without them, and so does oomph train
# Keys that change neither an operation nor a buffer of a step: configs that differ in these alone share their steps.
NOT_IN_A_STEP = (
    "out_dir", "eval_interval", "log_interval", "always_save_checkpoint", "wandb_log", "wandb_project",
    "wandb_run_name", "dataset", "learning_rate", "max_iters", "decay_lr", "warmup_iters", "lr_decay_iters", "min_lr",
    "dataset_tokens", "seed", "expandable_segments",
)  # fmt: skip

PRODUCTS_A_BLOCK = 5  # queries, keys and values; attention; its projection; two of the MLP

# A step takes longer than a kernel's launch and less than a year; a board draws some power.
POSSIBLE = {"step_ms": (0.001, 3.2e10), "watts": (0.001, 1e6)}


class _Built(NamedTuple):
    """A model's parameters, and the operations of its steps."""

    parameters: tuple[Parameter, ...]
    steps: tuple[Step, Step]  # the first and a later one
    notes: tuple[str, ...] = ()
    frozen: frozenset[str] = frozenset()  # names of the parameters that get no gradient
    source: str = "described"  # which way the operations came


class Model(msgspec.Struct, frozen=True):
    """The model's size, counted in several ways."""

    params: int
    params_nanogpt: int  # as its program prints them: nanoGPT leaves its position embeddings out
    decay_params: int
    no_decay_params: int
    decay_tensors: int
    no_decay_tensors: int
    groups: dict[str, int]  # parameters by part of the model
    params_frozen: int = 0  # of `params`, those that get no gradient: they have no optimizer state either


class Compute(msgspec.Struct, frozen=True):
    """Arithmetic, a multiply and an add counted as two."""

    flops_per_token: float  # nanoGPT's formula, full attention
    flops_per_token_causal: float  # attention's lower triangle alone
    flops_per_token_executed: float  # summed over operations, recomputation included
    flops_per_step: float
    total_flops: float


class Data(msgspec.Struct, frozen=True):
    """Tokens of a step, of the run and of the dataset."""

    tokens_per_step: int
    total_tokens: int
    dataset_tokens: int | None
    epochs: float | None
    tokens_per_param: float


class Plan(msgspec.Struct, frozen=True):
    """What one training run needs on one device. `to_dict` is the JSON contract."""

    loaded: LoadedConfig
    device: Device
    model: Model
    memory: Footprint
    time: Time | None
    compute: Compute
    data: Data
    energy: cost.Energy | None
    notes: tuple[str, ...]
    steps: tuple[Step, ...]  # what runs: the first optimizer step and a later one, or an evaluation alone
    traced: str | None = None  # the user's own model, where it was traced instead of nanoGPT's
    source: str = "described"  # which way the operations came: described, traced, or a compiled trace

    @property
    def program(self) -> str:
        """The training program, as reports name it."""
        return Path(self.traced).name if self.traced else PROGRAMS[self.config.trainer]

    @property
    def config(self) -> TrainConfig:
        return self.loaded.config

    def to_dict(self) -> dict[str, Any]:
        """The plan as the documented JSON object, without the figures that could not be predicted."""
        result: dict[str, Any] = {
            "config": msgspec.to_builtins(self.config) | {"sources": dict(self.loaded.sources)},
            "device": msgspec.to_builtins(self.device),
            "model": msgspec.to_builtins(self.model),
            "memory": self.memory.to_dict(),
            "time": msgspec.to_builtins(self.time),
            "compute": msgspec.to_builtins(self.compute),
            "data": msgspec.to_builtins(self.data),
            "energy": msgspec.to_builtins(self.energy),
            "notes": list(self.notes),
            "source": self.source,
        }
        return {name: _without_none(value) for name, value in result.items() if value is not None}


def _without_none(value: Any) -> Any:
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


@uncollected()
def plan(
    config: Config = None,
    device: Device | str | None = None,
    *,
    reserve_mib: float = 0.0,
    step_ms: float | None = None,
    watts: float | None = None,
    price_kwh: float | None = None,
    price_hour: float | None = None,
    currency: str = cost.PRICE_CURRENCY,
    model: str | None = None,
) -> Plan:
    """What training `config` on `device` needs.

    `config` is a preset ("gpt2"), a file, a mapping of keys, or a `TrainConfig`; `device` a card's name, a `Device`,
    or None for this machine. `reserve_mib` is kept free for the desktop and other programs. `step_ms` and `watts`
    replace the predicted step time and the card's draw by measured ones. `price_kwh` is electricity's, `price_hour` a
    rented card's, both in `currency`. `model` ("file.py:function", or a Hugging Face config.json) is traced in place
    of nanoGPT's; it needs torch, and runs the file. Raises `InputError` with everything that is wrong.
    """
    numbers = {"reserve_mib": reserve_mib, "step_ms": step_ms, "watts": watts}
    check_options(**numbers, price_kwh=price_kwh, price_hour=price_hour, currency=currency)
    loaded = configs.as_loaded(config)
    chosen = choose_device(device, loaded.config, measure=False)
    loaded = configs.settle(loaded, chosen, own_model=model is not None)
    settled = loaded.config
    _refuse(loaded, traced=model is not None)
    built = _traced(model, settled, chosen) if model else _described(settled, chosen)
    if device is None and chosen.kind == "cpu":
        chosen = choose_device(None, settled)  # measuring the CPU takes seconds: only once nothing can be wrong
    steps, counts = built.steps, _model(built, settled.trainer)
    compute, data = _compute(settled, steps[1], traced=model is not None), _data(settled, counts)
    times = clock.predict_times(steps[1], settled, chosen)
    running = _runs(steps, settled)
    timed = msgspec.structs.replace(settled, n_layer=_blocks(steps[1])) if model else settled
    time = predict_time(timed, chosen, compute.flops_per_step, times, steps[1], step_ms)
    return Plan(
        loaded=loaded,
        device=chosen,
        model=counts,
        memory=footprint(running, settled, with_imports(chosen, settled), reserve_mib, built.source),
        time=time,
        compute=compute,
        data=data,
        energy=cost.energy(
            chosen,
            time.hours if time else None,
            price_kwh=cost.PRICE_PER_KWH if price_kwh is None else price_kwh,
            currency=currency,
            cards=settled.world_size,
            watts=watts,
            price_hour=price_hour,
        ),
        notes=(*loaded.notes, *chosen.notes, *notes(loaded, chosen, own_model=model), *built.notes),
        steps=running,
        traced=model,
        source=built.source,
    )


def without_returned_logits(about: Plan) -> Plan | None:
    """The same run with a training step that returns only the loss; None where it returns no logits anyway."""
    if not about.config.return_logits or about.traced:
        return None
    config = msgspec.structs.replace(about.config, return_logits=False)
    return plan(msgspec.structs.replace(about.loaded, config=config), about.device)


def check_options(
    *, price_kwh: float | None = None, currency: str = cost.PRICE_CURRENCY, **numbers: float | None
) -> None:
    """Raises `InputError` for options of `plan` that are out of range, and for a currency without a price in it."""
    problems = []
    for name, value in {**numbers, "price_kwh": price_kwh}.items():
        least, most = POSSIBLE.get(name, (0.0, 1e12))
        if value is not None and not least <= value <= most:
            allowed = f"a number from {least:g} to {most:,.0f}"
            problems.append(Problem(name, "is out of range", found=str(value), allowed=allowed))
    if price_kwh is None and currency != cost.PRICE_CURRENCY:
        allowed = f"--price_kwh=PRICE in {currency}; the default price is in {cost.PRICE_CURRENCY}"
        problems.append(Problem("currency", "a price is needed with it", found=currency, allowed=allowed))
    if problems:
        raise InputError(problems)


def _refuse(loaded: LoadedConfig, traced: bool) -> None:
    """Raise `InputError` for what the model cannot have: the model alone tells, not its config."""
    if not traced:
        _check_positions(loaded)
    if loaded.config.method != "full":
        _check_targets(loaded, traced)


def _check_positions(loaded: LoadedConfig) -> None:
    """Refuse sequences longer than a model's table of positions, where it has one of its own."""
    config = loaded.config
    rows = config.max_position_embeddings
    if config.trainer in TRANSFORMERS and config.model_type in ("gpt2", "opt") and rows and config.block_size > rows:
        what, where = "block_size is longer than the table of positions", loaded.sources["block_size"]
        allowed = f"at most max_position_embeddings = {rows}"
        raise InputError(Problem(where, what, f"{config.block_size}", allowed))


def _check_targets(loaded: LoadedConfig, traced: bool) -> None:
    """Refuse adapters on layers that the model does not have, and on a model that is traced."""
    if traced:
        what, allowed = "a traced model gets no adapters", "a model that brings them, or one that is described"
        raise InputError(Problem(loaded.sources["method"], what, f"method = {loaded.config.method!r}", allowed))
    unknown, known = unknown_targets(loaded.config)
    where, allowed = loaded.sources["lora_targets"], f"{', '.join(known)} or all-linear"
    what = "the model has no layer of this name"
    if unknown:
        raise InputError([Problem(where, what, each[:60], allowed, nearest(each, known)) for each in unknown[:20]])


def choose_device(device: Device | str | None, config: TrainConfig, measure: bool = True) -> Device:
    """The device asked for, or this machine's own, whose CPU is measured if need be and `measure` allows it.

    Raises `InputError` where a GPU is named and the config is for another kind of device.
    """
    if device is None:
        return devices.calibrated(devices.detect(config.device, measure))
    if not isinstance(device, Device | str):
        raise InputError(Problem("device", "not a device", found=repr(device), allowed="a card's name, or a Device"))
    chosen = devices.calibrated(devices.find(device)) if isinstance(device, str) else device
    wanted = config.device.partition(":")[0]
    if wanted in ("cpu", "mps") and chosen.kind not in (wanted, "cpu"):
        what = "contradicts the GPU that is named"
        raise InputError(Problem(f"device={config.device}", what, found=chosen.name, allowed="one of them"))
    return chosen


def _described(config: TrainConfig, device: Device) -> _Built:
    """A model that `step.models` describes."""
    defaults = TrainConfig()
    same = msgspec.structs.replace(config, **{key: getattr(defaults, key) for key in NOT_IN_A_STEP})
    usual = steps.workspaces(device.capability) == steps.workspaces()  # nothing else depends on the card's generation
    return _steps(same, device.kind != "cpu", None if usual else device.capability, device.threads)


@lru_cache(maxsize=4)  # the same steps answer many questions: another card, a price, a longer run
def _steps(config: TrainConfig, on_gpu: bool, capability: tuple[int, int] | None, threads: int | None) -> _Built:
    first, later = (steps.build(config, on_gpu, first, capability, threads=threads) for first in (True, False))
    parameters = params.parameters(config)
    return _Built(parameters, (first, later), frozen=frozenset(p.name for p in parameters if not p.trained))


def _blocks(step: Step) -> int:
    """How many transformer blocks the user's own model amounts to, by the products of its forward."""
    forward = [op for op in step.sections[0].ops if op.phase is Phase.FORWARD]
    return max(1, round(sum(op.kernel in (Kernel.GEMM, Kernel.ATTENTION) for op in forward) / PRODUCTS_A_BLOCK))


def with_imports(device: Device, config: TrainConfig) -> Device:
    """The device with what torch.optim and transformers import added to its context, where the program has them.

    oomph train's own AdamW imports nothing.
    """
    own = config.trainer == "oomph" and config.optimizer == "adamw" and config.optimizer_loop == "fused"
    more = 0 if own else device.optimizer_mib
    more += device.transformers_mib if config.trainer in TRANSFORMERS else 0
    return msgspec.structs.replace(device, context_mib=device.context_mib + more)


def _runs(steps: tuple[Step, Step], config: TrainConfig) -> tuple[Step, ...]:
    """The steps that run: both, or with eval_only the one evaluation."""
    if not config.eval_only:
        return steps
    evaluation = tuple(section for section in steps[0].sections if section.ops[0].phase is Phase.EVAL)
    return (Step(steps[0].resident, evaluation),)


def _traced(model: str, config: TrainConfig, device: Device) -> _Built:
    """The user's own model, traced."""
    from oomph.step.trace.cache import traced

    on_gpu = device.kind != "cpu"
    found = traced(model, config, on_gpu, steps.workspaces(device.capability) if on_gpu else ())
    facts = found.facts
    buckets = steps.gradient_buckets(config, facts.trained)
    first, later = (Step((*step.resident, *buckets), step.sections) for step in found.steps)
    frozen = {p.name for p in facts.parameters} - {p.name for p in facts.trained}
    return _Built(facts.parameters, (first, later), about_own_model(found, config), frozenset(frozen), found.source)


def _model(built: _Built, trainer: str) -> Model:
    parameters = built.parameters
    left_out = [p for p in parameters if p.name == POSITIONS and trainer not in TRANSFORMERS]
    trained = [p for p in parameters if p.name not in built.frozen]
    decayed = [p for p in trained if p.decayed]
    kept = [p for p in trained if not p.decayed]
    total = sum(p.numel for p in parameters)
    return Model(
        params=total,
        params_nanogpt=total - sum(p.numel for p in left_out),
        decay_params=sum(p.numel for p in decayed),
        no_decay_params=sum(p.numel for p in kept),
        decay_tensors=len(decayed),
        no_decay_tensors=len(kept),
        groups=params.by_group(parameters),
        params_frozen=total - sum(p.numel for p in trained),
    )


def _compute(config: TrainConfig, step: Step, traced: bool) -> Compute:
    tokens = tokens_per_step(config)
    training = [(section.times, op) for section in step.sections for op in section.ops if op.phase is not Phase.EVAL]
    executed = sum(times * op.times * op.flops for times, op in training) * config.world_size / tokens
    per_token = executed if traced else params.flops_per_token(config)
    return Compute(
        flops_per_token=per_token,
        flops_per_token_causal=executed if traced else params.flops_per_token_causal(config),
        flops_per_token_executed=executed,
        flops_per_step=per_token * tokens,
        total_flops=per_token * tokens * config.max_iters,
    )


def _data(config: TrainConfig, model: Model) -> Data:
    per_step = tokens_per_step(config)
    total = per_step * config.max_iters
    return Data(
        tokens_per_step=per_step,
        total_tokens=total,
        dataset_tokens=config.dataset_tokens,
        epochs=total / config.dataset_tokens if config.dataset_tokens else None,
        tokens_per_param=total / max(1, model.params_nanogpt),
    )
