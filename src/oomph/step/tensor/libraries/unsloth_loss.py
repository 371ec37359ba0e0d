"""Unsloth's fused loss (unsloth_zoo 2026.8.13, fused_losses/cross_entropy_loss.py): head and loss by chunks of tokens.

The forward computes the gradients too. A chunk is compiled: the gradient overwrites its logits, which are in the
model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.layout import ITEM_BYTES
from oomph.step.tensor.loss import chunks
from oomph.step.tensor.tape import Tape
from oomph.step.tensor.tensor import Tensor


def fused_loss(hidden: Tensor, head: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """UnslothFusedLoss: the loss of `hidden` under the head, `chunk` tokens at a time."""
    tape, width = hidden.tape, hidden.shape[-1]
    rows, dtype = hidden.numel // width, head.dtype
    node = tape.node(_backward, hidden, head)
    _labels = tape.made("labels", labels.shape, "int64", (labels,), Kind.INPUTS)
    grad_inputs = tape.made("grad_inputs", hidden.shape, hidden.dtype, kernel=Kernel.NONE, moved=0)
    trained = node is not None and node.needs(1)
    grad_head = tape.made("grad_lm_head", head.shape, dtype, kind=Kind.GRADIENTS) if trained else None
    loss = tape.made("", (), "float32")
    for count, tape.ledger.times in chunks(rows, chunk):
        _chunk(tape, count, head, trained)
    tape.ledger.times = 1
    if node:
        node.save(grad_inputs, *([grad_head] if grad_head is not None else []))
        node.attach(loss)
    return loss


def _chunk(tape: Tape, rows: int, head: Tensor, trained: bool) -> None:
    """accumulate_chunk as inductor compiles it: three numbers per row, and products into buffers to be added."""
    words, width = head.shape
    dtype, size = head.dtype, rows * words * ITEM_BYTES[head.dtype]
    logits = tape.product("chunk_logits", 1, rows, words, width, dtype)
    numbers = [("maximum", 4 * rows), ("total", 4 * rows), ("target", 4 * rows)]
    statistics = tape.launch("chunk_softmax", numbers, kernel=Kernel.REDUCTION, moved=size)
    tape.note("chunk_dlogits", Kernel.POINTWISE, 2 * size)
    statistics.clear()
    grad = tape.product("chunk_grad_input", 1, rows, width, words, dtype)
    own = tape.product("chunk_grad_head", 1, words, width, rows, dtype, Kind.TEMPORARY) if trained else None
    del logits
    tape.note("add", Kernel.POINTWISE, (2 * rows + (3 * words if trained else 0)) * width * ITEM_BYTES[dtype])
    del grad, own


def _backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    """Both gradients, scaled into copies while the saved ones are held."""
    tape, saved = node.tape, node.unpack()
    assert grads[0] is not None
    kinds = [tape.kind, Kind.GRADIENTS]
    made = [
        tape.made("scaled", each.shape, each.dtype, (each,), kind)
        for each, kind in zip(saved, kinds, strict=False)
        if isinstance(each, Tensor)
    ]
    return [made[0], made[1] if len(made) > 1 else None]
