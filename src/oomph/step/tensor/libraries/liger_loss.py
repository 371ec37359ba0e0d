"""Liger's fused loss (liger_kernel/ops/fused_linear_cross_entropy.py, 2026-08-21): the head and the loss by chunks.

The forward computes the gradients too, so at most one chunk's logits exist at a time. A chunk has the number of rows,
a power of two, at which its logits are about as large as the hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.layout import HALVES
from oomph.step.tensor.loss import chunks
from oomph.step.tensor.tape import Tape
from oomph.step.tensor.tensor import Storage, Tensor
from oomph.step.tensor.views import reshape


def chunk_rows(rows: int, width: int, words: int) -> int:
    """The number of rows in a chunk."""
    least = -(-rows // -(-words // width))
    return 1 << (least - 1).bit_length()


def fused_cross_entropy(hidden: Tensor, weight: Tensor) -> Tensor:
    """The loss of `hidden` under the head's `weight`; computes the gradients of what is trained along with it."""
    tape, width = hidden.tape, hidden.shape[-1]
    rows, (words, _) = hidden.numel // width, weight.shape
    x = reshape(hidden, rows, width)
    node = tape.node(_backward, x, weight)
    grad_input = tape.made("grad_input", x.shape, x.dtype)
    trained = node is not None and node.needs(1)
    grad_weight = tape.made("grad_weight", weight.shape, weight.dtype, kind=Kind.GRADIENTS) if trained else None
    loss_1d = tape.made("loss_1d", (rows,), "float32")
    target_mask = tape.made("target_mask", (rows,), "bool")
    grad_logits: Storage | None = None  # the last chunk's, until the next one's exists
    for count, tape.ledger.times in chunks(rows, chunk_rows(rows, width, words)):
        logits = _logits(tape, count, x.dtype, weight)
        grad_logits = logits
        if node is not None:
            _gradients(tape, count, x.dtype, weight, trained)
    tape.ledger.times = 1
    loss = tape.made("sum", (), "float32", (loss_1d,), kernel=Kernel.REDUCTION)
    del loss_1d, target_mask, logits, grad_logits
    if node:
        node.save(grad_input)
        if grad_weight is not None:
            node.save(grad_weight)
        node.attach(loss)
    return loss


def _logits(tape: Tape, rows: int, dtype: str, weight: Tensor) -> Storage | None:
    """A chunk's logits, which their gradient overwrites."""
    words, width = weight.shape
    half = tape.autocast or dtype
    rounded = tape.made("to", (rows, width), half) if dtype != half else None
    head = _rounded_head(tape, weight, half)
    logits = tape.product("chunk_logits", 1, rows, words, width, half)
    del rounded, head
    tape.note("cross_entropy", Kernel.REDUCTION, moved=2 * (logits.bytes if logits is not None else 0))
    return logits


def _gradients(tape: Tape, rows: int, dtype: str, weight: Tensor, trained: bool) -> None:
    """The chunk's rows of the input's gradient, and its part of the weight's if that is trained."""
    words, width = weight.shape
    half = tape.autocast or dtype
    head = _rounded_head(tape, weight, half)
    _rows = tape.product("chunk_grad_input", 1, rows, width, words, half)
    del head, _rows
    if not trained:
        return
    rounded = tape.made("to", (rows, width), half) if dtype != half else None
    if tape.cuda and weight.dtype == "float32" and half in HALVES:  # a single product, since torch 2.8 on Ampere
        tape.product("chunk_grad_weight", 1, words, width, rows, half, into=True)
        return
    made = tape.product("chunk_grad_weight", 1, words, width, rows, half)
    grad = tape.tensor(made, weight.shape, half)
    del made, rounded
    grad = tape.cast(grad, "float32") if half != "float32" else grad
    tape.note("add", moved=3 * weight.bytes)


def _rounded_head(tape: Tape, weight: Tensor, half: str) -> Tensor | None:
    """The head as autocast passes it to a product: a transposed view, whose copy is not cached."""
    return tape.cast(weight, half, Kind.HALF_WEIGHTS) if weight.dtype != half else None


def _backward(node: Node, _grads: Gradients) -> Sequence[Tensor | None]:
    """Both gradients, scaled in place."""
    saved = node.unpack()
    one = node.tape.made("one", (), "float32")
    del one
    for each in saved:
        node.tape.note("scale", moved=2 * each.bytes)
    found = [each for each in saved if isinstance(each, Tensor)]
    return [found[0] if node.needs(0) else None, found[1] if node.needs(1) else None]
