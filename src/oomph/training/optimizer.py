"""The optimizers, with nanoGPT's two groups, and their state made before the first step."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from oomph.config import TrainConfig
from oomph.errors import InputError, Problem
from oomph.training.adamw import FusedAdamW
from oomph.training.model import GPT


class Pair:
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


AnyOptimizer = FusedAdamW | torch.optim.Optimizer | Pair


def make_optimizer(model: GPT, config: TrainConfig) -> AnyOptimizer:
    """The optimizer of a settled config, its state in place: a step allocates nothing that lasts."""
    optimizer = _make(model, config)
    if not isinstance(optimizer, FusedAdamW):
        rehearse(optimizer, model.parameters())
    return optimizer


def _make(model: GPT, config: TrainConfig) -> AnyOptimizer:
    name, rate = config.optimizer, config.learning_rate
    if name == "muon":
        hidden = [p for n, p in model.named_parameters() if ".h." in n and p.dim() >= 2]
        ids = {id(p) for p in hidden}
        rest = [p for p in model.parameters() if id(p) not in ids]
        muon = torch.optim.Muon(hidden, lr=rate, weight_decay=config.weight_decay)
        return Pair(muon, _adamw(groups(rest, config), config))
    both = groups(model.parameters(), config)
    if name == "adamw" and config.optimizer_loop == "fused":
        return FusedAdamW(both, config.learning_rate, (config.beta1, config.beta2))
    if name == "adamw":
        return _adamw(both, config)
    if name == "sgd":
        return torch.optim.SGD(both, lr=rate, momentum=config.beta1, **_loop(config))
    if name == "adafactor":
        return torch.optim.Adafactor(both, lr=rate, foreach=config.optimizer_loop == "foreach")
    return _adamw8bit(both, config)


def groups(parameters: Iterable[nn.Parameter], config: TrainConfig) -> list[dict[str, Any]]:
    """nanoGPT's: matrices decay, vectors do not."""
    everything = list(parameters)
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
            Problem("optimizer", "adamw8bit needs torchao", allowed="after: pip install torchao; or --optimizer=adamw")
        ) from None
    optimizer: torch.optim.Optimizer = make(both, lr=config.learning_rate, betas=(config.beta1, config.beta2))
    return optimizer


def rehearse(optimizer: AnyOptimizer, parameters: Iterable[nn.Parameter]) -> None:
    """One step with no gradient, rate or decay: it makes all state and changes no weight. Its count is taken back."""
    settings = [(float(group["lr"]), group["weight_decay"]) for group in optimizer.param_groups]
    set_rate(optimizer, 0.0)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0  # SGD adds it to the gradients, and so to its momentum
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, (rate, decay) in zip(optimizer.param_groups, settings, strict=True):
        _set(group, rate)
        group["weight_decay"] = decay
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):  # torch.optim counts in tensors, torchao too
            state["step"].zero_()


def saved_state(optimizer: AnyOptimizer) -> dict[str, Any]:
    """`state_dict()` of plain tensors: one that is made of several, as torchao's of 8 bits are, as a table of those.

    A checkpoint is then read without the library that made it, and holds nothing that would have to be trusted.
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
    """The saved state with tables put back into the tensors that the optimizer has made for itself."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = {}
    for number, entry in saved.items():
        mine = optimizer.state[parameters[number]]
        found[number] = {
            name: _filled(mine[name], value) if isinstance(value, dict) else value for name, value in entry.items()
        }
    return found


def _filled(made: Tensor, parts: dict[str, Tensor]) -> Tensor:
    for name, part in parts.items():
        getattr(made, name).copy_(part)
    return made


def load_optimizer(optimizer: AnyOptimizer, saved: dict[str, Any]) -> None:
    """Take over the moments and counts; rates, decays and betas stay those of the config.

    Raises `ValueError` where the state is another model's or another optimizer's.
    """
    if isinstance(optimizer, Pair):
        for part, theirs in zip(optimizer.parts, saved["parts"], strict=True):
            load_optimizer(part, theirs)
        return
    if isinstance(optimizer, FusedAdamW):
        optimizer.load_state_dict(saved)
        return
    if len(saved["param_groups"]) != len(optimizer.param_groups):
        raise ValueError(f"{len(saved['param_groups'])} groups of weights for {len(optimizer.param_groups)}")
    both = zip(saved["param_groups"], optimizer.param_groups, strict=True)
    merged = [{**group, "params": theirs["params"]} for theirs, group in both]
    before = _shapes(optimizer)
    optimizer.load_state_dict({"state": _unpacked(optimizer, saved["state"]), "param_groups": merged})
    if saved["state"] and _shapes(optimizer) != before:  # nanoGPT's first checkpoint may come before any step
        raise ValueError("other tensors, or tensors of other shapes")
    if not saved["state"]:
        rehearse(optimizer, [p for group in optimizer.param_groups for p in group["params"]])


def _shapes(optimizer: torch.optim.Optimizer) -> list[dict[str, tuple[int, ...]]]:
    """What is kept for each tensor, in the tensors' order."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        {name: tuple(value.shape) for name, value in optimizer.state.get(p, {}).items() if isinstance(value, Tensor)}
        for p in parameters
    ]


def set_rate(optimizer: AnyOptimizer, rate: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        _set(group, rate)


def _set(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):  # torchao's, which compiles its step
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def clip_and_step(optimizer: AnyOptimizer, gradients: list[Tensor], norm: Tensor, divide: bool, limit: float) -> None:
    """Update the weights; where `divide`, with gradients scaled down to the limit as clip_grad_norm_ scales them."""
    norm = norm.float()  # of bfloat16 gradients it is bfloat16, which the fused kernel does not take
    if not divide:
        optimizer.step()
    elif isinstance(optimizer, FusedAdamW):
        optimizer.step(divisor=(norm + 1e-6) / limit)
    else:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))
        optimizer.step()
