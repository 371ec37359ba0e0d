"""Architectures, each as the program that people run, written on `step.tensor`'s operations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from oomph.config.schema import TRANSFORMERS
from oomph.step.models import gpt2, gpt2_hf, gpt_neox, llama, lora, nanochat, opt
from oomph.step.precision import Precision
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.tape import Module, Weight
from oomph.step.tensor.tensor import Tensor

Forward = Callable[[Module, Tensor, Tensor], tuple[Tensor | None, Tensor]]

_HOMES: dict[str, Any] = {"gpt2": gpt2, "gpt_neox": gpt_neox, "opt": opt, "nanochat": nanochat} | dict.fromkeys(
    ("llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe"), llama
)


def _home(config: Any) -> Any:
    """The module that describes a config's architecture. GPT-2 is another program in transformers than in nanoGPT."""
    if config.model_type == "gpt2" and config.trainer in TRANSFORMERS:
        return gpt2_hf
    return _HOMES[config.model_type]


def parameters(config: Any) -> Iterable[tuple[str, Shape]]:
    """Names and shapes of the model's parameters, in the order of `named_parameters()`."""
    found: Iterable[tuple[str, Shape]] = _home(config).parameters(config)
    return found if config.method == "full" else lora.with_adapters(config, found)


def unknown_targets(config: Any) -> tuple[list[str], list[str]]:
    """The names in `lora_targets` that no layer of the model has, and those that its layers have."""
    return lora.unknown_targets(config, _home(config).parameters(config))


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's."""
    return lora.ADAPTER in name


def weights(config: Any, precision: Precision) -> dict[str, Weight]:
    """The model's parameters as the program keeps them."""
    if precision.frozen is not None:
        kept = precision.weights, precision.frozen
        return {name: lora.weight(config, name, shape, *kept) for name, shape in parameters(config)}
    is_table: Callable[[str], bool] = getattr(_home(config), "is_table", lambda _: False)
    table = precision.weights if precision.is_scaled else precision.compute  # a GradScaler takes no half gradients
    return {name: Weight(shape, table if is_table(name) else precision.weights) for name, shape in parameters(config)}


def buffers(config: Any, precision: Precision) -> list[tuple[str, int]]:
    """Names and bytes of what the model keeps beside its parameters, where that is more than a vector."""
    found: list[tuple[str, int]] = getattr(_home(config), "buffers", lambda *_: [])(config, precision.compute_bytes)
    return found


def forward(config: Any) -> Forward:
    """The model: a function of a module, tokens and targets that returns logits, where they are whole, and loss."""
    found: Forward = _home(config).model
    return found


def kinds(config: Any) -> list[Hashable]:
    """What tells a model's blocks apart, block by block."""
    own: Sequence[Hashable] = getattr(_home(config), "kinds", lambda c: [0] * c.n_layer)(config)
    frozen = config.method != "full" and not config.checkpoint_layers  # then the first block's input has no gradient
    return [(kind, index < config.checkpoint_layers, frozen and not index) for index, kind in enumerate(own)]


def windows(config: Any) -> list[int | None]:
    """How many tokens the model's own count of its arithmetic lets each block see; None: all."""
    own: Callable[[Any], list[int | None]] | None = getattr(_home(config), "windows", None)
    return [None] * config.n_layer if own is None else own(config)
