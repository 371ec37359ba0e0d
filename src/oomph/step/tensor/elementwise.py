"""Elementwise operations and sums, each with its backward rule, as in PyTorch's autograd.

An operation saves its inputs before it runs and its results after (as the generated `VariableType` does): the
recomputation of a checkpointed region stops between the two if nothing more is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from oomph.step.ops import Kernel
from oomph.step.tensor.autograd import Backward, Gradients, Node
from oomph.step.tensor.casts import autocast_float32, pass_on
from oomph.step.tensor.layout import ITEM_BYTES, promote, result_layout
from oomph.step.tensor.tape import decomposable
from oomph.step.tensor.tensor import Tensor


def pointwise(name: str, *operands: Tensor, dtype: str | None = None) -> Tensor:
    """The result of an elementwise kernel, without autograd history.

    A GPU's kernels convert their operands as they read; the CPU's read copies in the common dtype.
    """
    tape = operands[0].tape
    if len(operands) == 1:
        x = operands[0]
        shape, strides = result_layout(((x.shape, x.strides),))
        return tape.made(name, shape, dtype or x.dtype, operands, strides=strides)
    sized = [x for x in operands if x.shape] or operands  # scalars take the others' dtype
    common = promote([x.dtype for x in sized])
    shape, strides = result_layout(tuple([(x.shape, x.strides) for x in operands]))
    temporaries: list[int] = []
    if not tape.cuda:
        temporaries = [x.numel * ITEM_BYTES[common] for x in sized if x.shape and x.dtype != common]
    return tape.made(name, shape, dtype or common, operands, strides=strides, temporaries=temporaries)


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b."""
    node = a.tape.node(_add_backward, a, b)
    out = pointwise("add", a, b)
    return node.attach(out) if node else out


def _add_backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    assert grads[0] is not None
    return [grads[0], grads[0].detach()]  # two references: where one meets another gradient, it is not the only one


def add_into(a: Tensor, b: Tensor) -> Tensor:
    """a += b."""
    tape = a.tape
    node = tape.node(_add_backward, a, b)
    tape.note("add", moved=2 * a.bytes + b.bytes)
    out = tape.tensor(a.storage, a.shape, a.dtype, a.strides)
    return node.attach(out) if node else out


def sub(a: Tensor, b: Tensor) -> Tensor:
    """a - b."""

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        return [grads[0], pointwise("neg", grads[0]) if node.needs(1) else None]

    node = a.tape.node(backward, a, b)
    out = pointwise("sub", a, b)
    return node.attach(out) if node else out


def mul(a: Tensor, b: Tensor) -> Tensor:
    """a * b: saves each factor that the other's gradient needs."""
    node = a.tape.node(_mul_backward, a, b)
    if node:
        if node.needs(0):
            node.save(b)
        if node.needs(1):
            node.save(a)
    out = pointwise("mul", a, b)
    return node.attach(out) if node else out


def _mul_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    factors = node.unpack()  # alive while this runs
    wanted = [index for index in (0, 1) if node.needs(index)]
    assert grads[0] is not None
    results: Gradients = [None, None]
    # the generated backward goes by the operands' names: other, then self
    for index, factor in zip(reversed(wanted), reversed(factors), strict=True):
        if isinstance(factor, Tensor):
            results[index] = pointwise("mul.dx", grads[0], factor)
    return results


@decomposable
def divide_into(x: Tensor, y: Tensor) -> Tensor:
    """x /= y: saves y, and a copy of x."""
    tape = x.tape
    node = tape.node(_division_backward, x, y)
    if node:
        node.save(y)
        node.save(tape.made("clone", x.shape, x.dtype, (x,)))
    tape.note("div", moved=2 * x.bytes + y.bytes)
    out = tape.tensor(x.storage, x.shape, x.dtype, x.strides)
    return node.attach(out) if node else out


def _division_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    """The gradient of y: -grad * ((x / y) / y); then that of x: grad / y."""
    y, x = node.unpack()
    grad = grads[0]
    assert grad is not None and isinstance(x, Tensor) and isinstance(y, Tensor)
    quotient = pointwise("div", x, y)
    squared = pointwise("div", quotient, y)
    negative = pointwise("neg", grad)
    dy = pointwise("div.dy", negative, squared)
    del quotient, squared, negative
    return [pointwise("div.dx", grad, y), dy]


def scale(x: Tensor, name: str = "mul") -> Tensor:
    """x times, or divided by, a number."""

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        return [pointwise(f"{name}.dx", grads[0])]

    node = x.tape.node(backward, x)
    out = pointwise(name, x)
    return node.attach(out) if node else out


def shift(x: Tensor) -> Tensor:
    """x plus a number."""
    node = x.tape.node(pass_on, x)
    out = pointwise("add", x)
    return node.attach(out) if node else out


def clone(x: Tensor) -> Tensor:
    """A copy."""
    node = x.tape.node(pass_on, x)
    out = pointwise("clone", x)
    return node.attach(out) if node else out


def neg(x: Tensor) -> Tensor:
    """-x."""
    return scale(x, "neg")


@decomposable
def activation(x: Tensor, name: str) -> Tensor:
    """gelu, silu: saves its input; backward is one pass."""
    node = x.tape.node(_activation_backward(name), x)
    if node:
        node.save(x)
    out = pointwise(name, x)
    return node.attach(out) if node else out


@decomposable
def activation_from_result(x: Tensor, name: str) -> Tensor:
    """relu, tanh, sigmoid: saves its result; backward is one pass."""
    node = x.tape.node(_activation_backward(name), x)
    out = pointwise(name, x)
    if node:
        node.save(out)
        node.attach(out)
    return out


@cache
def _activation_backward(name: str) -> Backward:
    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        (kept,) = node.unpack()
        assert grads[0] is not None and isinstance(kept, Tensor)
        return [pointwise(f"{name}.dx", grads[0], kept)]

    return backward


def activate(x: Tensor, name: str) -> Tensor:
    """ACT2FN[name](x)."""
    if name in ("relu", "relu2"):
        kept = activation_from_result(x, "relu")
        return kept if name == "relu" else mul(kept, kept)
    return gelu_new(x) if name == "gelu_new" else activation(x, name)


def gelu_new(x: Tensor) -> Tensor:
    """0.5 * x * (1.0 + tanh(c * (x + 0.044715 * x.pow(3)))), one pass per operation."""
    return mul(scale(x), shift(activation_from_result(scale(add(x, scale(square(x)))), "tanh")))


def square(x: Tensor) -> Tensor:
    """x.pow(2), or another power: in float32 under a GPU's autocast."""
    x = autocast_float32(x)
    node = x.tape.node(_square_backward, x)
    if node:
        node.save(x)
    out = pointwise("pow", x)
    return node.attach(out) if node else out


def _square_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    """grad * (2 * x.pow(1)): three passes."""
    (x,) = node.unpack()
    assert grads[0] is not None and isinstance(x, Tensor)
    first = pointwise("pow.dx", x)
    second = pointwise("pow.dx", first)
    return [pointwise("pow.dx", grads[0], second)]


def rsqrt(x: Tensor) -> Tensor:
    """torch.rsqrt, in float32 under a GPU's autocast."""
    x = autocast_float32(x)
    node = x.tape.node(_rsqrt_backward, x)
    out = pointwise("rsqrt", x)
    if node:
        node.save(out)
        node.attach(out)
    return out


def _rsqrt_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    """-0.5 * grad * result.pow(3)."""
    (result,) = node.unpack()
    assert grads[0] is not None and isinstance(result, Tensor)
    cube = pointwise("rsqrt.dx", result)
    half = pointwise("rsqrt.dx", grads[0])
    return [pointwise("rsqrt.dx", half, cube)]


@decomposable
def mean(x: Tensor) -> Tensor:
    """x.mean(-1, keepdim=True)."""

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        return [node.tape.made("mean.dx", node.shapes[0], grads[0].dtype, (grads[0],))]

    node = x.tape.node(backward, x)
    shape = (*x.shape[:-1], 1)
    out = x.tape.made("mean", shape, x.dtype, (x,), kernel=Kernel.REDUCTION)
    return node.attach(out) if node else out


@decomposable
def total(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """x.sum(dim), in float32 under a GPU's autocast. Backward expands the gradient without a copy."""
    x = autocast_float32(x)
    dim %= len(x.shape)

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad, shape = grads[0], node.shapes[0]
        assert grad is not None
        strides = list(grad.strides)
        if not keepdim:
            strides.insert(dim, 0)
        strides[dim] = 0
        return [grad.as_strided(shape, tuple(strides))]

    node = x.tape.node(backward, x)
    shape = (*x.shape[:dim], *((1,) if keepdim else ()), *x.shape[dim + 1 :])
    out = x.tape.made("sum", shape, x.dtype, (x,), kernel=Kernel.REDUCTION)
    return node.attach(out) if node else out


@decomposable
def dropout(x: Tensor, rate: float) -> Tensor:
    """F.dropout: a GPU saves a mask of one byte per element, the CPU noise in the input's dtype."""
    tape = x.tape
    if not tape.training or rate == 0:
        return x
    node = tape.node(_activation_backward("dropout"), x)
    if tape.cuda:
        kind, moved = tape.kind, 2 * x.bytes + x.numel
        results = tape.launch("dropout", (("out", x.bytes), ("mask", x.numel)), kind, moved=moved)
        strides = result_layout(((x.shape, x.strides),))[1]
        out, mask = (tape.tensor(results[i], x.shape, dtype, strides) for i, dtype in ((0, x.dtype), (1, "bool")))
        del results
        if node:
            node.save(mask)
    else:
        noise = tape.made("noise", x.shape, x.dtype, (x, x), strides=result_layout(((x.shape, x.strides),))[1])
        if node:
            node.save(noise)
        out = pointwise("dropout", x, noise)
    return node.attach(out) if node else out
