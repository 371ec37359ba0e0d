"""A model's parameters, counted without building it.

With a tied head the shared matrix appears once, under its first name (`transformer.wte.weight`).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import msgspec

from oomph.config.programs import TRANSFORMERS
from oomph.config.schema import TrainConfig
from oomph.config.shape import head_size, inner_size, qkv_widths
from oomph.step import models

_GROUPS = (  # by part of the parameter's name; the first match counts
    (".lora_", "adapters"),
    (".magnitude", "adapters"),
    ("tok_embeddings.", "token embedding"),
    ("wte.", "token embedding"),
    ("embed_tokens.", "token embedding"),
    ("embed_in.", "token embedding"),
    (".project_", "token embedding"),  # to the model's width and back
    ("tok_embeddings.", "token embedding"),
    ("wpe.", "position embedding"),
    ("embed_positions.", "position embedding"),
    ("value_embeds.", "value embeddings"),
    ("norm", "norms"),
    (".ln_", "layer norms"),
    ("attn.", "attention"),
    ("attention.", "attention"),
    ("experts.", "experts"),
    ("mlp.gate.", "router"),
    ("block_sparse_moe.gate.", "router"),
    ("mlp.", "mlp"),
    (".fc", "mlp"),
    ("feed_forward.", "mlp"),
    ("lm_head.", "head"),
    ("output.", "head"),
    ("_lambda", "scalars"),
    ("smear_gate.", "smear gate"),
)


class Parameter(msgspec.Struct, frozen=True):
    """One parameter tensor."""

    name: str
    shape: tuple[int, ...]
    decayed: bool  # nanoGPT decays tensors of two or more dimensions
    trained: bool = True

    @property
    def numel(self) -> int:
        """The number of elements."""
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
            Parameter(name, shape, len(shape) >= 2, full or models.is_trained(name))
            for name, shape in models.parameters(config)
        ]
    )


def trained(config: TrainConfig) -> tuple[Parameter, ...]:
    """The parameters that are trained."""
    return tuple([parameter for parameter in parameters(config) if parameter.trained])


def count_nanogpt(config: TrainConfig) -> int:
    """The number of parameters that nanoGPT prints: all but the position embeddings. In closed form, for searches."""
    width, inner, widths = config.n_embd, inner_size(config), qkv_widths(config)
    bias, norm_bias = int(config.bias), int(config.bias and config.norm_type == "layernorm")
    up = (2 if config.is_gated_act else 1) * inner
    matrices = (sum(widths) + widths[0] + up + inner) * width
    vectors = 2 * (1 + norm_bias) * width + bias * (sum(widths) + up + 2 * width)
    vectors += 2 * head_size(config) if config.use_qk_norm else 0
    vocabularies = 1 if config.tie_weights else 2
    rest = vocabularies * config.vocab_size * width + (1 + norm_bias) * width
    return rest + config.n_layer * (matrices + vectors)


def count_printed(config: TrainConfig) -> int:
    """The number of parameters that the config's program prints."""
    if config.model_type == "gpt2" and config.trainer not in TRANSFORMERS:
        return count_nanogpt(config)
    return sum(parameter.numel for parameter in parameters(config))


def by_group(found: Iterable[Parameter]) -> dict[str, int]:
    """Parameter counts by part of the model, in the order the parts appear."""
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
    """6N + 12·H·Q·T for each block: forward and backward, attention counted in full; 4 per frozen weight.

    N counts the weights a token is multiplied by: for nanoGPT all but the position embeddings; elsewhere tables that
    are only looked up are left out too. Of a mixture's experts only those that a token visits count.
    """
    return _products(config) + 12 * _attended(config) * sum(_windows(config))


def _products(config: TrainConfig) -> int:
    """FLOPs per token of the products with weights: forward, the input's gradient, and that of a trained weight."""
    if config.model_type == "gpt2" and config.trainer not in TRANSFORMERS:
        return 6 * count_nanogpt(config)
    return sum((6 if each.trained else 4) * _visits(config, each) for each in parameters(config))


def _visits(config: TrainConfig, parameter: Parameter) -> int:
    """How many of a parameter's elements a token is multiplied by."""
    group = _group(parameter.name)
    looked_up = group == "token embedding" and not config.tie_weights and ".project_" not in parameter.name
    if looked_up or group in ("position embedding", "value embeddings", "scalars"):
        return 0
    if group == "experts":
        return parameter.numel * (config.num_experts_per_tok or 1) // (config.num_experts or 1)
    return parameter.numel


def _attended(config: TrainConfig) -> int:
    """The number of heads times their size."""
    return config.n_head * (config.head_dim or config.n_embd // config.n_head)


def _windows(config: TrainConfig) -> list[int]:
    """The number of tokens that each block's attention is counted with."""
    return [min(config.block_size, window or config.block_size) for window in models.windows(config)]


def flops_per_token_causal(config: TrainConfig) -> int:
    """Like `flops_per_token`, but with attention only to earlier tokens: (T + 1) / 2 of T on average."""
    return _products(config) + 6 * _attended(config) * sum(window + 1 for window in _windows(config))
