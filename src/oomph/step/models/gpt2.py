"""nanoGPT's model, and oomph's, which has the same names and whose parts config keys replace with modern ones."""

from __future__ import annotations

from collections.abc import Iterator

from oomph.config.schema import TrainConfig
from oomph.config.shape import head_size, inner_size, qkv_widths
from oomph.step.models import lora
from oomph.step.models.common import by_head, with_bias
from oomph.step.ops import Kind
from oomph.step.tensor.attention import attend, masked, softmax
from oomph.step.tensor.casts import to
from oomph.step.tensor.checkpoint import checkpoint
from oomph.step.tensor.elementwise import activate, add, dropout, mul, pointwise, scale, sub
from oomph.step.tensor.indexing import arange, embedding
from oomph.step.tensor.layout import ITEM_BYTES, Shape
from oomph.step.tensor.loss import chunked_cross_entropy, cross_entropy, enter_loss
from oomph.step.tensor.norms import layer_norm, rms_norm
from oomph.step.tensor.products import linear, matmul
from oomph.step.tensor.tape import Module, forward
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import cat, contiguous, reshape, split, transpose


def parameters(c: TrainConfig) -> Iterator[tuple[str, Shape]]:
    """Names and shapes in the order of nanoGPT's `named_parameters()`. A tied head is left out."""
    width, inner, widths = c.n_embd, inner_size(c), qkv_widths(c)
    norm_bias = c.bias and c.norm_type == "layernorm"
    yield "transformer.wte.weight", (c.vocab_size, width)
    if not rotates(c):
        yield "transformer.wpe.weight", (c.block_size, width)
    for index in range(c.n_layer):
        block = f"transformer.h.{index}"
        yield from with_bias(f"{block}.ln_1", (width,), norm_bias)
        yield from with_bias(f"{block}.attn.c_attn", (sum(widths), width), c.bias)
        yield from with_bias(f"{block}.attn.c_proj", (width, widths[0]), c.bias)
        if c.use_qk_norm:
            yield f"{block}.attn.q_norm.weight", (head_size(c),)
            yield f"{block}.attn.k_norm.weight", (head_size(c),)
        yield from with_bias(f"{block}.ln_2", (width,), norm_bias)
        yield from with_bias(f"{block}.mlp.c_fc", (2 * inner if c.is_gated_act else inner, width), c.bias)
        yield from with_bias(f"{block}.mlp.c_proj", (width, inner), c.bias)
    yield from with_bias("transformer.ln_f", (width,), norm_bias)
    if not c.tie_weights:
        yield "lm_head.weight", (c.vocab_size, width)


def rotates(c: TrainConfig) -> bool:
    """Whether positions are encoded by rotating queries and keys."""
    return c.position_embedding_type == "rotary"


def _table_dtype(c: TrainConfig) -> str:
    """The dtype of the cosines and sines, which `model.to` casts with the weights."""
    return "float32" if c.autocast else c.dtype or "float32"


def buffers(c: TrainConfig, _compute_bytes: int) -> list[tuple[str, int]]:
    """What the model keeps besides its parameters: tables of cosines and sines."""
    size_bytes = c.block_size * (head_size(c) // 2) * ITEM_BYTES[_table_dtype(c)]
    return [(name, size_bytes) for name in ("cos", "sin")] if rotates(c) else []


def attends_by_hand(c: TrainConfig) -> bool:
    """Whether the program computes attention itself: nanoGPT without scaled_dot_product_attention."""
    return c.attention == "math" and c.trainer == "nanogpt"


@forward
def model(m: Module, ids: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor]:
    """GPT.forward with targets: the logits, if they are made whole, and the loss."""
    c, tape = m.config, m.tape
    t = m / "transformer"
    rotary = _tables(m) if rotates(c) else None
    if rotary is not None:
        x = embedding(t / "wte", ids)
    else:
        positions = arange(tape, c.block_size)
        tok_emb = embedding(t / "wte", ids)  # (B, T, C)
        pos_emb = embedding(t / "wpe", positions)  # (T, C)
        x = add(tok_emb, pos_emb)
        if c.trainer != "nanogpt":  # nanoGPT's forward holds both until it returns
            del tok_emb, pos_emb
    x = dropout(x, c.dropout)
    if rotary is None and c.trainer != "nanogpt":
        del positions  # ours were embedded in a function, which has returned
    for index in tape.layers:
        tape.block = index
        layer = t / "h" / index
        if tape.grad_enabled and index < c.checkpoint_layers:
            x = checkpoint(tape, lambda x, layer=layer: block(layer, x, rotary), x, random=c.dropout > 0)
        else:
            x = block(layer, x, rotary)
    tape.block = None
    x = norm(t / "ln_f", x)
    head = (t / "wte" if c.tie_weights else m / "lm_head").parameter("weight")
    if c.loss_chunk:
        enter_loss(tape)
        tape.scope = "loss"
        return None, chunked_cross_entropy(x, head, c.loss_chunk)
    logits = linear(m / "lm_head", x, head, Kind.LOGITS)
    enter_loss(tape)
    tape.scope = "loss"
    return logits, cross_entropy(logits, targets)


def _tables(m: Module) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (T, 1, half a head)."""
    shape, dtype = (m.config.block_size, 1, head_size(m.config) // 2), _table_dtype(m.config)
    return m.tape.buffer("cos", shape, dtype), m.tape.buffer("sin", shape, dtype)


@forward
def norm(m: Module, x: Tensor) -> Tensor:
    """A norm of the residual stream."""
    return rms_norm(x, m.parameter("weight")) if m.config.norm_type == "rmsnorm" else layer_norm(m, x)


@forward
def block(m: Module, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """A transformer block. Backward needs 36 bytes per element of x (eager, bfloat16 autocast, flash attention):

    ln_1's output in half 2, queries, keys and values 6, attention's output 2, its sum with x 4;
    ln_2's output in half 2, c_fc's output 8, gelu's 8, the sum 4. `compile/partition` has what a compiled one saves.
    """
    x = add(x, attention(m / "attn", norm(m / "ln_1", x), rotary))
    return add(x, mlp(m / "mlp", norm(m / "ln_2", x)))


@forward
def attention(m: Module, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    c = m.config
    widths, size = qkv_widths(c), head_size(c)
    q, k, v = (by_head(each, size) for each in split(lora.linear(m / "c_attn", x), widths))  # (B, T, nh, hs)
    if c.use_qk_norm:
        q, k = rms_norm(q, (m / "q_norm").parameter("weight")), rms_norm(k, (m / "k_norm").parameter("weight"))
    if rotary is not None:
        q, k = rotated(q, *rotary), rotated(k, *rotary)
    k = transpose(k, 1, 2)  # (B, nh, T, hs)
    q = transpose(q, 1, 2)
    v = transpose(v, 1, 2)
    y, _att = _attend_by_hand(m, q, k, v) if attends_by_hand(c) else (_attend(m, q, k, v), None)
    y = reshape(y, *x.shape[:2], widths[0])
    return dropout(lora.linear(m / "c_proj", y), c.dropout)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The halves of each head rotated against each other, in the tables' dtype."""
    first, second = split(x, [x.shape[-1] // 2] * 2)
    return to(cat([sub(mul(first, cos), mul(second, sin)), add(mul(second, cos), mul(first, sin))]), x.dtype)


def _attend(m: Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention: (B, T, nh, hs), contiguous."""
    tape, c = m.tape, m.config
    y = transpose(attend(q, k, v, kernel=c.attention, rate=c.dropout), 1, 2)
    outer, tape.kind = tape.kind, Kind.ATTENTION
    y = contiguous(y)
    tape.kind = outer
    return y


def _attend_by_hand(m: Module, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """nanoGPT's attention without PyTorch's kernels; and its weights, which the forward holds until it returns."""
    tape, tokens = m.tape, q.shape[2]
    outer, tape.kind = tape.kind, Kind.ATTENTION
    att = scale(matmul(q, transpose(k, 2, 3)))
    triangle = tape.buffer(f"{m.name}.bias", (1, 1, tokens, tokens), "float32")
    att = masked(att, pointwise("masked_keys", triangle, dtype="bool"))
    att = softmax(att)
    att = dropout(att, m.config.dropout)
    y = matmul(att, v)
    y = contiguous(transpose(y, 1, 2))
    tape.kind = outer
    return y, att


@forward
def mlp(m: Module, x: Tensor) -> Tensor:
    x = lora.linear(m / "c_fc", x)
    x = _activated(m.config, x)
    x = lora.linear(m / "c_proj", x)
    return dropout(x, m.config.dropout)


def _activated(c: TrainConfig, x: Tensor) -> Tensor:
    name = c.hidden_act or "gelu"
    if not c.is_gated_act:
        return activate(x, name)
    gate, up = split(x, [x.shape[-1] // 2] * 2)
    return mul(activate(gate, name), up)
