"""torchtitan's Llama 3 (github.com/pytorch/torchtitan at 5940ddeb5, torchtitan/models/llama/model.py).

Rotations by complex numbers in float32, keys and values repeated for every query head, and a loss outside the model:
logits in float32, all at once.

By tensor parallelism a rank runs the same with fewer heads, inner columns and words (`sharding.tensor_parallel`), and
norms of its part of each sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from oomph.step.models.common import by_head, head_dim
from oomph.step.models.llama import norm
from oomph.step.ops import Kind
from oomph.step.tensor import tensor_parallel
from oomph.step.tensor.attention import attend
from oomph.step.tensor.casts import to
from oomph.step.tensor.checkpoint import checkpoint
from oomph.step.tensor.elementwise import activate, add, mul
from oomph.step.tensor.indexing import embedding
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.loss import cross_entropy, enter_loss
from oomph.step.tensor.products import linear
from oomph.step.tensor.tape import Module, forward
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.tensor_parallel import gather, reduce_scatter
from oomph.step.tensor.views import contiguous, expand, reshape, transpose, unsqueeze


def parameters(c: Any) -> Iterator[tuple[str, Shape]]:
    """Names and shapes in the order of `named_parameters()`."""
    size, width, inner = head_dim(c), c.n_embd, c.intermediate_size
    queries, keys = c.n_head * size, (c.num_key_value_heads or c.n_head) * size
    yield "tok_embeddings.weight", (c.vocab_size, width)
    for index in range(c.n_layer):
        layer = f"layers.{index}"
        yield f"{layer}.attention.wq.weight", (queries, width)
        yield f"{layer}.attention.wk.weight", (keys, width)
        yield f"{layer}.attention.wv.weight", (keys, width)
        yield f"{layer}.attention.wo.weight", (width, queries)
        yield f"{layer}.feed_forward.w1.weight", (inner, width)
        yield f"{layer}.feed_forward.w2.weight", (width, inner)
        yield f"{layer}.feed_forward.w3.weight", (inner, width)
        yield f"{layer}.attention_norm.weight", (width,)
        yield f"{layer}.ffn_norm.weight", (width,)
    yield "norm.weight", (width,)
    yield "output.weight", (c.vocab_size, width)


def buffers(c: Any, _compute_bytes: int) -> list[tuple[str, int]]:
    """The rotations, as complex numbers."""
    return [("freqs_cis", 4 * c.block_size * head_dim(c))]


@forward
def model(m: Module, tokens: Tensor, labels: Tensor) -> tuple[Tensor | None, Tensor]:
    """Transformer.forward and the loss."""
    c, tape = m.config, m.tape
    ranks = c.tensor_parallel_degree
    table = m / "tok_embeddings"
    h = embedding(table, tokens) if ranks == 1 else tensor_parallel.embedding(table, tokens, ranks)
    for index in tape.layers:
        tape.block = index
        run = partial(block, m / "layers" / index)
        by_op = c.checkpoint_policy == "op"
        again = tape.grad_enabled and index < c.checkpoint_layers
        h = checkpoint(tape, run, h, by_op=by_op) if again else run(h)
    tape.block = None
    h = norm(m / "norm", h)
    if tape.compiles:  # its blocks are compiled, but not what follows them
        return None, h
    return head(m, h, labels)


def head(m: Module, h: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The output layer, and the loss outside the model."""
    tape, ranks = m.tape, m.config.tensor_parallel_degree
    pred = linear(m / "output", gather(h, ranks), None, Kind.LOGITS)
    enter_loss(tape)
    tape.scope = "loss"
    wide = to(pred, "float32")
    return pred, cross_entropy(wide, labels) if ranks == 1 else tensor_parallel.cross_entropy(wide, labels, ranks)


@forward
def block(m: Module, x: Tensor) -> Tensor:
    """TransformerBlock.forward."""
    h = add(x, attention(m / "attention", norm(m / "attention_norm", x)))
    return add(h, feed_forward(m / "feed_forward", norm(m / "ffn_norm", h)))


@forward
def feed_forward(m: Module, x: Tensor) -> Tensor:
    """FeedForward.forward: w2(silu(w1(x)) * w3(x))."""
    ranks = m.config.tensor_parallel_degree
    whole = gather(x, ranks)
    return reduce_scatter(
        linear(m / "w2", mul(activate(linear(m / "w1", whole), "silu"), linear(m / "w3", whole))), ranks
    )


@forward
def attention(m: Module, x: Tensor) -> Tensor:
    """Attention.forward."""
    c = m.config
    size, ranks = head_dim(c), c.tensor_parallel_degree
    whole = gather(x, ranks)
    xq, xk, xv = (by_head(linear(m / name, whole), size) for name in ("wq", "wk", "wv"))
    xq, xk = _rotated(m, xq), _rotated(m, xk)
    repeated = c.n_head // (c.num_key_value_heads or c.n_head)
    keys, values = _repeat_kv(xk, repeated), _repeat_kv(xv, repeated)
    xq, xk, xv = (transpose(each, 1, 2) for each in (xq, keys, values))
    output = attend(xq, xk, xv, kernel=c.attention)
    output = contiguous(transpose(output, 1, 2))
    return reduce_scatter(linear(m / "wo", reshape(output, *whole.shape[:2], c.n_head * size)), ranks)


def _rotated(m: Module, x: Tensor) -> Tensor:
    """apply_rotary_emb: a complex number takes as many bytes as two float32 numbers."""
    _, tokens, _, size = x.shape
    freqs_cis = m.tape.buffer("freqs_cis", (1, tokens, 1, size), "float32")
    return to(mul(to(x, "float32"), freqs_cis), x.dtype)


def _repeat_kv(x: Tensor, times: int) -> Tensor:
    if times == 1:
        return x
    batch, tokens, heads, size = x.shape
    return reshape(expand(unsqueeze(x, 3), batch, tokens, heads, times, size), batch, tokens, heads * times, size)
