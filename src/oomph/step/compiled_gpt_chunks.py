"""The chunked head and loss after a compiled model: an autograd function of its own.

The model is compiled up to its hidden state. The function makes gradients of the hidden state and of the head in the
forward, a chunk of rows at a time, as `gpt_eager_loss` describes it, but for what lies between a chunk's products.
That is compiled, and comes to three kernels, which inductor's own plan of it shows: a softmax in one pass reads the
logits in the compute dtype and writes a maximum and a total a row; a small one picks the targets and sums up; the last
reads the logits again and writes their gradient in their place. Under autocast the head's half copy, and with it the
logits, is filled up with zeros to whole groups of words.
"""

from __future__ import annotations

from oomph.step.compiled_gpt import Sizes
from oomph.step.compiled_reuse import Generated
from oomph.step.ops import Buffer, Kernel, Kind
from oomph.step.tensor.loss import chunks

GROUP = 8  # words, as in training.loss


def filled_up(s: Sizes) -> int:
    """The words of the head in the products."""
    return s.vocab + -s.vocab % GROUP if s.autocast else s.vocab


def chunked_loss(p: Generated, s: Sizes, hidden: Buffer, learns: bool) -> tuple[Buffer, tuple[Buffer, ...]]:
    """The loss, and where it learns the gradients of the hidden state and of the head's weight."""
    count = s.vocab * s.width
    copies: list[Buffer] = []
    if s.autocast:
        copies.append(_made(p, "lm_head.input.half", 2 * s.rows * s.width, Kind.ACTIVATIONS))
        copies.append(_made(p, "lm_head.weight.half", 2 * filled_up(s) * s.width, Kind.HALF_WEIGHTS))
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
    scale = _made(p, "loss.scale", 4, Kind.LOGITS)
    p.run("loss.backward", Kernel.POINTWISE, 2 * count * s.compute + 2 * s.vocab * s.width * s.weight)
    flow = hidden
    if s.compute != s.weight:
        flow = _made(p, "loss.grad_hidden.float", count * s.weight, Kind.TEMPORARY)
        p.release(hidden)
    p.release(scale)
    return flow


def _made(p: Generated, name: str, size_bytes: int, kind: Kind) -> Buffer:
    buffer = p.made(name, size_bytes, kind)
    p.run(name, Kernel.POINTWISE, size_bytes)
    return buffer


def _chunk(p: Generated, s: Sizes, rows: int, learns: bool) -> None:
    words, logits_bytes = filled_up(s), rows * s.vocab * s.compute
    logits = p.made("loss.chunk_logits", rows * words * s.compute, Kind.LOGITS)
    p.product("loss.chunk_logits", rows, words, s.width, s.compute)
    statistics = [p.made(f"loss.chunk_{what}", 4 * rows, Kind.LOGITS) for what in ("maximum", "total")]
    p.run("loss.chunk_softmax", Kernel.REDUCTION, logits_bytes)
    summed = p.made("loss.chunk_sum", 4, Kind.LOGITS)
    p.run("loss.chunk_sum", Kernel.REDUCTION, (s.compute + 16) * rows)
    if learns:
        p.run("loss.chunk_dlogits", Kernel.POINTWISE, 2 * logits_bytes)
    p.release(*statistics)
    if learns:
        p.product("loss.chunk_grad_hidden", rows, s.width, words, s.compute)
        own: list[Buffer] = []
        if s.compute != s.weight:
            own.append(p.made("loss.chunk_grad_weight", words * s.width * s.compute, Kind.TEMPORARY))
        p.product("loss.chunk_grad_weight", words, s.width, rows, s.compute)
        if own:
            if not s.cuda:  # which adds a half product to float32 by way of a copy
                own.append(p.made("loss.chunk_promoted", s.vocab * s.width * s.weight, Kind.TEMPORARY))
            p.run("loss.chunk_grad_weight.sum", Kernel.POINTWISE, s.vocab * s.width * (s.compute + 2 * s.weight))
            p.release(*own)
    p.release(logits)
    p.run("loss.sum", Kernel.POINTWISE, 12)
    p.release(summed)
