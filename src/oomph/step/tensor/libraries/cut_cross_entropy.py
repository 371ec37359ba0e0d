"""Cut cross-entropy (cut_cross_entropy 25.1.1, cce.py): head and loss in kernels that never write out logits.

Backward recomputes the logits. Kernels skip blocks whose gradient is too small for its dtype; how many depends on
the data, and none are skipped here, so the time is an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.ops import Kernel
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.casts import autocast_half, to
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import reshape

_LOCK = 64  # columns of a gradient that one lock guards


def cut_cross_entropy(hidden: Tensor, weight: Tensor) -> Tensor:
    """The loss of `hidden` under the head's `weight`, both in half precision under autocast."""
    tape, width = hidden.tape, hidden.shape[-1]
    rows, words = hidden.numel // width, weight.shape[0]
    e, c = autocast_half(reshape(hidden, rows, width)), autocast_half(weight)

    def backward(node: Node, _grads: Gradients) -> Sequence[Tensor | None]:
        _kept = node.unpack()
        order = tape.launch("sort", (("", 4 * words), ("places", 8 * words)), kernel=Kernel.REDUCTION, moved=24 * words)
        de = tape.made("de", (rows, width), e_dtype) if node.needs(0) else None
        dc = tape.made("dc", (words, width), e_dtype, kind=tape.grad_kind(node, 1)) if node.needs(1) else None
        locks = -(-width // _LOCK)
        held = [tape.made("locks", (-(-count // locks), locks), "float32") for count in (rows, words)]
        products = 1 + (de is not None) + (dc is not None)
        for _ in range(products):
            tape.product("cce", 1, rows, words, width, e_dtype, into=True)
        del order, held
        return [de, None if dc is None else to(dc, node.dtypes[1], tape.grad_kind(node, 1))]

    e_dtype = e.dtype
    node = tape.node(backward, e, c)
    lse = tape.made("lse", (rows,), "float32", moved=0)
    mean = tape.made("logit_avg", (words,), "float32", moved=0)
    tape.product("cce", 1, rows, words, width, e_dtype, into=True)
    nll = tape.made("neg_dot", (rows,), "float32", moved=2 * e.bytes)
    loss = tape.made("mean", (), "float32", (nll,), kernel=Kernel.REDUCTION)
    del nll
    if node:
        node.save(e, lse, mean)
        node.attach(loss)
    return loss
