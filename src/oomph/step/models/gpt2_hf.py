"""transformers' GPT-2 (5.22): linear layers as Conv1D, gelu_new in several passes, dropout in its own places."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from oomph.config.programs import release
from oomph.step.models.common import (
    attention_interface,
    causal_lm,
    causal_mask,
    heads,
    positions,
    remembered,
    run_layer,
)
from oomph.step.models.lora import conv1d, require_grads
from oomph.step.tensor.elementwise import activate, add, dropout
from oomph.step.tensor.indexing import embedding
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.norms import layer_norm
from oomph.step.tensor.tape import Module, forward
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import contiguous, reshape, split

MASKLESS_SINCE = (5, 2)  # the transformers release from which blocks have no mask buffer


def parameters(c: Any) -> Iterator[tuple[str, Shape]]:
    """Names and shapes in the order of `named_parameters()`. A tied head is left out."""
    width, inner = c.n_embd, c.intermediate_size or 4 * c.n_embd
    yield "transformer.wte.weight", (c.vocab_size, width)
    yield "transformer.wpe.weight", (c.max_position_embeddings or c.block_size, width)
    for index in range(c.n_layer):
        block = f"transformer.h.{index}"
        yield from _biased(f"{block}.ln_1", (width,))
        yield from _biased(f"{block}.attn.c_attn", (width, 3 * width))
        yield from _biased(f"{block}.attn.c_proj", (width, width))
        yield from _biased(f"{block}.ln_2", (width,))
        yield from _biased(f"{block}.mlp.c_fc", (width, inner))
        yield from _biased(f"{block}.mlp.c_proj", (inner, width))
    yield from _biased("transformer.ln_f", (width,))
    if not c.tie_weights:
        yield "lm_head.weight", (c.vocab_size, width)


def buffers(c: Any, _compute_bytes: int) -> list[tuple[str, int]]:
    """Before 5.2, each block's boolean causal mask, though only eager attention read it."""
    if release(c.transformers_version) >= MASKLESS_SINCE:
        return []
    size = (c.max_position_embeddings or c.block_size) ** 2
    return [(f"transformer.h.{index}.attn.bias", size) for index in range(c.n_layer)]


def _biased(name: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[-1:]


@forward
def model(m: Module, ids: Tensor, labels: Tensor) -> tuple[Tensor | None, Tensor]:
    """GPT2LMHeadModel.forward: logits and loss."""
    return causal_lm(m, decoder(m / "transformer", ids), labels, "transformer.wte")


@forward
def decoder(m: Module, ids: Tensor) -> Tensor:
    """GPT2Model.forward, which holds both embeddings until it returns."""
    c, tape = m.config, m.tape
    batch, tokens = ids.shape
    inputs_embeds = require_grads(m, embedding(m / "wte", ids))
    position_ids = positions(tape, tokens)
    position_embeds = embedding(m / "wpe", position_ids)
    hidden_states = add(inputs_embeds, position_embeds)
    mask = causal_mask(c, tape, batch, tokens, inputs_embeds.dtype, False)
    hidden_states = dropout(hidden_states, c.dropout)
    for index in tape.layers:
        tape.block = index
        run = partial(block, m / "h" / index, mask=mask)
        hidden_states = run_layer(c, tape, run, hidden_states, position_ids)
    tape.block = None
    return layer_norm(m / "ln_f", hidden_states)


@forward
def block(m: Module, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
    """GPT2Block.forward."""
    residual = hidden_states
    hidden_states = layer_norm(m / "ln_1", hidden_states)
    attn_output = attention(m / "attn", hidden_states, mask)
    hidden_states = add(attn_output, residual)
    residual = hidden_states
    hidden_states = layer_norm(m / "ln_2", hidden_states)
    feed_forward_hidden_states = mlp(m / "mlp", hidden_states)
    return add(residual, feed_forward_hidden_states)


@forward
def attention(m: Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """GPT2Attention.forward."""
    width = x.shape[-1]
    size = width // m.config.n_head
    query, key, value = split(conv1d(m / "c_attn", x), [width] * 3)
    key = heads(key, size)
    value = heads(value, size)
    query = heads(query, size)
    key, value = remembered(m, key, value)
    attn_output, _ = attention_interface(m, query, key, value, mask)
    attn_output = contiguous(reshape(attn_output, *x.shape))
    attn_output = conv1d(m / "c_proj", attn_output)
    return dropout(attn_output, m.config.dropout)


@forward
def mlp(m: Module, hidden_states: Tensor) -> Tensor:
    """GPT2MLP.forward."""
    hidden_states = conv1d(m / "c_fc", hidden_states)
    hidden_states = activate(hidden_states, m.config.hidden_act)
    hidden_states = conv1d(m / "c_proj", hidden_states)
    return dropout(hidden_states, m.config.dropout)
