"""transformers' Llama and its relatives: Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, OLMo2, Phi-3, Gemma 2 and 3 (5.22).

They differ in where norms stand and how they are written, in biases, in fused projections, in soft caps and windows.
Variables live as long as in transformers' own forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from oomph.config.schema import NEWEST_TRANSFORMERS, release
from oomph.step.models import moe
from oomph.step.ops import Kind
from oomph.step.tensor.attention import FLASH_HEAD_SIZE, attend, repeat_heads, softmax
from oomph.step.tensor.casts import to
from oomph.step.tensor.checkpoint import checkpoint
from oomph.step.tensor.elementwise import (
    activate,
    add,
    dropout,
    mean,
    mul,
    neg,
    pointwise,
    rsqrt,
    scale,
    shift,
    square,
    squashed,
)
from oomph.step.tensor.indexing import embedding
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.loss import cross_entropy, enter_loss
from oomph.step.tensor.products import linear, matmul
from oomph.step.tensor.tape import Module, Tape, forward
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import cat, contiguous, part, reshape, split, transpose, unsqueeze

GEMMAS = ("gemma2", "gemma3_text")
# What transformers did before these releases, from its history: ...
PADDED_LABELS_SINCE = (4, 49)  # shifted the logits by a copy, not the labels (loss_utils.py, 8ebe9d7)
CACHE_COPIES_SINCE = (4, 56)  # kept keys and values as they were, without a copy (cache_utils.py)
GROUPED_SINCE = (4, 54)  # repeated keys and values for every query, where sdpa can group them (9323d08)
STRIDED_SINCE = (4, 56)  # made queries, keys and values contiguous (sdpa_attention.py, 959239d) ...
CONTIGUOUS_SINCE = {"gpt_neox": (4, 49), "opt": (4, 52)}  # ... from the release on that a family took that function,
CONTIGUOUS_USUALLY_SINCE = (4, 48)  # which for most is this one


def _head_dim(c: Any) -> int:
    return int(c.head_dim or c.n_embd // c.n_head)


def parameters(c: Any) -> Iterator[tuple[str, Shape]]:
    """Names and shapes in the order of `named_parameters()`. A tied head has none of its own."""
    yield "model.embed_tokens.weight", (c.vocab_size, c.n_embd)
    for index in range(c.n_layer):
        layer = f"model.layers.{index}"
        yield from _attention_parameters(c, f"{layer}.self_attn")
        yield from moe.parameters(c, f"{layer}.mlp") if c.num_experts else _mlp_parameters(c, f"{layer}.mlp")
        for name in _block_norms(c):
            yield f"{layer}.{name}.weight", (c.n_embd,)
    yield "model.norm.weight", (c.n_embd,)
    if not c.tie_weights:
        yield "lm_head.weight", (c.vocab_size, c.n_embd)


def _attention_parameters(c: Any, name: str) -> Iterator[tuple[str, Shape]]:
    size, width = _head_dim(c), c.n_embd
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
def model(m: Module, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """LlamaForCausalLM.forward: logits and loss."""
    c, tape = m.config, m.tape
    hidden_states = decoder(m / "model", ids)
    head = (m / "model.embed_tokens" if c.tie_weights else m / "lm_head").parameter("weight")
    logits = linear(m / "lm_head", hidden_states, head, Kind.LOGITS)
    if c.final_logit_softcapping:
        tape.kind = Kind.LOGITS
        logits = scale(logits, "div")
        logits = squashed(logits, "tanh")
        logits = scale(logits)
    enter_loss(tape)
    tape.scope = "loss"
    return logits, causal_lm_loss(logits, labels, c.transformers_version, upcasts=True)


def _shifted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """All rows but the last of each sequence, copied."""
    tokens = labels.shape[1]
    shift_logits = contiguous(part(logits, 0, tokens - 1, dim=1))
    shift_labels = contiguous(part(labels, 1, tokens, dim=1))
    return cross_entropy(shift_logits, shift_labels)


def causal_lm_loss(logits: Tensor, labels: Tensor, version: str = NEWEST_TRANSFORMERS, upcasts: bool = False) -> Tensor:
    """ForCausalLMLoss: logits in float32, labels shifted by one; before that, the logits."""
    tape, (batch, tokens) = logits.tape, labels.shape
    if release(version) < PADDED_LABELS_SINCE:
        return _shifted_loss(to(logits, "float32") if upcasts else logits, labels)
    logits = to(logits, "float32")
    labels = tape.made("labels", (batch, tokens + 1), "int64", (labels,), kind=Kind.INPUTS)
    shift_labels = labels  # of one row all but the first is in one piece
    if batch > 1:
        shift_labels = tape.made("shift_labels", (batch, tokens), "int64", (labels,), kind=Kind.INPUTS)
    return cross_entropy(logits, shift_labels)


@forward
def decoder(m: Module, ids: Tensor) -> Tensor:
    """LlamaModel.forward."""
    c, tape = m.config, m.tape
    inputs_embeds = embedding(m / "embed_tokens", ids)
    if c.model_type in GEMMAS:
        inputs_embeds = mul(inputs_embeds, _embed_scale(tape, inputs_embeds.dtype))
    position_ids = positions(tape, ids.shape[1])
    seen = [False, True] if c.model_type in GEMMAS else [_is_sliding(c, 0)]  # of masks: full, sliding
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


def run_layer(c: Any, tape: Tape, run: Callable[[Tensor], Tensor], hidden_states: Tensor, *given: Tensor) -> Tensor:
    """GradientCheckpointingLayer's call. Whatever the block was given is held until it is computed again."""
    if not tape.grad_enabled or tape.block is None or tape.block >= c.checkpoint_layers:
        return run(hidden_states)
    return checkpoint(tape, partial(_given, run, given), hidden_states, random=True)


def _given(run: Callable[[Tensor], Tensor], _given: Sequence[Tensor], hidden_states: Tensor) -> Tensor:
    return run(hidden_states)


def kinds(c: Any) -> list[bool]:
    """Whether each block sees a window only."""
    return [_is_sliding(c, index) for index in range(c.n_layer)]


def _is_sliding(c: Any, index: int) -> bool:
    return bool(c.sliding_window) and (not c.sliding_window_pattern or (index + 1) % c.sliding_window_pattern != 0)


def _embed_scale(tape: Tape, dtype: str) -> Tensor:
    """A buffer of one number, cast to the embedding's dtype."""
    one = tape.buffer("embed_scale", (), "float32")
    return tape.cast(one, dtype) if dtype != "float32" else one


def positions(tape: Tape, tokens: int) -> Tensor:
    """position_ids, of one row."""
    numbers = tape.made("positions", (tokens,), "int64", kind=Kind.INPUTS)
    shifted = tape.made("positions", (tokens,), "int64", (numbers,), kind=Kind.INPUTS)
    return reshape(shifted, 1, tokens)


def causal_mask(
    c: Any, tape: Tape, batch: int, tokens: int, dtype: str, sliding: bool, packed: bool = True
) -> Tensor | None:
    """create_causal_mask and create_sliding_window_causal_mask: None where the kernel's own causal mask does.

    A boolean mask for sdpa, numbers to add for eager attention. `packed`: it is told the positions, and looks whether
    they are of several sequences in a row.
    """
    if packed and tape.compiles:  # transformers decides nothing by what a tensor holds while it is traced
        flags = tape.made("window" if sliding else "mask", (batch, 1, tokens, tokens), "bool", kind=Kind.ATTENTION)
        return pointwise("where", flags, dtype=dtype) if c.attn_logit_softcapping else flags
    if c.padding:
        return _padding_mask(c, tape, batch, tokens, dtype, sliding)
    if packed and not c.use_cache:
        _look_for_packed_sequences(tape, batch, tokens)
    windowed = sliding and tokens >= (c.sliding_window or 0)
    if not windowed and not c.attn_logit_softcapping:
        return None
    square = (tokens, tokens)

    def made(shape: Shape, dtype: str = "int64") -> Tensor:
        return tape.made("mask", shape, dtype, kind=Kind.ATTENTION)

    ranges = [made((batch,)), made((1,))]
    for _ in range(2):  # queries and keys: numbers, then shifted by what is cached
        numbers = made((tokens,))
        ranges.append(made((tokens,)))
        del numbers
    if sliding:
        true, border = made((1,), "bool"), made((tokens,))
        near = made(square, "bool")
        del border
        near = made(square, "bool")  # and what was true before
        del true
        before = made(square, "bool")
        mask = made(square, "bool")
        del before, near
    else:
        mask = made(square, "bool")
    ranges.clear()
    if not c.attn_logit_softcapping:
        return mask.seen((batch, 1, *square), (0, 0, tokens, 1))
    scalars = [made((), dtype) for _ in range(2)]
    numbers = made((batch, 1, *square), dtype)
    del scalars
    return numbers


def _padding_mask(c: Any, tape: Tape, batch: int, tokens: int, dtype: str, sliding: bool) -> Tensor:
    """A mask for each sequence: its own tokens, the earlier ones alone, and of these those in the window."""

    def made(shape: Shape, dtype: str = "bool") -> Tensor:
        return tape.made("mask", shape, dtype, kind=Kind.ATTENTION)

    padding_mask = made((batch, tokens))
    mask = made((tokens, tokens))
    for _ in range(2 if sliding else 1):
        mask = made((tokens, tokens))
    mine = made((batch, 1, 1, tokens))
    mask = made((batch, 1, tokens, tokens))
    del padding_mask, mine
    return pointwise("where", mask, dtype=dtype) if c.attn_logit_softcapping else mask


def _look_for_packed_sequences(tape: Tape, batch: int, tokens: int) -> None:
    """find_packed_sequence_indices, which finds none: a few passes over the positions."""

    def made(count: int, dtype: str = "int64") -> Tensor:
        return tape.made("packed", (batch, count), dtype, kind=Kind.INPUTS)

    first_dummy_value = made(1)
    prepended = made(tokens + 1)
    position_diff = made(tokens)
    del prepended
    differs = made(tokens, "bool")
    spent = (8 * batch * tokens,)  # a running sum of booleans is one of their int64 copy
    packed_sequence_mask = tape.made("packed", (batch, tokens), "int64", kind=Kind.INPUTS, spent=spent)
    del differs
    is_zero = made(1, "bool")
    every = tape.made("packed", (), "bool", kind=Kind.INPUTS)
    del is_zero, every, packed_sequence_mask, position_diff, first_dummy_value


@forward
def rotary_embedding(m: Module, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, in x's dtype."""
    c, tape, tokens = m.config, m.tape, position_ids.shape[1]
    half = -(-int(_head_dim(c) * (c.partial_rotary_factor or 1.0)) // 2)
    numbers = tape.made("positions", (1, tokens, 1), "float32", (position_ids,))
    freqs = tape.made("freqs", (1, tokens, half), "float32", (numbers,))
    del numbers
    emb = tape.made("emb", (1, tokens, 2 * half), "float32", (freqs, freqs))
    cos = _scaled(tape.made("cos", emb.shape, "float32", (emb,)))
    sin = _scaled(tape.made("sin", emb.shape, "float32", (emb,)))
    return (cos, sin) if c.model_type == "olmo2" else (to(cos, x.dtype), to(sin, x.dtype))


def _scaled(x: Tensor) -> Tensor:
    return pointwise("mul", x)


@forward
def norm(m: Module, hidden_states: Tensor) -> Tensor:
    """LlamaRMSNorm, OLMo2's and Gemma's: they differ in where the weight comes in."""
    weight, dtype = m.parameter("weight"), hidden_states.dtype
    if m.config.model_type in GEMMAS:
        return _gemma_norm(hidden_states, weight)
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
    """LlamaDecoderLayer.forward; Gemma has a norm after each half too, OLMo2 only there."""
    kind, rate = m.config.model_type, m.config.dropout
    residual = hidden_states
    if kind != "olmo2":
        hidden_states = norm(m / "input_layernorm", hidden_states)
    hidden_states = attention(m / "self_attn", hidden_states, cos, sin, mask)
    if kind in GEMMAS or kind == "olmo2":
        hidden_states = norm(m / "post_attention_layernorm", hidden_states)
    hidden_states = add(residual, dropout(hidden_states, rate) if kind == "phi3" else hidden_states)
    residual = hidden_states
    if kind != "olmo2":
        before = "pre_feedforward_layernorm" if kind in GEMMAS else "post_attention_layernorm"
        hidden_states = norm(m / before, hidden_states)
    feed_forward = moe.sparse_block if m.config.num_experts else mlp
    hidden_states = feed_forward(m / "mlp", hidden_states)
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
    return linear(m / "down_proj", mul(activate(linear(m / "gate_proj", x), name), linear(m / "up_proj", x)))


@forward
def attention(m: Module, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
    """LlamaAttention.forward."""
    query_states, key_states, value_states = projections(m, x)
    query_states, key_states = rotate(m.config, query_states, key_states, cos, sin)
    key_states, value_states = remembered(m, key_states, value_states)
    attn_output = attention_interface(m, query_states, key_states, value_states, mask)
    attn_output = contiguous(reshape(attn_output, *x.shape[:2], attn_output.shape[2] * attn_output.shape[3]))
    return linear(m / "o_proj", attn_output)


def projections(m: Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as (batch, heads, tokens, head size)."""
    c, kind = m.config, m.config.model_type
    size = _head_dim(c)
    if kind == "phi3":
        qkv = linear(m / "qkv_proj", x)
        queries, keys = c.n_head * size, (c.num_key_value_heads or c.n_head) * size
        q, k, v = part(qkv, 0, queries), part(qkv, queries, queries + keys), part(qkv, queries + keys, qkv.shape[-1])
        return heads(q, size), heads(k, size), heads(v, size)
    if kind in ("qwen3", "qwen3_moe"):
        q = transpose(norm(m / "q_norm", _by_head(linear(m / "q_proj", x), size)), 1, 2)
        k = transpose(norm(m / "k_norm", _by_head(linear(m / "k_proj", x), size)), 1, 2)
        return q, k, heads(linear(m / "v_proj", x), size)
    if kind == "olmo2":
        q, k = norm(m / "q_norm", linear(m / "q_proj", x)), norm(m / "k_norm", linear(m / "k_proj", x))
        v = linear(m / "v_proj", x)
        return heads(q, size), heads(k, size), heads(v, size)
    q, k, v = (heads(linear(m / name, x), size) for name in ("q_proj", "k_proj", "v_proj"))
    if kind == "gemma3_text":
        q = norm(m / "q_norm", q)
        k = norm(m / "k_norm", k)
    return q, k, v


def _by_head(x: Tensor, size: int) -> Tensor:
    return reshape(x, *x.shape[:2], x.shape[-1] // size, size)


def heads(x: Tensor, size: int) -> Tensor:
    """(batch, tokens, width) as (batch, heads, tokens, head size): views."""
    return transpose(_by_head(x, size), 1, 2)


def rotate(c: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """apply_rotary_pos_emb. Phi-3 rotates a part of each head, be it all of it."""
    cos, sin = unsqueeze(cos, 1), unsqueeze(sin, 1)
    if c.model_type not in ("phi3", "gpt_neox"):
        q_embed = rotated(q, cos, sin)
        k_embed = rotated(k, cos, sin)
        return (to(q_embed, q.dtype), to(k_embed, k.dtype)) if c.model_type == "olmo2" else (q_embed, k_embed)
    size = cos.shape[-1]
    q_rot, q_pass = part(q, 0, size), part(q, size, q.shape[-1])
    k_rot, k_pass = part(k, 0, size), part(k, size, k.shape[-1])
    if c.model_type == "gpt_neox":
        q_embed, k_embed = rotated(q_rot, cos, sin), rotated(k_rot, cos, sin)
        q_embed = cat([q_embed, q_pass])
        return q_embed, cat([k_embed, k_pass])
    q_embed = cat([rotated(q_rot, cos, sin), q_pass])
    return q_embed, cat([rotated(k_rot, cos, sin), k_pass])


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(x * cos) + (rotate_half(x) * sin)."""
    return add(mul(x, cos), mul(rotate_half(x), sin))


def rotate_half(x: Tensor) -> Tensor:
    middle = x.shape[-1] // 2
    first, second = part(x, 0, middle), part(x, middle, x.shape[-1])
    return cat([neg(second), first])


def remembered(m: Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """DynamicCache.update: keys and values appended to what is remembered, here nothing, in the keys' dtype."""
    if not m.config.use_cache:
        return key, value
    if release(m.config.transformers_version) < CACHE_COPIES_SINCE:
        m.tape.cache += [key.storage, value.storage]
        return key, value
    nothing = m.tape.buffer("cache", (*key.shape[:2], 0, key.shape[3]), key.dtype)
    key = cat([nothing, key], dim=2)
    value = cat([nothing, value], dim=2)
    m.tape.cache += [key.storage, value.storage]
    return key, value


def attention_interface(m: Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """transformers' sdpa or eager attention: (batch, tokens, heads, head size), contiguous."""
    c, tape = m.config, m.tape
    groups = q.shape[1] // k.shape[1]
    version = release(c.transformers_version)
    outer, tape.kind = tape.kind, Kind.ATTENTION
    if not c.attn_logit_softcapping:
        if mask is not None or k.shape[-1] > FLASH_HEAD_SIZE or version < GROUPED_SINCE:
            k, v = repeat_heads(k, groups), repeat_heads(v, groups)
        if CONTIGUOUS_SINCE.get(c.model_type, CONTIGUOUS_USUALLY_SINCE) <= version < STRIDED_SINCE:
            q = contiguous(q)
            k = contiguous(k)
            v = contiguous(v)
        attn_output = attend(q, k, v, kernel=c.attention, rate=c.attention_dropout or 0.0, mask=mask)
        attn_output = contiguous(transpose(attn_output, 1, 2))
        tape.kind = outer
        return attn_output
    key_states, value_states = repeat_heads(k, groups), repeat_heads(v, groups)
    weights = scale(matmul(q, transpose(key_states, 2, 3)))
    weights = scale(weights, "div")
    weights = squashed(weights, "tanh")
    weights = scale(weights)
    assert mask is not None
    weights = add(weights, mask)
    weights = to(softmax(weights, "float32"), q.dtype)
    weights = dropout(weights, c.attention_dropout or 0.0)
    attn_output = matmul(weights, value_states)
    attn_output = contiguous(transpose(attn_output, 1, 2))
    tape.kind = outer
    return attn_output
