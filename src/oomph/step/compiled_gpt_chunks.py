"""The chunked head and loss after a compiled model: an autograd function of its own, run eagerly.

The model is compiled up to its hidden state. What the function allocates is described in `gpt_eager_loss`: gradients
of the hidden state and of the head are made in the forward, a chunk of rows at a time.
"""

from __future__ import annotations

from oomph.step.compiled_gpt import Sizes
from oomph.step.compiled_reuse import Generated
from oomph.step.gpt_eager_loss import chunks
from oomph.step.ops import Buffer, Kernel, Kind


def chunked_loss(p: Generated, s: Sizes, hidden: Buffer, learns: bool) -> tuple[Buffer, tuple[Buffer, ...]]:
    """The loss, and where it learns the gradients of the hidden state and of the head's weight."""
    count = s.vocab * s.width
    copies: list[Buffer] = []
    if s.autocast:
        copies.append(_made(p, "lm_head.input.half", 2 * s.rows * s.width, Kind.ACTIVATIONS))
        copies.append(_made(p, "lm_head.weight.half", 2 * count, Kind.HALF_WEIGHTS))
    loss = _made(p, "loss", 4, Kind.LOGITS)
    grads: tuple[Buffer, ...] = ()
    if learns:
        grads = (
            _made(p, "loss.grad_hidden", s.rows * s.width * s.compute, Kind.LOGITS),
            _made(p, "lm_head.weight.grad", count * s.weight, Kind.GRADIENTS),
        )
    for rows, p.times in chunks(s.rows, s.chunk):
        _chunk(p, s, rows, learns)
    p.times = 1
    p.release(hidden, *copies)
    return loss, grads


def chunked_backward(p: Generated, s: Sizes, grads: tuple[Buffer, ...]) -> Buffer:
    """The hidden state's gradient as the compiled backward takes it."""
    hidden, _ = grads
    count = s.rows * s.width
    p.run("loss.backward", Kernel.POINTWISE, 2 * count * s.compute + 2 * s.vocab * s.width * s.weight)
    if s.compute == s.weight:
        return hidden
    flow = _made(p, "loss.grad_hidden.float", count * s.weight, Kind.TEMPORARY)
    p.release(hidden)
    return flow


def _made(p: Generated, name: str, size_bytes: int, kind: Kind) -> Buffer:
    buffer = p.made(name, size_bytes, kind)
    p.run(name, Kernel.POINTWISE, size_bytes)
    return buffer


def _chunk(p: Generated, s: Sizes, rows: int, learns: bool) -> None:
    count = rows * s.vocab
    logits = p.made("loss.chunk_logits", count * s.compute, Kind.LOGITS)
    p.product("loss.chunk_logits", rows, s.vocab, s.width, s.compute)
    if s.compute == 2:
        wide = _made(p, "loss.chunk_logits.float", 4 * count, Kind.LOGITS)
        p.release(logits)
        logits = wide
    p.run("loss.chunk_softmax", Kernel.REDUCTION, 8 * count)
    if learns:
        p.run("loss.chunk_backward", Kernel.POINTWISE, 16 * count)
        if s.compute == 2:
            narrow = _made(p, "loss.chunk_logits.grad", 2 * count, Kind.LOGITS)
            p.release(logits)
            logits = narrow
        p.product("loss.chunk_grad_hidden", rows, s.width, s.vocab, s.compute)
        own = s.compute != s.weight
        if own:
            own_grad = p.made("loss.chunk_grad_weight", s.vocab * s.width * s.compute, Kind.TEMPORARY)
        p.product("loss.chunk_grad_weight", s.vocab, s.width, rows, s.compute)
        if own:
            p.run("loss.chunk_grad_weight.sum", Kernel.POINTWISE, s.vocab * s.width * (s.compute + 2 * s.weight))
            p.release(own_grad)
    p.release(logits)
