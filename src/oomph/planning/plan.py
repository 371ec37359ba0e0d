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
from oomph.config.layer import EACH_DEVICES
from oomph.config.lengths import mean_length, padded_length
from oomph.config.programs import TRANSFORMERS
from oomph.config.shape import OF_THE_MODEL
from oomph.devices import Device
from oomph.devices.links import find_link, find_network, usual_link, usual_network
from oomph.display import Displayed
from oomph.errors import InputError, Problem
from oomph.planning.loading import Loading, loading
from oomph.planning.notes import about_own_model, notes
from oomph.planning.refusals import check_options, refuse
from oomph.predict import clock, cost
from oomph.predict.links import wires
from oomph.predict.memory import Footprint, footprint
from oomph.predict.run_time import Time as Time
from oomph.predict.run_time import predict_time
from oomph.predict.run_time import tokens_per_step as tokens_per_step
from oomph.step import build as steps
from oomph.step import parameters as params
from oomph.step.collector import uncollected
from oomph.step.models.common import document_length
from oomph.step.ops import Kernel, Phase, Step
from oomph.step.parameters import Parameter
from oomph.step.sharding.groups import is_sharded
from oomph.step.trace.cache import OwnModel

PROGRAMS = {
    "nanogpt": "nanoGPT", "oomph": "oomph train", "hf": "transformers' Trainer", "trl": "TRL's SFTTrainer",
    "torch": "a plain PyTorch loop", "nanochat": "nanochat", "torchtune": "torchtune", "litgpt": "litgpt",
    "torchtitan": "torchtitan", "unsloth": "Unsloth",
}  # fmt: skip
_OTHER_TRAINER = {"nanogpt": "oomph", "oomph": "nanogpt"}
Config = LoadedConfig | TrainConfig | Mapping[str, Any] | str | os.PathLike[str] | None
POSITIONS = "transformer.wpe.weight"  # nanoGPT counts its parameters without them, and so does oomph train
# Keys that change neither an operation nor a buffer of a step: configs that differ only in these share their steps.
NOT_IN_A_STEP = (
    "out_dir", "eval_interval", "log_interval", "always_save_checkpoint", "wandb_log", "wandb_project",
    "wandb_run_name", "dataset", "learning_rate", "max_iters", "decay_lr", "warmup_iters", "lr_decay_iters", "min_lr",
    "dataset_tokens", "seed", "expandable_segments", "num_train_epochs", "num_samples", "link", "network",
    "sample_tokens", "time_limit", "until_loss",
)  # fmt: skip

PRODUCTS_A_BLOCK = 5  # queries, keys and values; attention; its projection; two of the MLP


class _Built(NamedTuple):
    """A model's parameters, and the operations of its steps."""

    parameters: tuple[Parameter, ...]
    steps: tuple[Step, Step]  # the first and a later one
    notes: tuple[str, ...] = ()
    frozen: frozenset[str] = frozenset()  # names of the parameters that get no gradient
    source: str = "described"  # how the operations were obtained


class Model(msgspec.Struct, frozen=True):
    """The model's size, counted in several ways."""

    params: int
    params_nanogpt: int  # as its program prints them: nanoGPT leaves out its position embeddings
    decay_params: int
    no_decay_params: int
    decay_tensors: int
    no_decay_tensors: int
    groups: dict[str, int]  # parameters by part of the model
    trainable_params: int  # with a gradient and optimizer state
    params_frozen: int = 0  # included in `params`, without gradient and optimizer state


class Compute(msgspec.Struct, frozen=True):
    """Arithmetic, a multiply and an add counted as two."""

    flops_per_token: float  # nanoGPT's formula, full attention
    flops_per_token_causal: float  # only attention's lower triangle
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


class Plan(Displayed, msgspec.Struct, frozen=True):
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
    steps: tuple[Step, ...]  # what runs: the first optimizer step and a later one, or only an evaluation
    source: str = "described"  # how the operations were obtained: described, traced, or a compiled trace
    loading: Loading | None = None  # what loading the model takes, unless it is trained from scratch

    @property
    def traced(self) -> str | None:
        """The user's own model, if one was traced in place of the config's."""
        return self.loaded.model

    @property
    def program(self) -> str:
        """The training program, as reports name it."""
        return Path(self.traced).name if self.traced else PROGRAMS[self.config.trainer]

    @property
    def config(self) -> TrainConfig:
        return self.loaded.config

    @property
    def cards(self) -> str:
        """What it runs on: "GeForce RTX 4090", "4 × GeForce RTX 4090"."""
        count = self.config.world_size
        return self.device.name if count == 1 else f"{count} × {self.device.name}"

    def __repr__(self) -> str:
        memory, time = self.memory, self.time
        fits = {True: "fits", False: "does not fit", None: "runs"}[memory.fits]
        room = "" if memory.capacity_mib is None else f" of {memory.capacity_mib:,.0f}"
        pace = "" if time is None else f", {time.tokens_per_s:,.0f} tokens/s, {time.hours:,.1f} h"
        return f"<Plan: {self.program} {fits} on {self.cards}: {memory.total_mib:,.0f}{room} MiB{pace}>"

    def to_dict(self) -> dict[str, Any]:
        """The plan as the documented JSON object, without the figures that could not be predicted."""
        result: dict[str, Any] = {
            "config": self._config(),
            "device": msgspec.to_builtins(self.device),
            "model": msgspec.to_builtins(self.model),
            "memory": self.memory.to_dict(),
            "time": msgspec.to_builtins(self.time),
            "compute": msgspec.to_builtins(self.compute),
            "data": msgspec.to_builtins(self.data),
            "energy": msgspec.to_builtins(self.energy),
            "notes": list(self.notes),
            "source": self.source,
            "loading": msgspec.to_builtins(self.loading),
        }
        return {name: _without_none(value) for name, value in result.items() if value is not None}

    def _config(self) -> dict[str, Any]:
        """Every key with its source; of a traced model's shape only what its own config states."""
        sources = self.loaded.sources
        hidden = {key for key in OF_THE_MODEL if self.traced is not None and sources[key] != self.traced}
        values = {key: value for key, value in msgspec.to_builtins(self.config).items() if key not in hidden}
        return values | {"sources": {key: where for key, where in sources.items() if key not in hidden}}


def _without_none(value: Any) -> Any:
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


@uncollected()
def plan(
    config: Config = None,
    gpu: Device | str | None = None,
    *,
    reserve_mib: float = 0.0,
    step_ms: float | None = None,
    watts: float | None = None,
    price_kwh: float | None = None,
    price_hour: float | None = None,
    currency: str = cost.PRICE_CURRENCY,
    model: str | OwnModel | None = None,
    **keys: Any,
) -> Plan:
    """What training `config` on `gpu` needs.

    `config` is a preset ("gpt2"), a file, a mapping of keys, or a `TrainConfig`; `keys` are config keys over it
    (`batch_size=8`). `gpu` is a card's name, a `Device`, or None for this machine. `reserve_mib` is kept free for the
    desktop and other programs. `step_ms` and `watts` replace the predicted step time and the card's draw by measured
    ones. `price_kwh` is electricity's, `price_hour` a rented card's, both in `currency`. `model` ("file.py:function",
    or a Hugging Face config.json) is traced in place of the config's; it needs torch, and runs the file. Raises
    `InputError` with everything that is wrong.
    """
    numbers = {"reserve_mib": reserve_mib, "step_ms": step_ms, "watts": watts}
    check_options(**numbers, price_kwh=price_kwh, price_hour=price_hour, currency=currency)
    loaded = configs.as_loaded(config, keys, model.spec if isinstance(model, OwnModel) else model)
    if isinstance(gpu, str):
        loaded, gpu = _with_cards(loaded, gpu)
    chosen = choose_device(gpu, loaded.config, measure=False)
    loaded = joined(configs.settle(loaded, chosen), chosen)
    settled = loaded.config
    refuse(loaded)
    own = model if isinstance(model, OwnModel) else OwnModel(loaded.model) if loaded.model is not None else None
    built = _traced(own, settled, chosen) if own else _described(settled, chosen)
    if gpu is None and chosen.kind == "cpu":
        chosen = choose_device(None, settled)  # measuring the CPU takes seconds: only once nothing can be wrong
    steps, counts = built.steps, _model(built, settled.trainer)
    paced = msgspec.structs.replace(settled, mean_length=None, lengths=None) if own else at_usual_length(settled)
    later = steps[1] if own or paced is settled else _described(paced, chosen).steps[1]
    compute, data = _compute(paced, later, traced=own is not None), _data(paced, counts)
    times = clock.predict_times(later, paced, chosen)
    running = _runs(steps, settled)
    timed = msgspec.structs.replace(paced, n_layer=_blocks(later)) if own else paced
    time = predict_time(timed, chosen, compute.flops_per_step, times, later, step_ms)
    kwh, hours = cost.PRICE_PER_KWH if price_kwh is None else price_kwh, time.hours if time else None
    energy = cost.energy(chosen, hours, kwh, currency, cards=settled.world_size, watts=watts, price_hour=price_hour)
    process = with_imports(chosen, settled)
    return Plan(
        loaded=loaded,
        device=chosen,
        model=counts,
        memory=footprint(running, settled, process, reserve_mib, built.source),
        time=time,
        compute=compute,
        data=data,
        energy=energy,
        notes=(*loaded.notes, *chosen.notes, *notes(loaded, chosen), *built.notes),
        steps=running,
        source=built.source,
        loading=None if own or is_sharded(settled) else loading(settled, chosen, process.context_mib or 0.0),
    )


def at_usual_length(config: TrainConfig) -> TrainConfig:
    """The config of a mean batch. Samples are padded to the longest of their batch at most, or not at all: the peak is
    the longest batch's, the time the mean one's. Packed rows are all full."""
    if config.packing == "packed" or config.tensor_parallel_degree > 1:
        return config
    mean, padded = mean_length(config), padded_length(config)
    if mean == padded == config.block_size:
        return config
    return msgspec.structs.replace(config, block_size=padded, mean_length=mean, lengths=None)


def _with_cards(loaded: LoadedConfig, named: str) -> tuple[LoadedConfig, str]:
    """The config with the number of cards per machine in the name ("8xH100"), and the card's name."""
    name, each = devices.split_count(named)
    if each is None or loaded.said("world_size"):
        return loaded, name
    count, nodes = devices.all_cards(each, loaded.config.nodes if loaded.said("nodes") else None)
    steps, shared = loaded.config.gradient_accumulation_steps, max(1, count // loaded.config.tensor_parallel_degree)
    by_default = loaded.config.trainer in (*TRANSFORMERS, "torchtitan") and not loaded.said(
        "gradient_accumulation_steps"
    )
    if by_default or loaded.sources["gradient_accumulation_steps"].endswith(EACH_DEVICES):
        steps *= shared  # the setting, or its default, is per device
    if count < 1 or steps % shared:
        what = "gradient_accumulation_steps is not a multiple of the cards"
        raise InputError(Problem(f"gpu={named!r}", what, f"{count} cards", f"divisors of {steps}"))
    config = msgspec.structs.replace(loaded.config, world_size=count, nodes=nodes, gradient_accumulation_steps=steps)
    sources = loaded.sources | dict.fromkeys(("world_size", "nodes"), f"gpu={named!r}")
    return msgspec.structs.replace(loaded, config=config, sources=sources), name


def joined(loaded: LoadedConfig, device: Device) -> LoadedConfig:
    """A settled config with the links between its cards filled in. Raises `InputError` for those that do not exist."""
    config, decided = loaded.config, dict[str, tuple[str, str]]()
    if config.world_size < config.nodes:
        what, allowed = "more machines than devices", "--gpu 8xNAME, the cards of one machine, or world_size"
        raise InputError(Problem(loaded.sources["nodes"], what, f"nodes = {config.nodes}", allowed))
    if config.world_size % config.tensor_parallel_degree:
        where, found = loaded.sources["tensor_parallel_degree"], f"{config.world_size} devices"
        what = f"world_size is not a multiple of tensor_parallel_degree = {config.tensor_parallel_degree}"
        raise InputError(Problem(where, what, found, "--gpu 8xNAME, or world_size"))
    if config.world_size == 1 or device.kind not in ("cuda", "rocm"):
        return loaded
    if config.link is None:
        decided["link"] = usual_link(device)
    else:
        find_link(config.link, device)
    if config.nodes > 1 and config.network is None:
        decided["network"] = usual_network(device)
    elif config.network is not None:
        find_network(config.network)
    filled = msgspec.structs.replace(config, **{key: value for key, (value, _) in decided.items()})
    sources = loaded.sources | {key: f"default: {reason}" for key, (_, reason) in decided.items()}
    return msgspec.structs.replace(loaded, config=filled, sources=sources)


def other_trainer(config: TrainConfig) -> str | None:
    """The trainer whose plan of the same run is shown beside the requested one's; nanoGPT has no adapters."""
    return _OTHER_TRAINER.get(config.trainer) if config.method == "full" else None


def without_returned_logits(about: Plan) -> Plan | None:
    """The same run with a training step that returns only the loss; None if it returns no logits anyway."""
    if not about.config.return_logits or about.traced:
        return None
    config = msgspec.structs.replace(about.config, return_logits=False)
    return plan(msgspec.structs.replace(about.loaded, config=config), about.device)


def choose_device(device: Device | str | None, config: TrainConfig, measure: bool = True) -> Device:
    """The requested device, or this machine's own, whose CPU is measured if needed and `measure` allows it.

    Raises `InputError` if a GPU is named and the config is for another kind of device.
    """
    if device is None:
        return devices.calibrated(devices.detect(config.device, measure))
    if not isinstance(device, Device | str):
        raise InputError(Problem("gpu", "not a device", found=repr(device), allowed="a card's name, or a Device"))
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


@lru_cache(maxsize=4)  # the same steps serve many questions: another card, a price, a longer run
def _steps(config: TrainConfig, on_gpu: bool, capability: tuple[int, int] | None, threads: int | None) -> _Built:
    first, later = (steps.build(config, on_gpu, first, capability, threads=threads) for first in (True, False))
    parameters = params.parameters(config)
    return _Built(parameters, (first, later), frozen=frozenset(p.name for p in parameters if not p.trained))


def _blocks(step: Step) -> int:
    """How many transformer blocks the user's own model is equivalent to, by the matrix products of its forward."""
    forward = [op for op in step.sections[0].ops if op.phase is Phase.FORWARD]
    return max(1, round(sum(op.kernel in (Kernel.GEMM, Kernel.ATTENTION) for op in forward) / PRODUCTS_A_BLOCK))


def with_imports(device: Device, config: TrainConfig) -> Device:
    """The device with what torch.optim, transformers and NCCL hold added to its context, if the program uses them.

    oomph train's own AdamW imports nothing.
    """
    own = config.trainer == "oomph" and config.optimizer == "adamw" and config.optimizer_loop == "fused"
    more = 0 if own else device.optimizer_mib
    more += device.transformers_mib if config.trainer in TRANSFORMERS else 0
    between = wires(config, device)
    more += round(between.nccl_mib) if between is not None else 0
    if between is not None and 1 < config.tensor_parallel_degree < config.world_size:
        more += round(between.link.nccl_mib)  # another communicator, of those that split the layers
    return msgspec.structs.replace(device, context_mib=device.context_mib + more)


def _runs(steps: tuple[Step, Step], config: TrainConfig) -> tuple[Step, ...]:
    """The steps that run: both, or with eval_only the one evaluation."""
    if not config.eval_only:
        return steps
    evaluation = tuple(section for section in steps[0].sections if section.ops[0].phase is Phase.EVAL)
    return (Step(steps[0].resident, evaluation),)


def _traced(own: OwnModel, config: TrainConfig, device: Device) -> _Built:
    """The user's own model, traced."""
    on_gpu = device.kind != "cpu"
    first, later = (steps.build(config, on_gpu, first, device.capability, own=own) for first in (True, False))
    found = own.at(config, on_gpu)
    facts = found.facts
    frozen = {p.name for p in facts.parameters} - {p.name for p in facts.trained}
    told = about_own_model(found, config, on_gpu)
    return _Built(facts.parameters, (first, later), told, frozenset(frozen), found.source)


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
        trainable_params=sum(p.numel for p in trained),
        params_frozen=total - sum(p.numel for p in trained),
    )


def _compute(config: TrainConfig, step: Step, traced: bool) -> Compute:
    tokens = tokens_per_step(config)
    training = [(section.times, op) for section in step.sections for op in section.ops if op.phase is not Phase.EVAL]
    executed = sum(times * op.times * op.flops for times, op in training) * config.world_size / tokens
    seen = msgspec.structs.replace(config, block_size=document_length(config) or config.block_size)
    per_token = executed if traced else params.flops_per_token(seen)
    return Compute(
        flops_per_token=per_token,
        flops_per_token_causal=executed if traced else params.flops_per_token_causal(seen),
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
