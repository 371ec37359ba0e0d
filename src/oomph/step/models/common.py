"""What architectures share: transformers' masks, positions, rotary embeddings, attention and loss (5.22).

Variables live as long as in transformers' own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from oomph.config.lengths import mean_length
from oomph.config.programs import NEWEST_TRANSFORMERS, release
from oomph.config.reading.hugging_face import windowed
from oomph.step.models.lora import linear
from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.attention import FLASH_HEAD_SIZE, attend, flash_attention_2, repeat_heads, softmax
from oomph.step.tensor.casts import to
from oomph.step.tensor.checkpoint import checkpoint, checkpoint_reentrant
from oomph.step.tensor.elementwise import activation_from_result, add, dropout, mul, neg, pointwise, scale
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.libraries import liger
from oomph.step.tensor.libraries.cut_cross_entropy import cut_cross_entropy
from oomph.step.tensor.libraries.liger_loss import fused_cross_entropy
from oomph.step.tensor.libraries.trl_head import head_loss
from oomph.step.tensor.loss import cross_entropy, enter_loss
from oomph.step.tensor.products import matmul
from oomph.step.tensor.tape import Module, Tape, forward
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import cat, contiguous, part, reshape, transpose, unsqueeze

# Releases of transformers in which its programs changed, from its history.
PADDED_LABELS_SINCE = (4, 49)  # the loss shifts the labels; before, it copied shifted logits (loss_utils.py, 8ebe9d7)
CACHE_COPIES_SINCE = (4, 56)  # the cache copies keys and values; before, it kept them as they were (cache_utils.py)
GROUPED_SINCE = (4, 54)  # sdpa groups the queries; before, keys and values were repeated per query head (9323d08)
NOT_REENTRANT_SINCE = (5, 0)  # gradient_checkpointing_enable's default kind of checkpointing (modeling_utils.py)
# sdpa_attention.py made queries, keys and values contiguous, from the release in which a family began to use it
# until STRIDED_SINCE (959239d).
CONTIGUOUS_SINCE = {"gpt_neox": (4, 49), "opt": (4, 52)}
CONTIGUOUS_USUALLY_SINCE = (4, 48)  # for all other families
STRIDED_SINCE = (4, 56)


def with_bias(name: str, shape: Shape, bias: bool = True) -> Iterator[tuple[str, Shape]]:
    """The names and shapes of a layer's weight and, if it has one, its bias."""
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]


def causal_lm(
    m: Module, hidden_states: Tensor, labels: Tensor, table: str, upcasts: bool = False
) -> tuple[Tensor | None, Tensor]:
    """The end of a ...ForCausalLM.forward: logits and loss. `table` is the embedding that a tied head shares."""
    c, tape = m.config, m.tape
    head = (m / table if c.tie_weights else m / "lm_head").parameter("weight")
    if c.fused_loss in ("liger", "cce") and tape.training:
        enter_loss(tape)
        tape.scope, tape.kind = "loss", Kind.LOGITS
        _held = shifted_labels(labels)
        return None, (fused_cross_entropy if c.fused_loss == "liger" else cut_cross_entropy)(hidden_states, head)
    if c.fused_loss == "trl":
        enter_loss(tape)
        tape.scope, tape.kind = "loss", Kind.LOGITS
        return None, head_loss(hidden_states, labels, head, bool(c.final_logit_softcapping))
    logits = linear(m / "lm_head", hidden_states, head, Kind.LOGITS)
    if c.final_logit_softcapping:
        tape.kind = Kind.LOGITS
        logits = scale(logits, "div")
        logits = activation_from_result(logits, "tanh")
        logits = scale(logits)
    enter_loss(tape)
    tape.scope = "loss"
    return logits, causal_lm_loss(logits, labels, c.transformers_version, upcasts)


def head_dim(c: Any) -> int:
    """The size of a head."""
    return int(c.head_dim or c.n_embd // c.n_head)


def shifted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of a copy of the logits without each sequence's last row."""
    tokens = labels.shape[1]
    shift_logits = contiguous(part(logits, 0, tokens - 1, dim=1))
    shift_labels = contiguous(part(labels, 1, tokens, dim=1))
    return cross_entropy(shift_logits, shift_labels)


def causal_lm_loss(logits: Tensor, labels: Tensor, version: str = NEWEST_TRANSFORMERS, upcasts: bool = False) -> Tensor:
    """ForCausalLMLoss: logits in float32, labels shifted by one; older releases shift the logits."""
    if release(version) < PADDED_LABELS_SINCE:
        return shifted_loss(to(logits, "float32") if upcasts else logits, labels)
    logits = to(logits, "float32")
    labels, shift_labels = shifted_labels(labels)
    return cross_entropy(logits, shift_labels)


def shifted_labels(labels: Tensor) -> tuple[Tensor, Tensor]:
    """The labels padded by one, and all of these but the first: callers hold both."""
    tape, (batch, tokens) = labels.tape, labels.shape
    labels = tape.made("labels", (batch, tokens + 1), "int64", (labels,), kind=Kind.INPUTS)
    if batch == 1:
        return labels, labels  # for a single row the slice is contiguous
    return labels, tape.made("shift_labels", (batch, tokens), "int64", (labels,), kind=Kind.INPUTS)


def run_layer(c: Any, tape: Tape, run: Callable[[Tensor], Tensor], hidden_states: Tensor, *held: Tensor) -> Tensor:
    """GradientCheckpointingLayer's call. `held` are the block's other arguments: alive until it is recomputed."""
    if not tape.grad_enabled or tape.block is None or tape.block >= c.checkpoint_layers:
        return run(hidden_states)
    older = release(c.transformers_version) < NOT_REENTRANT_SINCE and not tape.compiles
    kind = checkpoint_reentrant if older else checkpoint
    return kind(tape, partial(_run_holding, run, held), hidden_states, random=True)


def _run_holding(run: Callable[[Tensor], Tensor], _held: Sequence[Tensor], hidden_states: Tensor) -> Tensor:
    return run(hidden_states)


def _flash_attention(c: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """flash_attention_forward. For a single row, every layer checks whether positions belong to several documents."""
    tape = q.tape
    dtype = tape.autocast or c.dtype
    q, k, v = (transpose(each, 1, 2) for each in (q, k, v))
    q, k, v = (to(each, dtype) if each.dtype == "float32" else each for each in (q, k, v))
    if q.shape[0] == 1 and q.shape[1] > 1:
        _look_at_positions(tape, q.shape[1])
    sliding = tape.block is not None and windowed(c)[tape.block]
    return flash_attention_2(q, k, v, document_length(c), (c.sliding_window or 1) - 1 if sliding else None)


def _look_at_positions(tape: Tape, tokens: int) -> None:
    """_is_packed_sequence: whether the positions are not consecutive."""

    def made(shape: Shape = (1, tokens)) -> Tensor:
        return tape.made("packed", shape, "int64", kind=Kind.INPUTS)

    numbers = made((tokens,))
    least = made(())
    increasing = made((tokens,))
    del numbers, least
    difference = made()
    distance = made()
    del difference
    total = made(())
    del distance
    tape.made("packed", (), "bool", (total,), Kind.INPUTS)
    del increasing, total


def positions(tape: Tape, tokens: int, given: bool = False) -> Tensor:
    """position_ids for one row, or the batch's own."""
    if given:
        return tape.buffer("position_ids", (1, tokens), "int64")
    numbers = tape.made("positions", (tokens,), "int64", kind=Kind.INPUTS)
    shifted = tape.made("add_positions", (tokens,), "int64", (numbers,), kind=Kind.INPUTS)
    return reshape(shifted, 1, tokens)


def causal_mask(
    c: Any, tape: Tape, batch: int, tokens: int, dtype: str, sliding: bool, packed: bool = True
) -> Tensor | None:
    """create_causal_mask and create_sliding_window_causal_mask: None if the kernel's own causal mask suffices.

    A boolean mask for sdpa, an additive one for eager attention. `packed`: it gets the positions, and checks whether
    they belong to several sequences in a row.
    """
    if packed and tape.compiles:  # transformers makes no decisions by tensor values while it is traced
        reads = () if c.use_cache else _packed_sequences(tape, batch, tokens)
        flags = tape.made("window" if sliding else "mask", (batch, 1, tokens, tokens), "bool", reads, Kind.ATTENTION)
        return pointwise("where", flags, dtype=dtype) if attends_eagerly(c) else flags
    if c.padding:
        return _padding_mask(c, tape, batch, tokens, dtype, sliding)
    documents = _look_for_packed_sequences(tape, batch, tokens) if packed and not c.use_cache else None
    if c.attention == "flash2":
        return None
    if c.packing == "off":
        documents = None
    narrower = sliding and tokens >= (c.sliding_window or 0)
    if not narrower and not attends_eagerly(c) and documents is None:
        return None
    square = (tokens, tokens)

    def made(shape: Shape, dtype: str = "int64") -> Tensor:
        return tape.made("mask", shape, dtype, kind=Kind.ATTENTION)

    ranges = [made((batch,)), made((1,))]
    for _ in range(2):  # queries and keys: positions, then shifted by the cached length
        numbers = made((tokens,))
        ranges.append(made((tokens,)))
        del numbers
    if documents is not None:
        return _document_mask(c, tape, documents, dtype, sliding, ranges)
    if sliding:
        true, border = made((1,), "bool"), made((tokens,))
        near = made(square, "bool")
        del border
        near = made(square, "bool")  # combined with the earlier mask
        del true
        before = made(square, "bool")
        mask = made(square, "bool")
        del before, near
    else:
        mask = made(square, "bool")
    ranges.clear()
    if not attends_eagerly(c):
        return mask.as_strided((batch, 1, *square), (0, 0, tokens, 1))
    scalars = [made((), dtype) for _ in range(2)]
    numbers = made((batch, 1, *square), dtype)
    del scalars
    return numbers


def _document_mask(
    c: Any, tape: Tape, packed_sequence_mask: Tensor, dtype: str, sliding: bool, ranges: list[Tensor]
) -> Tensor:
    """packed_sequence_compatibility_function: tokens see the earlier ones of their own document, within the window
    if there is one. `packed_sequence_mask` is the index of each token's document."""
    tokens = packed_sequence_mask.shape[1]
    square = (1, 1, tokens, tokens)

    def made(shape: Shape, dtype: str = "bool") -> Tensor:
        return tape.made("mask", shape, dtype, kind=Kind.ATTENTION)

    def picked() -> tuple[Tensor, Tensor]:
        """An index for each query, and one for each key."""
        return made((1, 1, tokens, 1), "int64"), made((1, 1, 1, tokens), "int64")

    result = made(())
    numbers = picked()
    same = made(square)
    del numbers
    result = made(square)  # combined with the earlier mask
    del same
    numbers = picked()
    if sliding:
        inner = made(())
        border = made((1, 1, tokens, 1), "int64")
        near = made(square)
        del border
        inner = made(square)
        del near
        before = made(square)
        earlier = made(square)
        del inner, before
    else:
        earlier = made(square)
    del numbers
    result = made(square)
    del earlier
    ranges.clear()
    if not attends_eagerly(c):
        return result
    scalars = [made((), dtype) for _ in range(2)]
    added = made(square, dtype)
    del scalars
    return added


def _padding_mask(c: Any, tape: Tape, batch: int, tokens: int, dtype: str, sliding: bool) -> Tensor:
    """A mask for each sequence: its own tokens, only earlier ones, and only those within the window."""

    def made(shape: Shape, dtype: str = "bool") -> Tensor:
        return tape.made("mask", shape, dtype, kind=Kind.ATTENTION)

    padding_mask = made((batch, tokens))
    mask = made((tokens, tokens))
    for _ in range(2 if sliding else 1):
        mask = made((tokens, tokens))
    mine = made((batch, 1, 1, tokens))
    mask = made((batch, 1, tokens, tokens))
    del padding_mask, mine
    return pointwise("where", mask, dtype=dtype) if attends_eagerly(c) else mask


def _packed_sequences(tape: Tape, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """find_packed_sequence_indices, traced: the index of each token's sequence, for every query and for every key."""
    steps = tape.made("packed", (batch, tokens), "int64", kind=Kind.INPUTS)
    found = tape.made("cumsum", (batch, tokens), "int64", (steps,), Kind.INPUTS, kernel=Kernel.REDUCTION)
    return unsqueeze(unsqueeze(found, 1), 3), unsqueeze(unsqueeze(found, 1), 1)


def _look_for_packed_sequences(tape: Tape, batch: int, tokens: int) -> Tensor:
    """find_packed_sequence_indices: a few passes over the positions, and the index of each token's document."""

    def made(count: int, dtype: str = "int64") -> Tensor:
        return tape.made("packed", (batch, count), dtype, kind=Kind.INPUTS)

    first_dummy_value = made(1)
    prepended = made(tokens + 1)
    position_diff = made(tokens)
    del prepended
    differs = made(tokens, "bool")
    temporaries = (8 * batch * tokens,)  # cumsum of booleans sums an int64 copy
    packed_sequence_mask = tape.made("packed", (batch, tokens), "int64", kind=Kind.INPUTS, temporaries=temporaries)
    del differs
    is_zero = made(1, "bool")
    every = tape.made("packed", (), "bool", kind=Kind.INPUTS)
    del is_zero, every, position_diff, first_dummy_value
    return packed_sequence_mask


@forward
def rotary_embedding(m: Module, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, in x's dtype."""
    c, tape, tokens = m.config, m.tape, position_ids.shape[1]
    half = -(-int(head_dim(c) * (c.partial_rotary_factor or 1.0)) // 2)
    numbers = tape.made("positions", (1, tokens, 1), "float32", (position_ids,))
    freqs = tape.made("freqs", (1, tokens, half), "float32", (numbers, tape.buffer("inv_freq", (half,), "float32")))
    del numbers
    emb = tape.made("emb", (1, tokens, 2 * half), "float32", (freqs, freqs))
    cos = _scaled(tape.made("cos", emb.shape, "float32", (emb,)))
    sin = _scaled(tape.made("sin", emb.shape, "float32", (emb,)))
    return (cos, sin) if c.model_type == "olmo2" else (to(cos, x.dtype), to(sin, x.dtype))


def _scaled(x: Tensor) -> Tensor:
    return pointwise("mul", x)


def by_head(x: Tensor, size: int) -> Tensor:
    """(batch, tokens, width) as (batch, tokens, heads, head size)."""
    return reshape(x, *x.shape[:2], x.shape[-1] // size, size)


def heads(x: Tensor, size: int) -> Tensor:
    """(batch, tokens, width) as (batch, heads, tokens, head size): views."""
    return transpose(by_head(x, size), 1, 2)


def rotate(c: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """apply_rotary_pos_emb. Phi-3 slices off the part of each head that it rotates, even if that is the whole head."""
    if c.liger_kernel or c.fast_kernels:
        return liger.rope(q, k, cos, sin)
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


def turned_by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation as in torchtune and litgpt: the rotated half is a variable, and the tables may be wider than x."""
    rotated = rotate_half(x)
    return to(add(mul(x, cos), mul(rotated, sin)), x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    middle = x.shape[-1] // 2
    first, second = part(x, 0, middle), part(x, middle, x.shape[-1])
    return cat([neg(second), first])


def remembered(m: Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """DynamicCache.update: keys and values appended to the cache, empty here, in the keys' dtype."""
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


def attends_eagerly(c: Any) -> bool:
    """Whether attention's scores are materialized: if requested, and in Gemma 2 except with flash-attn."""
    return bool(c.attention == "eager" or (c.model_type == "gemma2" and c.attention != "flash2"))


def document_length(c: Any) -> int | None:
    """The number of tokens per document if several share a row; otherwise None."""
    if c.packing == "off":
        return None
    return mean_length(c) if c.packing == "packed" else int(c.block_size)


def attention_interface(
    m: Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """transformers' sdpa or eager attention: (batch, tokens, heads, head size), contiguous; and eager's weights."""
    c, tape = m.config, m.tape
    groups = q.shape[1] // k.shape[1]
    version = release(c.transformers_version)
    outer, tape.kind = tape.kind, Kind.ATTENTION
    if c.attention == "flash2":
        attn_output = _flash_attention(c, q, k, v)
        tape.kind = outer
        return attn_output, None
    if not attends_eagerly(c):
        if mask is not None or k.shape[-1] > FLASH_HEAD_SIZE or version < GROUPED_SINCE:
            k, v = repeat_heads(k, groups), repeat_heads(v, groups)
        if CONTIGUOUS_SINCE.get(c.model_type, CONTIGUOUS_USUALLY_SINCE) <= version < STRIDED_SINCE:
            q = contiguous(q)
            k = contiguous(k)
            v = contiguous(v)
        attn_output = attend(q, k, v, kernel=c.attention, rate=c.attention_dropout or 0.0, mask=mask)
        attn_output = contiguous(transpose(attn_output, 1, 2))
        tape.kind = outer
        return attn_output, None
    key_states, value_states = repeat_heads(k, groups), repeat_heads(v, groups)
    weights = scale(matmul(q, transpose(key_states, 2, 3)))
    if c.attn_logit_softcapping:
        weights = scale(weights, "div")
        weights = activation_from_result(weights, "tanh")
        weights = scale(weights)
    assert mask is not None
    weights = add(weights, mask)
    weights = to(softmax(weights, "float32"), q.dtype)
    weights = dropout(weights, c.attention_dropout or 0.0)
    attn_output = matmul(weights, value_states)
    attn_output = contiguous(transpose(attn_output, 1, 2))
    tape.kind = outer
    return attn_output, weights
