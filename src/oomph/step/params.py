"""The parameters of a nanoGPT model, counted without building it.

Names, shapes and order are those of nanoGPT's `named_parameters()`: with a tied head the shared matrix appears
once, under the name it is met by first (`transformer.wte.weight`).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import msgspec

from oomph.config.schema import TrainConfig

_GROUPS = (
    (".wte.", "token embedding"),
    (".wpe.", "position embedding"),
    (".attn.", "attention"),
    (".mlp.", "mlp"),
    (".ln_", "layer norms"),
    ("lm_head.", "head"),
)


class Parameter(msgspec.Struct, frozen=True):
    """One parameter tensor."""

    name: str
    shape: tuple[int, ...]
    decayed: bool  # nanoGPT decays tensors of two dimensions and more

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)

    @property
    def block(self) -> int | None:
        """The transformer block it belongs to."""
        _, _, rest = self.name.partition(".h.")
        return int(rest.partition(".")[0]) if rest else None


def _parameter(name: str, *shape: int) -> Parameter:
    return Parameter(name, shape, len(shape) >= 2)


def _layer_norm(name: str, width: int, bias: bool) -> Iterable[Parameter]:
    yield _parameter(f"{name}.weight", width)
    if bias:
        yield _parameter(f"{name}.bias", width)


def _linear(name: str, width_in: int, width_out: int, bias: bool) -> Iterable[Parameter]:
    yield _parameter(f"{name}.weight", width_out, width_in)
    if bias:
        yield _parameter(f"{name}.bias", width_out)


def _block(index: int, width: int, bias: bool) -> Iterable[Parameter]:
    name = f"transformer.h.{index}"
    yield from _layer_norm(f"{name}.ln_1", width, bias)
    yield from _linear(f"{name}.attn.c_attn", width, 3 * width, bias)
    yield from _linear(f"{name}.attn.c_proj", width, width, bias)
    yield from _layer_norm(f"{name}.ln_2", width, bias)
    yield from _linear(f"{name}.mlp.c_fc", width, 4 * width, bias)
    yield from _linear(f"{name}.mlp.c_proj", 4 * width, width, bias)


def parameters(config: TrainConfig) -> tuple[Parameter, ...]:
    """Every parameter tensor of the model, in nanoGPT's order."""
    width = config.n_embd
    found = [
        _parameter("transformer.wte.weight", config.vocab_size, width),
        _parameter("transformer.wpe.weight", config.block_size, width),
    ]
    for index in range(config.n_layer):
        found.extend(_block(index, width, config.bias))
    found.extend(_layer_norm("transformer.ln_f", width, config.bias))
    if not config.tie_weights:
        found.append(_parameter("lm_head.weight", config.vocab_size, width))
    return tuple(found)


def count_nanogpt(config: TrainConfig) -> int:
    """How many parameters nanoGPT prints: all but the position embeddings. In closed form, for searches."""
    width, layers, bias = config.n_embd, config.n_layer, int(config.bias)
    vocabularies = 1 if config.tie_weights else 2
    vectors = layers * (2 + bias * (2 + 3 + 1 + 4 + 1)) + 1 + bias  # norms and biases, in units of the width
    return vocabularies * config.vocab_size * width + layers * 12 * width * width + vectors * width


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
    """nanoGPT's 6N + 12·L·H·Q·T: forward and backward, attention counted in full, N without position embeddings."""
    attention = 12 * config.n_layer * config.n_embd * config.block_size
    return 6 * count_nanogpt(config) + attention


def flops_per_token_causal(config: TrainConfig) -> int:
    """As `flops_per_token`, with attention only to the tokens before: (T + 1) / 2 of T on average."""
    attention = 6 * config.n_layer * config.n_embd * (config.block_size + 1)
    return 6 * count_nanogpt(config) + attention
