"""The learning rate schedule and the optimizers: nanoGPT's two groups, state allocated before the first step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from oomph.config import TrainConfig
from oomph.errors import InputError, Problem
from oomph.training.model import GPT


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of a step, counted from 0: nanoGPT's linear warm-up, then a cosine down to `min_lr`.

    `warmup_stable_decay` stays level after the warm-up, and then falls to `min_lr` in a straight line.
    """
    if not config.decay_lr:
        return config.learning_rate
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if step >= config.lr_decay_iters:
        return config.min_lr
    if config.lr_scheduler_type == "warmup_stable_decay":
        left = (config.lr_decay_iters - step) / (config.warmdown_ratio * config.lr_decay_iters)
        return config.min_lr + min(1.0, left) * (config.learning_rate - config.min_lr)
    done = (step - config.warmup_iters) / (config.lr_decay_iters - config.warmup_iters)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (config.learning_rate - config.min_lr)


_EPSILON = 1e-8


class FusedAdamW:
    """torch's fused AdamW kernel, called directly: torch.optim.AdamW's state and arithmetic without its import.

    Making a torch.optim optimizer imports torch.compile's machinery, which takes two seconds and 72 MiB. Names and form
    of the state are torch.optim's, so that checkpoints work in nanoGPT too.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        self.param_groups = [{**group, "lr": lr, "betas": betas, "eps": _EPSILON} for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = {
            parameter: {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            for parameter in self._parameters()
        }

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, divisor: Tensor | None = None) -> None:
        """Update the weights. Gradients are first divided by `divisor`, in the same kernel."""
        for group in self.param_groups:
            learning = [parameter for parameter in group["params"] if parameter.grad is not None]
            steps = [self.state[parameter]["step"] for parameter in learning]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                learning,
                [parameter.grad for parameter in learning],
                [self.state[parameter]["exp_avg"] for parameter in learning],
                [self.state[parameter]["exp_avg_sq"] for parameter in learning],
                [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
            )

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter in self._parameters():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The state in torch.optim.AdamW's format: parameters by number."""
        numbers = {parameter: number for number, parameter in enumerate(self._parameters())}
        return {
            "state": {numbers[parameter]: dict(state) for parameter, state in self.state.items()},
            "param_groups": [
                {**group, "params": [numbers[parameter] for parameter in group["params"]]}
                for group in self.param_groups
            ],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the moments and step counts. Raises `ValueError` if they are another model's."""
        parameters = self._parameters()
        if len(saved["state"]) not in (
            0,
            len(parameters),
        ):  # nanoGPT's first checkpoint may be from before the first step
            raise ValueError(f"state of {len(saved['state'])} tensors instead of {len(parameters)}")
        for number, entry in saved["state"].items():
            mine = self.state[parameters[number]]
            for name in mine:
                if entry[name].shape != mine[name].shape:
                    raise ValueError(f"tensor {number} has the shape {tuple(entry[name].shape)}")
                mine[name].copy_(entry[name])


class OptimizerPair:
    """Two optimizers that step together: Muon for the blocks' matrices, AdamW for the rest."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}


AnyOptimizer = FusedAdamW | torch.optim.Optimizer | OptimizerPair


def make_optimizer(model: GPT, config: TrainConfig, parts: Sequence[nn.Parameter] | None = None) -> AnyOptimizer:
    """The optimizer of a settled config, with its state allocated: a step allocates nothing that stays.

    `parts`: this process's shards of the model's parameters, in order, if it does not have all of them.
    """
    parameters = [p for p in model.parameters() if p.requires_grad] if parts is None else parts
    if config.optimizer == "adamw" and config.optimizer_loop == "fused":
        return FusedAdamW(groups(parameters, config), config.learning_rate, (config.beta1, config.beta2))
    optimizer = torch_optimizer(model, config, parts)
    allocate_state(optimizer, parameters)
    return optimizer


def torch_optimizer(
    model: nn.Module, config: TrainConfig, parts: Sequence[nn.Parameter] | None = None
) -> torch.optim.Optimizer | OptimizerPair:
    """torch.optim's optimizer of a settled config, or torchao's: its state is allocated in the first step."""
    name, rate = config.optimizer, config.learning_rate
    if name == "muon":
        hidden = [p for n, p in model.named_parameters() if p.dim() == 2 and any(map(str.isdigit, n.split(".")))]
        ids = {id(p) for p in hidden}
        rest = [p for p in model.parameters() if id(p) not in ids]
        return OptimizerPair(_muon(hidden, config), _adamw(groups(rest, config), config))
    both = groups(model.parameters() if parts is None else parts, config)
    if name == "adamw":
        return _adamw(both, config)
    if name == "sgd":
        return torch.optim.SGD(both, lr=rate, momentum=config.beta1, **_loop(config))
    if name == "adafactor":
        return torch.optim.Adafactor(both, lr=rate, foreach=config.optimizer_loop == "foreach")
    return _adamw8bit(both, config)


def _muon(matrices: list[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """Muon with its own learning rate, or with updates as large as AdamW's, so that AdamW's rate works."""
    if config.matrix_lr is None:
        return torch.optim.Muon(
            matrices, lr=config.learning_rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
    group = {"params": matrices, _RATIO: _ratio(config.matrix_lr, config)}
    return torch.optim.Muon([group], lr=config.matrix_lr, weight_decay=config.weight_decay, adjust_lr_fn="original")


_RATIO = "lr_ratio"  # of a group's learning rate to the config's, if they differ


def _ratio(rate: float, config: TrainConfig) -> float:
    return rate / config.learning_rate if config.learning_rate else 1.0


def groups(parameters: Iterable[nn.Parameter], config: TrainConfig) -> list[dict[str, Any]]:
    """nanoGPT's parameter groups: matrices decay, vectors do not. A plain loop has one, which decays."""
    everything = [parameter for parameter in parameters if parameter.requires_grad]
    if config.trainer == "torch":
        return [{"params": everything, "weight_decay": config.weight_decay}]
    both = [
        {"params": [p for p in everything if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in everything if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in both if group["params"]]


def _loop(config: TrainConfig) -> dict[str, bool]:
    return {"fused": config.optimizer_loop == "fused", "foreach": config.optimizer_loop == "foreach"}


def _adamw(both: list[dict[str, Any]], config: TrainConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(both, lr=config.learning_rate, betas=(config.beta1, config.beta2), **_loop(config))


def _adamw8bit(both: list[dict[str, Any]], config: TrainConfig) -> torch.optim.Optimizer:
    try:
        make = import_module("torchao.optim").AdamW8bit
    except ImportError:
        raise InputError(
            Problem("optimizer", "adamw8bit needs torchao; try: pip install torchao", allowed="--optimizer=adamw")
        ) from None
    optimizer: torch.optim.Optimizer = make(both, lr=config.learning_rate, betas=(config.beta1, config.beta2))
    return optimizer


def allocate_state(optimizer: AnyOptimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Allocate all state by a step with zero gradients, learning rate and decay, which changes no weight."""
    settings = [(float(group["lr"]), group["weight_decay"]) for group in optimizer.param_groups]
    set_learning_rate(optimizer, 0.0)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0  # SGD adds it to the gradients and so to its momentum
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, (rate, decay) in zip(optimizer.param_groups, settings, strict=True):
        _set(group, rate)
        group["weight_decay"] = decay
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):  # torch.optim and torchao count steps in tensors
            state["step"].zero_()


def saved_state(optimizer: AnyOptimizer) -> dict[str, Any]:
    """`state_dict()` as plain tensors: a tensor subclass, such as torchao's 8-bit ones, becomes a dict of its parts.

    So a checkpoint can be read without the library that made it, and without executing code.
    """
    packed: dict[str, Any] = _packed(optimizer.state_dict())
    return packed


def _packed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _packed(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_packed(each) for each in value]
    if is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        return {name: getattr(value, name) for name in names}
    return value


def _unpacked(optimizer: torch.optim.Optimizer, saved: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The saved state, its tensors and dicts of parts copied into the optimizer's own: the file may be mapped."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = {}
    for number, entry in saved.items():
        mine = optimizer.state[parameters[number]]
        found[number] = {
            name: _filled(mine[name], value) if isinstance(value, dict | Tensor) else value
            for name, value in entry.items()
        }
    return found


def _filled(made: Tensor, saved: Tensor | dict[str, Tensor]) -> Tensor:
    if isinstance(saved, dict):
        for name, part in saved.items():
            getattr(made, name).copy_(part)
    elif made.shape != saved.shape:
        raise ValueError(f"shape {tuple(saved.shape)} instead of {tuple(made.shape)}")
    else:
        made.copy_(saved)
    return made


def load_optimizer(optimizer: AnyOptimizer, saved: dict[str, Any]) -> None:
    """Load the moments and step counts; learning rates, decays and betas stay as in the config.

    Raises `ValueError` if the state is another model's or another optimizer's.
    """
    if isinstance(optimizer, OptimizerPair):
        for part, theirs in zip(optimizer.parts, saved["parts"], strict=True):
            load_optimizer(part, theirs)
        return
    if isinstance(optimizer, FusedAdamW):
        optimizer.load_state_dict(saved)
        return
    if len(saved["param_groups"]) != len(optimizer.param_groups):
        raise ValueError(f"{len(saved['param_groups'])} parameter groups instead of {len(optimizer.param_groups)}")
    both = zip(saved["param_groups"], optimizer.param_groups, strict=True)
    merged = [{**group, "params": theirs["params"]} for theirs, group in both]
    before = _shapes(optimizer)
    optimizer.load_state_dict({"state": _unpacked(optimizer, saved["state"]), "param_groups": merged})
    if saved["state"] and _shapes(optimizer) != before:  # nanoGPT's first checkpoint may be from before the first step
        raise ValueError("different tensors or shapes")
    if not saved["state"]:
        allocate_state(optimizer, [p for group in optimizer.param_groups for p in group["params"]])


def _shapes(optimizer: torch.optim.Optimizer) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of each parameter's state, in order."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        {name: tuple(value.shape) for name, value in optimizer.state.get(p, {}).items() if isinstance(value, Tensor)}
        for p in parameters
    ]


def set_learning_rate(optimizer: AnyOptimizer, rate: float) -> None:
    """Set the learning rate of the next step; groups with their own rate change in proportion."""
    for group in optimizer.param_groups:
        _set(group, rate * group.get(_RATIO, 1.0))


def _set(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):  # torchao's, whose step is compiled
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def clip_and_step(optimizer: AnyOptimizer, gradients: list[Tensor], norm: Tensor, divide: bool, limit: float) -> None:
    """Update the weights; if `divide`, with gradients scaled down to the limit as clip_grad_norm_ does."""
    norm = norm.float()  # the norm of bfloat16 gradients is bfloat16, which the fused kernel does not take
    if not divide:
        optimizer.step()
    elif isinstance(optimizer, FusedAdamW):
        optimizer.step(divisor=(norm + 1e-6) / limit)
    else:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))
        optimizer.step()
