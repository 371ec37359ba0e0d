"""transformers' OPT (5.22). The 350M model has its norms after attention and MLP, and narrower embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from oomph.step.models.common import (
    attention_interface,
    causal_lm,
    causal_mask,
    heads,
    remembered,
    run_layer,
    with_bias,
)
from oomph.step.models.lora import linear, require_grads
from oomph.step.ops import Kind
from oomph.step.tensor.elementwise import activate, add, dropout, scale
from oomph.step.tensor.indexing import embedding
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.norms import layer_norm
from oomph.step.tensor.tape import Module, Tape, forward
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import contiguous, reshape

_OFFSET = 2  # unused rows of the position table


def _narrow(c: Any) -> int:
    """The width of the token embedding."""
    return int(c.word_embed_proj_dim or c.n_embd)


def parameters(c: Any) -> Iterator[tuple[str, Shape]]:
    """Names and shapes in the order of `named_parameters()`. A tied head is left out."""
    width, inner, decoder = c.n_embd, c.intermediate_size or 4 * c.n_embd, "model.decoder"
    yield f"{decoder}.embed_tokens.weight", (c.vocab_size, _narrow(c))
    yield f"{decoder}.embed_positions.weight", ((c.max_position_embeddings or c.block_size) + _OFFSET, width)
    if _narrow(c) != width:
        yield f"{decoder}.project_out.weight", (_narrow(c), width)
        yield f"{decoder}.project_in.weight", (width, _narrow(c))
    if c.do_layer_norm_before:
        yield from with_bias(f"{decoder}.final_layer_norm", (width,))
    for index in range(c.n_layer):
        layer = f"{decoder}.layers.{index}"
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from with_bias(f"{layer}.self_attn.{name}", (width, width), c.bias)
        yield from with_bias(f"{layer}.self_attn_layer_norm", (width,))
        yield from with_bias(f"{layer}.fc1", (inner, width), c.bias)
        yield from with_bias(f"{layer}.fc2", (width, inner), c.bias)
        yield from with_bias(f"{layer}.final_layer_norm", (width,))
    if not c.tie_weights:
        yield "lm_head.weight", (c.vocab_size, _narrow(c))


@forward
def model(m: Module, ids: Tensor, labels: Tensor) -> tuple[Tensor | None, Tensor]:
    """OPTForCausalLM.forward: logits and loss."""
    return causal_lm(m, decoder(m / "model.decoder", ids), labels, "model.decoder.embed_tokens")


@forward
def decoder(m: Module, ids: Tensor) -> Tensor:
    """OPTDecoder.forward, which holds its embeddings and positions until it returns."""
    c, tape, (batch, tokens) = m.config, m.tape, ids.shape
    inputs_embeds = require_grads(m, embedding(m / "embed_tokens", ids))
    position_attention_mask, position_ids = _positions(tape, batch, tokens)
    mask = causal_mask(c, tape, batch, tokens, inputs_embeds.dtype, False, packed=False)
    pos_embeds = _embed_positions(m / "embed_positions", position_ids)
    if _narrow(c) != c.n_embd:
        inputs_embeds = linear(m / "project_in", inputs_embeds)
    hidden_states = add(inputs_embeds, pos_embeds)
    for index in tape.layers:
        tape.block = index
        run = partial(block, m / "layers" / index, mask=mask)
        hidden_states = run_layer(c, tape, run, hidden_states, position_ids)
    tape.block = None
    if c.do_layer_norm_before:
        hidden_states = layer_norm(m / "final_layer_norm", hidden_states)
    if _narrow(c) != c.n_embd:
        hidden_states = linear(m / "project_out", hidden_states)
    del position_attention_mask
    return hidden_states


def _positions(tape: Tape, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """A mask of ones, and the positions from its running sum."""

    def made(dtype: str, *reads: Tensor) -> Tensor:
        return tape.made("positions", (batch, tokens), dtype, reads, Kind.INPUTS)

    mask = made("float32")
    position_ids = made("float32", mask)
    masked = made("float32", position_ids, mask)
    shifted = made("float32", masked)
    del masked
    position_ids = made("int64", shifted)
    del shifted
    return mask, position_ids


@forward
def _embed_positions(m: Module, position_ids: Tensor) -> Tensor:
    """OPTLearnedPositionalEmbedding.forward."""
    shifted = m.tape.made("positions", position_ids.shape, "int64", (position_ids,), Kind.INPUTS)
    return embedding(m, shifted)


@forward
def block(m: Module, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
    """OPTDecoderLayer.forward: the MLP runs on flattened tokens."""
    c = m.config
    shape, before = hidden_states.shape, c.do_layer_norm_before
    residual = hidden_states
    if before:
        hidden_states = layer_norm(m / "self_attn_layer_norm", hidden_states)
    hidden_states = attention(m / "self_attn", hidden_states, mask)
    hidden_states = dropout(hidden_states, c.dropout)
    hidden_states = add(residual, hidden_states)
    if not before:
        hidden_states = layer_norm(m / "self_attn_layer_norm", hidden_states)
    hidden_states = reshape(hidden_states, shape[0] * shape[1], shape[2])
    residual = hidden_states
    if before:
        hidden_states = layer_norm(m / "final_layer_norm", hidden_states)
    hidden_states = linear(m / "fc1", hidden_states)
    hidden_states = activate(hidden_states, c.hidden_act)
    hidden_states = linear(m / "fc2", hidden_states)
    hidden_states = dropout(hidden_states, c.dropout)
    hidden_states = reshape(add(residual, hidden_states), *shape)
    return hidden_states if before else layer_norm(m / "final_layer_norm", hidden_states)


@forward
def attention(m: Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """OPTAttention.forward, which scales the queries itself."""
    size = x.shape[-1] // m.config.n_head
    query_states = heads(scale(linear(m / "q_proj", x)), size)
    key_states = linear(m / "k_proj", x)
    value_states = linear(m / "v_proj", x)
    key_states = heads(key_states, size)
    value_states = heads(value_states, size)
    key_states, value_states = remembered(m, key_states, value_states)
    attn_output, _ = attention_interface(m, query_states, key_states, value_states, mask)
    attn_output = contiguous(reshape(attn_output, *x.shape))
    return linear(m / "out_proj", attn_output)
