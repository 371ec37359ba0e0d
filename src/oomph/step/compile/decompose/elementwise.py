"""Elementwise functions and sums, decomposed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oomph.step.compile.decompose.nodes import as_dtype, as_float32, attach, pointwise, recorder_of, reduction
from oomph.step.compile.graph import How
from oomph.step.tensor import casts, views
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.layout import result_layout
from oomph.step.tensor.tensor import Tensor


def mean(x: Tensor) -> Tensor:
    """x.mean(-1, keepdim=True)."""

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        return [pointwise("div", views.expand(grads[0], *node.shapes[0]))]

    node = x.tape.node(backward, x)
    return attach(node, reduction("mean", x, (*x.shape[:-1], 1)))


def _gelu(x: Tensor) -> Tensor:
    inner = pointwise("add_1", pointwise("erf", pointwise("mul_0.7", x)))
    return pointwise("mul", pointwise("mul_0.5", x), inner)


def _gelu_slope(x: Tensor) -> Tensor:
    inner = pointwise("add_1", pointwise("erf", pointwise("mul_0.7", x)))
    density = pointwise("mul_0.4", pointwise("exp", pointwise("mul_-0.5", pointwise("mul", x, x))))
    return pointwise("add", pointwise("mul_0.5", inner), pointwise("mul", x, density))


def _silu(x: Tensor) -> Tensor:
    return pointwise("div", x, pointwise("add_1", pointwise("exp", pointwise("neg", x))))


_SHAPES: dict[str, Callable[[Tensor], Tensor]] = {"gelu": _gelu, "silu": _silu}


def activation(x: Tensor, name: str) -> Tensor:
    """gelu and silu, computed in float32."""
    dtype = x.dtype

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        grad = as_float32(grads[0])
        if name == "gelu":
            return [as_dtype(pointwise("mul", grad, _gelu_slope(wide)), dtype)]
        gate = pointwise("sigmoid", wide)
        first = pointwise("mul", grad, gate)
        slope = pointwise("add_1", pointwise("mul", wide, pointwise("1_sub", gate)))
        return [as_dtype(pointwise("mul", first, slope), dtype)]

    node = x.tape.node(backward, x)
    wide = as_float32(x)
    return attach(node, as_dtype(_SHAPES[name](wide), dtype))


def activation_from_result(x: Tensor, name: str) -> Tensor:
    """relu, tanh and sigmoid: one node; backward reads the result."""

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        if name == "relu":
            return [pointwise("where", pointwise("le", out, dtype="bool"), grad, dtype=grad.dtype)]
        wide = as_float32(out)
        if name == "tanh":
            slope = pointwise("1_sub", pointwise("mul", wide, wide))
        else:
            slope = pointwise("mul", wide, pointwise("1_sub", wide))
        return [as_dtype(pointwise("mul", as_float32(grad), slope), grad.dtype)]

    node = x.tape.node(backward, x)
    out = pointwise(name, x)
    return attach(node, out)


def dropout(x: Tensor, rate: float) -> Tensor:
    """native_dropout: a mask from inductor's own random numbers; backward reads the mask."""
    recorder = recorder_of(x)
    if not recorder.training or rate == 0:
        return x

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        scaled = pointwise("mul_p", pointwise("convert", mask, dtype=grad.dtype))
        return [pointwise("mul", grad, scaled)]

    node = recorder.node(backward, x)
    strides = result_layout(((x.shape, x.strides),))[1]
    numbers = recorder.record("random", How.RANDOM, (), x.shape, "float32", strides)
    mask = pointwise("gt", as_dtype(numbers, x.dtype), dtype="bool")
    out = pointwise("mul_p", pointwise("mul", mask, x, dtype=x.dtype))
    return attach(node, out)


def total(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """x.sum(dim); backward broadcasts each sum's gradient."""
    x = casts.autocast_float32(x)
    dim %= len(x.shape)
    kept = (*x.shape[:dim], 1, *x.shape[dim + 1 :])

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        return [views.expand(grad if keepdim else views.unsqueeze(grad, dim), *node.shapes[0])]

    node = x.tape.node(backward, x)
    out = reduction("sum", x, kept)
    return attach(node, out if keepdim else views.as_shape(out, (*x.shape[:dim], *x.shape[dim + 1 :])))


def divide_into(x: Tensor, y: Tensor) -> Tensor:
    """x /= y, out of place: nothing in a graph is overwritten."""

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        squared = pointwise("div", pointwise("div", x, y), y)
        dy = pointwise("mul", pointwise("neg", grads[0]), squared)
        return [pointwise("div", grads[0], y), dy]

    node = x.tape.node(backward, x, y)
    return attach(node, pointwise("div", x, y))
