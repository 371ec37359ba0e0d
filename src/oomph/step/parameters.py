"""A model's parameters, counted without building it.

With a tied head the shared matrix appears once, under the name it is met by first (`transformer.wte.weight`).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import msgspec

from oomph.config.schema import TRANSFORMERS, TrainConfig
from oomph.step import models

_GROUPS = (  # by what a parameter's name contains, the first that fits
    (".lora_", "adapters"),
    ("wte.", "token embedding"),
    ("embed_tokens.", "token embedding"),
    ("embed_in.", "token embedding"),
    (".project_", "token embedding"),  # to the model's width, and back from it
    ("wpe.", "position embedding"),
    ("embed_positions.", "position embedding"),
    ("value_embeds.", "value embeddings"),
    ("norm", "norms"),
    (".ln_", "layer norms"),
    ("attn.", "attention"),
    ("attention.", "attention"),
    ("experts.", "experts"),
    ("mlp.gate.", "router"),
    ("mlp.", "mlp"),
    (".fc", "mlp"),
    ("lm_head.", "head"),
    ("_lambda", "scalars"),
    ("smear_gate.", "smear gate"),
)


class Parameter(msgspec.Struct, frozen=True):
    """One parameter tensor."""

    name: str
    shape: tuple[int, ...]
    decayed: bool  # nanoGPT decays tensors of two dimensions and more
    trained: bool = True

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)

    @property
    def block(self) -> int | None:
        """The transformer block it belongs to."""
        return next((int(part) for part in self.name.split(".") if part.isdigit()), None)


def parameters(config: TrainConfig) -> tuple[Parameter, ...]:
    """Every parameter tensor of the model, in the order of `named_parameters()`."""
    full = config.method == "full"
    return tuple(
        [
            Parameter(name, shape, len(shape) >= 2, full or models.is_adapter(name))
            for name, shape in models.parameters(config)
        ]
    )


def trained(config: TrainConfig) -> tuple[Parameter, ...]:
    """Those of them that are trained."""
    return tuple([parameter for parameter in parameters(config) if parameter.trained])


def count_nanogpt(config: TrainConfig) -> int:
    """How many parameters nanoGPT prints: all but the position embeddings. In closed form, for searches."""
    width, layers, bias = config.n_embd, config.n_layer, int(config.bias)
    vocabularies = 1 if config.tie_weights else 2
    vectors = layers * (2 + bias * (2 + 3 + 1 + 4 + 1)) + 1 + bias  # norms and biases, in units of the width
    return vocabularies * config.vocab_size * width + layers * 12 * width * width + vectors * width


def count_printed(config: TrainConfig) -> int:
    """How many parameters the config's program prints."""
    if config.model_type == "gpt2" and config.trainer not in TRANSFORMERS:
        return count_nanogpt(config)
    return sum(parameter.numel for parameter in parameters(config))


def by_group(found: Iterable[Parameter]) -> dict[str, int]:
    """Parameter counts by part of the model, in the order the parts are met."""
    groups: dict[str, int] = {}
    for parameter in found:
        group = _group(parameter.name)
        groups[group] = groups.get(group, 0) + parameter.numel
    return groups


def _group(name: str) -> str:
    for part, group in _GROUPS:
        if part in name:
            return group
    return "other"


def flops_per_token(config: TrainConfig) -> int:
    """6N + 12·H·Q·T for each block: forward and backward, attention counted in full; 4 of a weight that is frozen.

    N is what multiplies a token: nanoGPT counts all but the position embeddings; elsewhere tables that are only looked
    up are left out too. Of a mixture's experts those that a token visits count.
    """
    return _products(config) + 12 * _attended(config) * sum(_windows(config))


def _products(config: TrainConfig) -> int:
    """FLOPs per token of the products with weights: forward, the input's gradient, and that of a trained weight."""
    if config.model_type == "gpt2" and config.trainer not in TRANSFORMERS:
        return 6 * count_nanogpt(config)
    return sum((6 if each.trained else 4) * _visits(config, each) for each in parameters(config))


def _visits(config: TrainConfig, parameter: Parameter) -> int:
    """How many of a parameter's numbers a token is multiplied by."""
    group = _group(parameter.name)
    looked_up = group == "token embedding" and not config.tie_weights and ".project_" not in parameter.name
    if looked_up or group in ("position embedding", "value embeddings", "scalars"):
        return 0
    if group == "experts":
        return parameter.numel * (config.num_experts_per_tok or 1) // (config.num_experts or 1)
    return parameter.numel


def _attended(config: TrainConfig) -> int:
    """Heads times their size."""
    return config.n_head * (config.head_dim or config.n_embd // config.n_head)


def _windows(config: TrainConfig) -> list[int]:
    """How many tokens each block's attention is counted with."""
    return [min(config.block_size, window or config.block_size) for window in models.windows(config)]


def flops_per_token_causal(config: TrainConfig) -> int:
    """As `flops_per_token`, with attention only to the tokens before: (T + 1) / 2 of T on average."""
    return _products(config) + 6 * _attended(config) * sum(window + 1 for window in _windows(config))
