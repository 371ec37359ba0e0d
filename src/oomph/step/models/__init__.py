"""Architectures, each as implemented in a program that people run, written with `step.tensor`'s operations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from oomph.config.adapters import listed
from oomph.config.programs import TRANSFORMERS
from oomph.step.models import (
    gpt2,
    gpt2_hf,
    gpt_neox,
    litgpt,
    llama,
    lora,
    nanochat,
    opt,
    qwen,
    torchtitan,
    torchtune,
    unsloth,
)
from oomph.step.precision import Precision
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.tape import TRAINED_COPY, Module, Weight
from oomph.step.tensor.tensor import Tensor

Forward = Callable[[Module, Tensor, Tensor], tuple[Any, Tensor]]

_HOMES: dict[str, Any] = {
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "opt": opt,
    "qwen": qwen,
    "nanochat": nanochat,
} | dict.fromkeys(
    ("llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe"), llama
)
# Programs with their own models: one class for all of their families.
_OWN: dict[str, Any] = {"torchtune": torchtune, "litgpt": litgpt, "torchtitan": torchtitan}


def _home(config: Any) -> Any:
    """The module that describes a config's architecture. transformers' GPT-2 differs from nanoGPT's."""
    if config.trainer in _OWN:
        return _OWN[config.trainer]
    if config.trainer == "unsloth":  # transformers' modules and peft's adapters, run by Unsloth's own functions
        return unsloth
    if config.model_type == "gpt2" and config.trainer in TRANSFORMERS:
        return gpt2_hf
    return _HOMES[config.model_type]


def parameters(config: Any) -> Iterable[tuple[str, Shape]]:
    """Names and shapes of the model's parameters, in the order of `named_parameters()`."""
    found: Iterable[tuple[str, Shape]] = _home(config).parameters(config)
    if config.method != "full":
        found = _adapters(config).with_adapters(config, found)
    return found


def _adapters(config: Any) -> Any:
    """The module that describes a config's adapters: peft's, or the program's own."""
    return _OWN.get(config.trainer, lora)


def unknown_targets(config: Any) -> tuple[list[str], list[str]]:
    """The names in `lora_targets` that no layer of the model has, and its layers' names."""
    found: tuple[list[str], list[str]] = _adapters(config).unknown_targets(config, _home(config).parameters(config))
    return found


def unknown_modules(config: Any) -> tuple[list[str], list[str]]:
    """The names in `modules_to_save` that no module of the model has, and its modules' names."""
    modules = dict.fromkeys(name.rpartition(".")[0] for name, _ in _home(config).parameters(config))
    known = list(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    wanted = listed(config.modules_to_save)
    return [each for each in wanted if not any(f".{module}".endswith(f".{each}") for module in modules)], known


def is_trained(name: str) -> bool:
    """Whether a parameter is trained under a method with adapters: an adapter's, or that of a module trained whole."""
    return torchtune.is_adapter(name) or TRAINED_COPY in name


def weights(config: Any, precision: Precision) -> dict[str, Weight]:
    """The model's parameters as the program keeps them."""
    if precision.frozen is not None:
        kept = precision.weights, precision.frozen
        weight = _adapters(config).weight
        return {name: weight(config, name, shape, *kept) for name, shape in parameters(config)}
    is_table: Callable[[str], bool] = getattr(_home(config), "is_table", lambda _: False)
    table = precision.weights if precision.is_scaled else precision.compute  # GradScaler takes no half gradients
    return {name: Weight(shape, table if is_table(name) else precision.weights) for name, shape in parameters(config)}


def buffers(config: Any, precision: Precision) -> list[tuple[str, int]]:
    """Names and bytes of what the model keeps besides its parameters, if larger than a vector."""
    found: list[tuple[str, int]] = getattr(_home(config), "buffers", lambda *_: [])(config, precision.compute_bytes)
    return found


def forward(config: Any) -> Forward:
    """The model: a function of a module, tokens and targets that returns logits, if they are whole, and loss."""
    found: Forward = _home(config).model
    return found


def kinds(config: Any) -> list[Hashable]:
    """A key for each block; blocks with equal keys run the same operations."""
    own: Sequence[Hashable] = getattr(_home(config), "kinds", lambda c: [0] * c.n_layer)(config)
    # Then the first block's input needs no gradient, unless transformers makes it require one for checkpointing.
    frozen = config.method != "full" and not (config.checkpoint_layers and config.trainer in TRANSFORMERS)
    return [(kind, index < config.checkpoint_layers, frozen and not index) for index, kind in enumerate(own)]


def windows(config: Any) -> list[int | None]:
    """The number of tokens that each block sees in the model's own FLOP count; None: all."""
    own: Callable[[Any], list[int | None]] | None = getattr(_home(config), "windows", None)
    return [None] * config.n_layer if own is None else own(config)
