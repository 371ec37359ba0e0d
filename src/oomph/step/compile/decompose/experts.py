"""What a mixture of experts computes, in smaller operations."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.compile.decompose.nodes import attach, pointwise, recorder_of, reduction
from oomph.step.compile.graph import How
from oomph.step.ops import Kind
from oomph.step.tensor import functions as F
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.tensor import Tensor


def total(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """x.sum(dim); backward sees each sum's gradient often."""
    x = F.raised(x)
    dim %= len(x.shape)
    kept = (*x.shape[:dim], 1, *x.shape[dim + 1 :])

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        return [F.expand(grad if keepdim else F.unsqueeze(grad, dim), *node.shapes[0])]

    node = x.tape.node(backward, x)
    out = reduction("sum", x, kept)
    return attach(node, out if keepdim else F._reshaped(out, (*x.shape[:dim], *x.shape[dim + 1 :])))


def divide_into(x: Tensor, y: Tensor) -> Tensor:
    """x /= y: in a graph nothing is overwritten."""

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        squared = pointwise("div", pointwise("div", x, y), y)
        dy = pointwise("mul", pointwise("neg", grads[0]), squared)
        return [pointwise("div", grads[0], y), dy]

    node = x.tape.node(backward, x, y)
    return attach(node, pointwise("div", x, y))


def _grouped(a: Tensor, b: Tensor, offsets: Tensor, shape: Shape, kind: Kind | None = None) -> Tensor:
    """`_grouped_mm`: each row, or each term of a sum, belongs to one of the groups."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    unit = "tf32" if a.dtype == "float32" and a.tape.tf32 else a.dtype
    facts = {"shape": (1, m, n, k), "flops": 2 * m * n * k, "dtype": unit}
    record = recorder_of(a).record
    return record("grouped_mm", How.PRODUCT, (a, b, offsets), shape, a.dtype, kind=kind, facts=facts)


def grouped_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """F.grouped_mm(x, weight.transpose(-2, -1), offs=offsets); the weight's gradient is computed first."""
    recorder = recorder_of(x)
    turned = F._swapped(weight, 1, 2)

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        dw = dx = None
        if node.needs(1):
            dw = _grouped(F._swapped(grad, 0, 1), x, offsets, weight.shape, recorder.grad_kind(node, 1))
        if node.needs(0):
            dx = _grouped(grad, F._swapped(turned, 1, 2), offsets, x.shape)
        return [dx, dw]

    node = recorder.node(backward, x, weight)
    return attach(node, _grouped(x, turned, offsets, (x.shape[0], weight.shape[1])))
