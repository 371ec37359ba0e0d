"""Liger's kernels inside a block (liger_kernel 0.8.5, ops/): RMSNorm, SwiGLU and rotary embeddings, each in one pass.

They save only their inputs and write gradients over existing tensors. Liger's fused loss is in `liger_loss`.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.ops import Kernel
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.casts import to
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import contiguous, swapped

# RMSNorm's backward sums the weight's gradient in one row per multiprocessor of the card: an H100's, as the card is
# not known here. For a width of 4,096 that is a temporary of 2 MiB.
MULTIPROCESSORS = 132


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """LigerRMSNormFunction: saves its input and one number per row; the input's gradient overwrites the output's,
    and is a view of it, so the engine never adds into it."""
    tape, width = x.tape, x.shape[-1]

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        _kept = node.unpack()
        assert grads[0] is not None
        grad = contiguous(grads[0])
        if not node.needs(1):
            tape.note("dx", Kernel.REDUCTION, moved=3 * grad.bytes)
            return [grad.as_strided(grad.shape, grad.strides), None]
        rows = tape.made("dw", (MULTIPROCESSORS, width), "float32", kernel=Kernel.REDUCTION, moved=3 * grad.bytes)
        total = tape.made("sum", (width,), "float32", (rows,), tape.grad_kind(node, 1), kernel=Kernel.REDUCTION)
        return [grad.as_strided(grad.shape, grad.strides), to(total, node.dtypes[1], tape.grad_kind(node, 1))]

    x = contiguous(x)
    node = tape.node(backward, x, weight)
    out = tape.made("rms_norm", x.shape, x.dtype, (x,), kernel=Kernel.REDUCTION)
    inverse = tape.made("rstd", (x.numel // width,), "float32", moved=0)
    if node:
        node.save(x, inverse)
        node.attach(out)
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """LigerSiLUMulFunction: saves both inputs, whose gradients overwrite them."""
    tape = gate.tape

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        kept = node.unpack()
        assert grads[0] is not None
        tape.note("dx", moved=5 * grads[0].bytes)
        return [each if isinstance(each, Tensor) else None for each in kept]

    node = tape.node(backward, gate, up)
    out = tape.made("swiglu", gate.shape, gate.dtype, (gate, up))
    if node:
        node.save(gate, up)
        node.attach(out)
    return out


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """LigerRopeFunction: queries and keys are rotated in place, and so are their gradients."""
    tape = q.tape

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        _kept = node.unpack()
        found = [None if each is None else contiguous(swapped(each, 1, 2)) for each in grads]
        tape.note("rope.dx", moved=2 * sum(each.bytes for each in found if each is not None))
        return [None if each is None else swapped(each, 1, 2) for each in found]

    node = tape.node(backward, q, k)
    turned = [contiguous(swapped(each, 1, 2)) for each in (q.detach(), k.detach())]
    tape.note("rope", moved=2 * (q.bytes + k.bytes))
    outs = [swapped(each, 1, 2) for each in turned]
    if node:
        node.save(cos, sin)
        for index, out in enumerate(outs):
            node.attach(out, index)
    return outs[0], outs[1]
