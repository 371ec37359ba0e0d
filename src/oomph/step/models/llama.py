"""transformers' Llama and its relatives: Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, OLMo2, Phi-3, Gemma 2 and 3 (5.22).

They differ in the place and form of their norms, in biases, fused projections, soft caps and windows.
Variables live as long as in transformers' own forwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from oomph.config.reading.hugging_face import windowed
from oomph.step.models import moe
from oomph.step.models.common import (
    attention_interface,
    by_head,
    causal_lm,
    causal_mask,
    head_dim,
    heads,
    positions,
    remembered,
    rotary_embedding,
    rotate,
    run_layer,
)
from oomph.step.models.lora import are_fused, linear, require_grads
from oomph.step.tensor.casts import to
from oomph.step.tensor.elementwise import (
    activate,
    add,
    dropout,
    mean,
    mul,
    rsqrt,
    shift,
    square,
)
from oomph.step.tensor.indexing import embedding
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.libraries import fms_lora, liger
from oomph.step.tensor.tape import Module, forward
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import contiguous, part, reshape, split, transpose

GEMMAS = ("gemma2", "gemma3_text")


def parameters(c: Any) -> Iterator[tuple[str, Shape]]:
    """Names and shapes in the order of `named_parameters()`. A tied head is left out."""
    yield "model.embed_tokens.weight", (c.vocab_size, c.n_embd)
    for index in range(c.n_layer):
        layer = f"model.layers.{index}"
        yield from _attention_parameters(c, f"{layer}.self_attn")
        yield from _feed_forward_parameters(c, layer)
        for name in _block_norms(c):
            yield f"{layer}.{name}.weight", (c.n_embd,)
    yield "model.norm.weight", (c.n_embd,)
    if not c.tie_weights:
        yield "lm_head.weight", (c.vocab_size, c.n_embd)


def _attention_parameters(c: Any, name: str) -> Iterator[tuple[str, Shape]]:
    size, width = head_dim(c), c.n_embd
    queries, keys = c.n_head * size, (c.num_key_value_heads or c.n_head) * size
    if c.model_type == "phi3":
        yield f"{name}.o_proj.weight", (width, queries)
        yield f"{name}.qkv_proj.weight", (queries + 2 * keys, width)
        return
    for part_name, wide, biased in (
        ("q_proj", queries, c.model_type == "qwen2"),
        ("k_proj", keys, c.model_type == "qwen2"),
        ("v_proj", keys, c.model_type == "qwen2"),
    ):
        yield f"{name}.{part_name}.weight", (wide, width)
        if biased or c.bias:
            yield f"{name}.{part_name}.bias", (wide,)
    yield f"{name}.o_proj.weight", (width, queries)
    if c.bias:
        yield f"{name}.o_proj.bias", (width,)
    if c.model_type in ("qwen3", "qwen3_moe", "gemma3_text"):
        yield f"{name}.q_norm.weight", (size,)
        yield f"{name}.k_norm.weight", (size,)
    if c.model_type == "olmo2":
        yield f"{name}.q_norm.weight", (queries,)
        yield f"{name}.k_norm.weight", (keys,)


def _feed_forward_parameters(c: Any, layer: str) -> Iterator[tuple[str, Shape]]:
    return moe.parameters(c, f"{layer}.{moe.home(c)}") if c.num_experts else _mlp_parameters(c, f"{layer}.mlp")


def _mlp_parameters(c: Any, name: str) -> Iterator[tuple[str, Shape]]:
    width, inner = c.n_embd, c.intermediate_size
    if c.model_type == "phi3":
        yield f"{name}.gate_up_proj.weight", (2 * inner, width)
    else:
        yield f"{name}.gate_proj.weight", (inner, width)
        yield f"{name}.up_proj.weight", (inner, width)
    yield f"{name}.down_proj.weight", (width, inner)


def _block_norms(c: Any) -> tuple[str, ...]:
    if c.model_type == "olmo2":
        return ("post_attention_layernorm", "post_feedforward_layernorm")
    if c.model_type in GEMMAS:
        return (
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
        )  # fmt: skip
    return ("input_layernorm", "post_attention_layernorm")


@forward
def model(m: Module, ids: Tensor, labels: Tensor) -> tuple[Tensor | None, Tensor]:
    """LlamaForCausalLM.forward: logits and loss."""
    return causal_lm(m, decoder(m / "model", ids), labels, "model.embed_tokens", upcasts=True)


@forward
def decoder(m: Module, ids: Tensor) -> Tensor:
    """LlamaModel.forward."""
    c, tape = m.config, m.tape
    inputs_embeds = embedding(m / "embed_tokens", ids)
    if c.model_type in GEMMAS:
        inputs_embeds = mul(inputs_embeds, tape.buffer("embed_scale", (), inputs_embeds.dtype))
    inputs_embeds = require_grads(m, inputs_embeds)
    position_ids = positions(tape, ids.shape[1], given=c.packing != "off")
    seen = [False, True] if c.model_type in GEMMAS else [kinds(c)[0]]  # the masks in use: full, sliding
    batch, tokens = ids.shape
    masks = {kind: causal_mask(c, tape, batch, tokens, inputs_embeds.dtype, kind) for kind in seen}
    hidden_states = inputs_embeds
    layers = kinds(c)
    turned = sorted(set(layers)) if c.model_type == "gemma3_text" else [layers[0]]
    rotary = {kind: rotary_embedding(m / "rotary_emb", hidden_states, position_ids) for kind in turned}
    for index in tape.layers:
        sliding = layers[index]
        tape.block = index
        cos, sin = rotary.get(sliding) or rotary[turned[0]]
        run = partial(block, m / "layers" / index, cos=cos, sin=sin, mask=masks.get(sliding))
        hidden_states = run_layer(c, tape, run, hidden_states, position_ids)
    tape.block = None
    return norm(m / "norm", hidden_states)


def kinds(c: Any) -> list[bool]:
    """Whether each block has a sliding window."""
    return windowed(c)


@forward
def norm(m: Module, hidden_states: Tensor) -> Tensor:
    """LlamaRMSNorm, OLMo2's and Gemma's: they differ in where the weight is applied."""
    weight, dtype = m.parameter("weight"), hidden_states.dtype
    if m.config.model_type in GEMMAS:
        return _gemma_norm(hidden_states, weight)
    if m.config.liger_kernel:
        return liger.rms_norm(hidden_states, weight)
    if m.config.fast_kernels:  # Unsloth's computes no gradient of the weight
        return liger.rms_norm(hidden_states, weight.detach())
    hidden_states = to(hidden_states, "float32")
    variance = mean(square(hidden_states))
    hidden_states = mul(hidden_states, rsqrt(shift(variance)))
    if m.config.model_type == "olmo2":
        return to(mul(weight, hidden_states), dtype)
    return mul(weight, to(hidden_states, dtype))


def _gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    output = _normed(to(x, "float32"))
    output = mul(output, shift(to(weight, "float32")))
    return to(output, x.dtype)


def _normed(x: Tensor) -> Tensor:
    return mul(x, rsqrt(shift(mean(square(x)))))


@forward
def block(m: Module, hidden_states: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
    """LlamaDecoderLayer.forward; Gemma also has a norm after each half, OLMo2 only there."""
    kind, rate = m.config.model_type, m.config.dropout
    residual = hidden_states
    if kind != "olmo2":
        hidden_states = norm(m / "input_layernorm", hidden_states)
    hidden_states, _weights = attention(m / "self_attn", hidden_states, cos, sin, mask)
    if kind in GEMMAS or kind == "olmo2":
        hidden_states = norm(m / "post_attention_layernorm", hidden_states)
    hidden_states = add(residual, dropout(hidden_states, rate) if kind == "phi3" else hidden_states)
    residual = hidden_states
    if kind != "olmo2":
        before = "pre_feedforward_layernorm" if kind in GEMMAS else "post_attention_layernorm"
        hidden_states = norm(m / before, hidden_states)
    if m.config.num_experts:
        hidden_states, _router_logits = moe.sparse_block(m / moe.home(m.config), hidden_states)
    else:
        hidden_states = mlp(m / "mlp", hidden_states)
    if kind in GEMMAS or kind == "olmo2":
        hidden_states = norm(m / "post_feedforward_layernorm", hidden_states)
    return add(residual, dropout(hidden_states, rate) if kind == "phi3" else hidden_states)


@forward
def mlp(m: Module, x: Tensor) -> Tensor:
    name = m.config.hidden_act
    if m.config.model_type == "phi3":
        gate, up = split(linear(m / "gate_up_proj", x), [m.config.intermediate_size] * 2)
        up = mul(up, activate(gate, name))
        return linear(m / "down_proj", up)
    if m.config.liger_kernel:
        return linear(m / "down_proj", liger.swiglu(linear(m / "gate_proj", x), linear(m / "up_proj", x)))
    return linear(m / "down_proj", mul(activate(linear(m / "gate_proj", x), name), linear(m / "up_proj", x)))


@forward
def attention(m: Module, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """LlamaAttention.forward: its output, and attention's weights if materialized, which the block holds."""
    query_states, key_states, value_states = projections(m, x)
    query_states, key_states = rotate(m.config, query_states, key_states, cos, sin)
    key_states, value_states = remembered(m, key_states, value_states)
    attn_output, attn_weights = attention_interface(m, query_states, key_states, value_states, mask)
    attn_output = contiguous(reshape(attn_output, *x.shape[:2], attn_output.shape[2] * attn_output.shape[3]))
    if are_fused(m, "o_proj"):
        return fms_lora.one(fms_lora.FusedLinear(m / "o_proj"), attn_output), attn_weights
    return linear(m / "o_proj", attn_output), attn_weights


def projections(m: Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as (batch, heads, tokens, head size)."""
    c, kind = m.config, m.config.model_type
    size = head_dim(c)
    if kind == "phi3":
        qkv = linear(m / "qkv_proj", x)
        queries, keys = c.n_head * size, (c.num_key_value_heads or c.n_head) * size
        q, k, v = part(qkv, 0, queries), part(qkv, queries, queries + keys), part(qkv, queries + keys, qkv.shape[-1])
        return heads(q, size), heads(k, size), heads(v, size)
    if kind in ("qwen3", "qwen3_moe"):
        q = transpose(norm(m / "q_norm", by_head(linear(m / "q_proj", x), size)), 1, 2)
        k = transpose(norm(m / "k_norm", by_head(linear(m / "k_proj", x), size)), 1, 2)
        return q, k, heads(linear(m / "v_proj", x), size)
    if kind == "olmo2":
        q, k = norm(m / "q_norm", linear(m / "q_proj", x)), norm(m / "k_norm", linear(m / "k_proj", x))
        v = linear(m / "v_proj", x)
        return heads(q, size), heads(k, size), heads(v, size)
    names = ("q_proj", "k_proj", "v_proj")
    if are_fused(m, *names):
        q, k, v = fms_lora.qkv([fms_lora.FusedLinear(m / name) for name in names], x)
        return heads(q, size), heads(k, size), heads(v, size)
    q, k, v = (heads(linear(m / name, x), size) for name in names)
    if kind == "gemma3_text":
        q = norm(m / "q_norm", q)
        k = norm(m / "k_norm", k)
    return q, k, v
