"""transformers' GPT-NeoX (5.22), the architecture of Pythia: parallel attention and MLP, part of each head rotated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from oomph.step.models.common import (
    attention_interface,
    causal_lm,
    causal_mask,
    positions,
    remembered,
    rotary_embedding,
    rotate,
    run_layer,
    with_bias,
)
from oomph.step.models.lora import linear, require_grads
from oomph.step.tensor.elementwise import activate, add, dropout
from oomph.step.tensor.indexing import embedding
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.norms import layer_norm
from oomph.step.tensor.tape import Module, forward
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import contiguous, reshape, split, transpose


def parameters(c: Any) -> Iterator[tuple[str, Shape]]:
    """Names and shapes in the order of `named_parameters()`. A tied head is left out."""
    width, inner = c.n_embd, c.intermediate_size or 4 * c.n_embd
    yield "gpt_neox.embed_in.weight", (c.vocab_size, width)
    for index in range(c.n_layer):
        layer = f"gpt_neox.layers.{index}"
        yield from with_bias(f"{layer}.input_layernorm", (width,))
        yield from with_bias(f"{layer}.post_attention_layernorm", (width,))
        yield from with_bias(f"{layer}.attention.query_key_value", (3 * width, width), c.bias)
        yield from with_bias(f"{layer}.attention.dense", (width, width), c.bias)
        yield from with_bias(f"{layer}.mlp.dense_h_to_4h", (inner, width))
        yield from with_bias(f"{layer}.mlp.dense_4h_to_h", (width, inner))
    yield from with_bias("gpt_neox.final_layer_norm", (width,))
    if not c.tie_weights:
        yield "lm_head.weight", (c.vocab_size, width)


@forward
def model(m: Module, ids: Tensor, labels: Tensor) -> tuple[Tensor | None, Tensor]:
    """GPTNeoXForCausalLM.forward: logits and loss."""
    return causal_lm(m, decoder(m / "gpt_neox", ids), labels, "gpt_neox.embed_in")


@forward
def decoder(m: Module, ids: Tensor) -> Tensor:
    """GPTNeoXModel.forward."""
    c, tape, (batch, tokens) = m.config, m.tape, ids.shape
    inputs_embeds = require_grads(m, embedding(m / "embed_in", ids))
    position_ids = positions(tape, tokens)
    mask = causal_mask(c, tape, batch, tokens, inputs_embeds.dtype, False)
    hidden_states = dropout(inputs_embeds, c.dropout)
    cos, sin = rotary_embedding(m / "rotary_emb", hidden_states, position_ids)
    for index in tape.layers:
        tape.block = index
        run = partial(block, m / "layers" / index, cos=cos, sin=sin, mask=mask)
        hidden_states = run_layer(c, tape, run, hidden_states, position_ids)
    tape.block = None
    return layer_norm(m / "final_layer_norm", hidden_states)


@forward
def block(m: Module, hidden_states: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
    """GPTNeoXLayer.forward."""
    rate = m.config.dropout
    attn_output = attention(m / "attention", layer_norm(m / "input_layernorm", hidden_states), cos, sin, mask)
    attn_output = dropout(attn_output, rate)
    if m.config.use_parallel_residual:
        mlp_output = mlp(m / "mlp", layer_norm(m / "post_attention_layernorm", hidden_states))
        mlp_output = dropout(mlp_output, rate)
        return add(add(mlp_output, attn_output), hidden_states)
    attn_output = add(attn_output, hidden_states)
    mlp_output = mlp(m / "mlp", layer_norm(m / "post_attention_layernorm", attn_output))
    mlp_output = dropout(mlp_output, rate)
    return add(mlp_output, attn_output)


@forward
def attention(m: Module, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
    """GPTNeoXAttention.forward: queries, keys and values are interleaved by head."""
    batch, tokens, width = x.shape
    count = m.config.n_head
    size = width // count
    qkv = transpose(reshape(linear(m / "query_key_value", x), batch, tokens, count, 3 * size), 1, 2)
    query_states, key_states, value_states = split(qkv, [size] * 3)
    query_states, key_states = rotate(m.config, query_states, key_states, cos, sin)
    key_states, value_states = remembered(m, key_states, value_states)
    attn_output, _ = attention_interface(m, query_states, key_states, value_states, mask)
    attn_output = contiguous(reshape(attn_output, *x.shape))
    return linear(m / "dense", attn_output)


@forward
def mlp(m: Module, hidden_states: Tensor) -> Tensor:
    """GPTNeoXMLP.forward."""
    hidden_states = linear(m / "dense_h_to_4h", hidden_states)
    hidden_states = activate(hidden_states, m.config.hidden_act)
    return linear(m / "dense_4h_to_h", hidden_states)
