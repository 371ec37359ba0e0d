"""Matrix products, decomposed."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.compile.decompose.nodes import as_dtype, attach, recorder_of
from oomph.step.compile.graph import How
from oomph.step.ops import Kernel, Kind
from oomph.step.tensor import casts, views
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.layout import Shape, contiguous_strides, numel
from oomph.step.tensor.tensor import Tensor


def _turned(x: Tensor) -> Tensor:
    return views.swapped(x, len(x.shape) - 2, len(x.shape) - 1)


def _multiplied(a: Tensor, b: Tensor, *more: Tensor, kind: Kind | None = None) -> Tensor:
    """mm, bmm, or addmm if there is something to add. Backward is recorded under forward's autocast too."""
    recorder = recorder_of(a)
    if recorder.autocast is not None:
        a, b = as_dtype(a, recorder.autocast), as_dtype(b, recorder.autocast)
    (*batch, m, k), n = a.shape, b.shape[-1]
    count = numel(batch)
    unit = "tf32" if a.dtype == "float32" and a.tape.tf32 else a.dtype
    facts = {"shape": (count, m, n, k), "flops": 2 * count * m * n * k, "dtype": unit}
    op = "bmm" if batch else "addmm" if more else "mm"
    return recorder_of(a).record(op, How.PRODUCT, (a, b, *more), (*batch, m, n), a.dtype, kind=kind, work=facts)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, kind: Kind | None = None) -> Tensor:
    """x @ weight.T + bias."""
    recorder, shape = recorder_of(x), x.shape

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        grad = views.as_shape(grad, (rows, outputs))
        dw = dx = db = None
        for index in (2, 1) if bias is None else (1, 2):  # mm's backward begins with the weight, addmm's with the input
            if index == 2 and node.needs(2):
                dw = _multiplied(_turned(grad), flat, kind=Kind.GRADIENTS)
            elif index == 1 and node.needs(1):
                dx = _multiplied(grad, _turned(turned), kind=recorder.kind)
        if node.needs(0):
            db = recorder.made("sum", (1, outputs), grad.dtype, (grad,), Kind.GRADIENTS, kernel=Kernel.REDUCTION)
            db = db.as_strided((outputs,), (1,))
        return [db, dx.as_strided(shape, contiguous_strides(shape)) if dx else None, dw]

    node = recorder.node(backward, bias, x, weight)
    outputs, inputs = weight.shape
    turned = _turned(weight)
    rows = x.numel // inputs
    flat = views.as_shape(x, (rows, inputs))
    added = (bias,) if bias is not None else ()
    out = recorder.kept(lambda: _multiplied(flat, turned, *added, kind=kind), product=True)
    wide = (*shape[:-1], outputs)
    return attach(node, out.as_strided(wide, contiguous_strides(wide)))


def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """bias + x @ weight."""
    recorder = recorder_of(x)
    if recorder.autocast is not None:
        weight, x, bias = casts.autocast_half(weight), casts.autocast_half(x), casts.autocast_half(bias)

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        dx = _multiplied(grad, _turned(weight), kind=recorder.kind) if node.needs(1) else None
        dw = _multiplied(_turned(x), grad, kind=Kind.GRADIENTS) if node.needs(2) else None
        return [grad, dx, dw]

    node = recorder.node(backward, bias, x, weight)
    return attach(node, _multiplied(x, weight, bias))


def _expanded(x: Tensor) -> Tensor:
    """x.expand to its own shape, which AOTAutograd keeps as an operation."""

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        return grads

    node = x.tape.node(backward, x)
    return attach(node, recorder_of(x).record("expand", How.VIEW, (x,), x.shape, x.dtype, x.strides))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for (batch, heads, rows, columns): expand, view or copy, bmm."""
    recorder = recorder_of(a)
    a, b = (casts.autocast_half(a), casts.autocast_half(b)) if recorder.autocast is not None else (a, b)
    batch = a.shape[:-2]
    flat_a, flat_b = (views.reshape(_expanded(each), numel(each.shape[:-2]), *each.shape[-2:]) for each in (a, b))

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        db = _multiplied(_turned(flat_a), grad) if node.needs(1) else None
        return [_multiplied(grad, _turned(flat_b)) if node.needs(0) else None, db]

    node = recorder.node(backward, flat_a, flat_b)
    out = attach(node, _multiplied(flat_a, flat_b))
    return views.reshape(out, *batch, out.shape[-2], out.shape[-1])


def _grouped(a: Tensor, b: Tensor, offsets: Tensor, shape: Shape, kind: Kind | None = None) -> Tensor:
    """`_grouped_mm`: each row, or each term of the sum, belongs to one group."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    unit = "tf32" if a.dtype == "float32" and a.tape.tf32 else a.dtype
    facts = {"shape": (1, m, n, k), "flops": 2 * m * n * k, "dtype": unit}
    record = recorder_of(a).record
    return record("grouped_mm", How.PRODUCT, (a, b, offsets), shape, a.dtype, kind=kind, work=facts)


def grouped_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """F.grouped_mm(x, weight.transpose(-2, -1), offs=offsets); the weight's gradient is computed first."""
    recorder = recorder_of(x)
    turned = views.swapped(weight, 1, 2)

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        dw = dx = None
        if node.needs(1):
            dw = _grouped(views.swapped(grad, 0, 1), x, offsets, weight.shape, recorder.grad_kind(node, 1))
        if node.needs(0):
            dx = _grouped(grad, views.swapped(turned, 1, 2), offsets, x.shape)
        return [dx, dw]

    node = recorder.node(backward, x, weight)
    return attach(node, _grouped(x, turned, offsets, (x.shape[0], weight.shape[1])))
