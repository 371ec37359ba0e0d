"""nanoGPT's model, and oomph's of the same shape."""

from __future__ import annotations

from collections.abc import Iterator

from oomph.config.schema import TrainConfig
from oomph.step.models.common import with_bias
from oomph.step.ops import Kind
from oomph.step.tensor.attention import attend, masked, softmax
from oomph.step.tensor.checkpoint import checkpoint
from oomph.step.tensor.elementwise import activation, add, dropout, pointwise, scale
from oomph.step.tensor.indexing import arange, embedding
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.loss import chunked_cross_entropy, cross_entropy, enter_loss
from oomph.step.tensor.norms import layer_norm
from oomph.step.tensor.products import linear, matmul
from oomph.step.tensor.tape import Module, forward
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import contiguous, reshape, split, transpose


def parameters(c: TrainConfig) -> Iterator[tuple[str, Shape]]:
    """Names and shapes in the order of nanoGPT's `named_parameters()`. A tied head has none of its own."""
    width = c.n_embd
    yield "transformer.wte.weight", (c.vocab_size, width)
    yield "transformer.wpe.weight", (c.block_size, width)
    for index in range(c.n_layer):
        block = f"transformer.h.{index}"
        yield from with_bias(f"{block}.ln_1", (width,), c.bias)
        yield from with_bias(f"{block}.attn.c_attn", (3 * width, width), c.bias)
        yield from with_bias(f"{block}.attn.c_proj", (width, width), c.bias)
        yield from with_bias(f"{block}.ln_2", (width,), c.bias)
        yield from with_bias(f"{block}.mlp.c_fc", (4 * width, width), c.bias)
        yield from with_bias(f"{block}.mlp.c_proj", (width, 4 * width), c.bias)
    yield from with_bias("transformer.ln_f", (width,), c.bias)
    if not c.tie_weights:
        yield "lm_head.weight", (c.vocab_size, width)


def attends_by_hand(c: TrainConfig) -> bool:
    """Whether the program multiplies queries by keys itself: nanoGPT without scaled_dot_product_attention."""
    return c.attention == "math" and c.trainer == "nanogpt"


@forward
def model(m: Module, ids: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor]:
    """GPT.forward with targets: logits, where they are made whole, and the loss."""
    c, tape = m.config, m.tape
    t = m / "transformer"
    positions = arange(tape, c.block_size)
    tok_emb = embedding(t / "wte", ids)  # (B, T, C)
    pos_emb = embedding(t / "wpe", positions)  # (T, C)
    x = add(tok_emb, pos_emb)
    if c.trainer != "nanogpt":  # nanoGPT's forward holds both to its end
        del tok_emb, pos_emb
    x = dropout(x, c.dropout)
    for index in tape.layers:
        tape.block = index
        layer = t / "h" / index
        if tape.grad_enabled and index < c.checkpoint_layers:
            x = checkpoint(tape, lambda x, layer=layer: block(layer, x), x, random=c.dropout > 0)
        else:
            x = block(layer, x)
    tape.block = None
    x = layer_norm(t / "ln_f", x)
    head = (t / "wte" if c.tie_weights else m / "lm_head").parameter("weight")
    if c.loss_chunk:
        enter_loss(tape)
        tape.scope = "loss"
        return None, chunked_cross_entropy(x, head, c.loss_chunk)
    logits = linear(m / "lm_head", x, head, Kind.LOGITS)
    enter_loss(tape)
    tape.scope = "loss"
    return logits, cross_entropy(logits, targets)


@forward
def block(m: Module, x: Tensor) -> Tensor:
    """A transformer block. Backward needs 36 bytes for each number of x (eager, bfloat16 by autocast, flash attention):

    ln_1's output in half 2, queries, keys and values 6, the attended 2, their sum with x 4;
    ln_2's output in half 2, c_fc's output 8, gelu's 8, the sum 4. `compile/partition` says what a compiled one saves.
    """
    x = add(x, attention(m / "attn", layer_norm(m / "ln_1", x)))
    return add(x, mlp(m / "mlp", layer_norm(m / "ln_2", x)))


@forward
def attention(m: Module, x: Tensor) -> Tensor:
    c = m.config
    batch, tokens, width = x.shape
    heads, size = c.n_head, width // c.n_head
    q, k, v = split(linear(m / "c_attn", x), [width] * 3)
    k = transpose(reshape(k, batch, tokens, heads, size), 1, 2)  # (B, nh, T, hs)
    q = transpose(reshape(q, batch, tokens, heads, size), 1, 2)
    v = transpose(reshape(v, batch, tokens, heads, size), 1, 2)
    if attends_by_hand(c):
        tape = m.tape
        outer, tape.kind = tape.kind, Kind.ATTENTION
        att = scale(matmul(q, transpose(k, 2, 3)))
        triangle = tape.buffer(f"{m.name}.bias", (1, 1, tokens, tokens), "float32")
        att = masked(att, pointwise("masked_keys", triangle, dtype="bool"))
        att = softmax(att)
        att = dropout(att, c.dropout)
        y = matmul(att, v)
        y = contiguous(transpose(y, 1, 2))
        tape.kind = outer
    else:
        y = transpose(attend(q, k, v, kernel=c.attention, rate=c.dropout), 1, 2)
        outer, m.tape.kind = m.tape.kind, Kind.ATTENTION
        y = contiguous(y)
        m.tape.kind = outer
    y = reshape(y, batch, tokens, width)
    return dropout(linear(m / "c_proj", y), c.dropout)


@forward
def mlp(m: Module, x: Tensor) -> Tensor:
    x = linear(m / "c_fc", x)
    x = activation(x, "gelu")
    x = linear(m / "c_proj", x)
    return dropout(x, m.config.dropout)
