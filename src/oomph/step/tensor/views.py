"""Views of tensors, and the copies made where strides allow no view."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.casts import pass_on, to
from oomph.step.tensor.layout import Shape, promote, viewed
from oomph.step.tensor.tape import decomposable
from oomph.step.tensor.tensor import Tensor


def _view_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    assert grads[0] is not None
    return [as_shape(grads[0], node.shapes[0])]


def as_shape(x: Tensor, shape: Shape) -> Tensor:
    """A view if strides allow it, else a copy."""
    strides = viewed(x.shape, x.strides, shape)
    if strides is not None:
        return x.as_strided(shape, strides)
    return x.tape.made("clone", shape, x.dtype, (x,))


def reshape(x: Tensor, *shape: int) -> Tensor:
    """x.view(shape) or x.reshape(shape)."""
    if shape == x.shape:
        out = x.as_strided(x.shape, x.strides)
    else:
        strides = viewed(x.shape, x.strides, shape)
        if strides is None:
            return reshape(contiguous(x, "clone"), *shape)
        out = x.as_strided(shape, strides)
    node = x.tape.node(_view_backward, x)
    return node.attach(out) if node else out


def swapped(x: Tensor, first: int, second: int) -> Tensor:
    shape, strides = list(x.shape), list(x.strides)
    shape[first], shape[second] = shape[second], shape[first]
    strides[first], strides[second] = strides[second], strides[first]
    return x.as_strided(tuple(shape), tuple(strides))


def transpose(x: Tensor, first: int, second: int) -> Tensor:
    """x.transpose(first, second)."""

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        return [swapped(grads[0], first, second)]

    out = swapped(x, first, second)
    node = x.tape.node(backward, x)
    return node.attach(out) if node else out


def contiguous(x: Tensor, name: str = "contiguous") -> Tensor:
    """x.contiguous(): a copy if it is not."""
    if x.is_contiguous:
        return x
    node = x.tape.node(pass_on, x)
    out = x.tape.made(name, x.shape, x.dtype, (x,))
    return node.attach(out) if node else out


@decomposable
def split(x: Tensor, sizes: Sequence[int], dim: int = -1) -> list[Tensor]:
    """x.split(sizes, dim): views; backward concatenates their gradients, with zeros for unused parts."""

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        unused = [shape for shape, grad in zip(shapes, grads, strict=True) if grad is None]
        _zeros = [node.tape.made("split.zeros", shape, dtype) for shape in unused]  # alive until they are copied
        return [node.tape.made("split.dx", node.shapes[0], dtype, moved=2 * whole)]

    dtype, whole, dim = x.dtype, x.bytes, dim % len(x.shape)
    shapes = [(*x.shape[:dim], size, *x.shape[dim + 1 :]) for size in sizes]
    outs = [x.as_strided(shape, x.strides) for shape in shapes]
    node = x.tape.node(backward, x)
    if node:
        for index, out in enumerate(outs):
            node.attach(out, index)
    return outs


@decomposable
def part(x: Tensor, low: int, high: int, dim: int = -1) -> Tensor:
    """x[..., low:high]: a view; backward writes its gradient into zeros."""
    if (low, high) == (0, x.shape[dim]):
        return x

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        return [node.tape.made("slice.dx", node.shapes[0], grads[0].dtype, (grads[0],))]

    dim %= len(x.shape)
    out = x.as_strided((*x.shape[:dim], high - low, *x.shape[dim + 1 :]), x.strides)
    node = x.tape.node(backward, x)
    return node.attach(out) if node else out


@decomposable
def select(x: Tensor, index: int, dim: int = 0) -> Tensor:
    """x.select(dim, index); backward writes its gradient into zeros."""
    del index  # only a recorded program needs it
    dim %= len(x.shape)
    node = x.tape.node(_select_backward, x)
    out = x.as_strided((*x.shape[:dim], *x.shape[dim + 1 :]), (*x.strides[:dim], *x.strides[dim + 1 :]))
    return node.attach(out) if node else out


def _select_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    assert grads[0] is not None
    return [node.tape.made("select.dx", node.shapes[0], grads[0].dtype, (grads[0],))]


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """x.unsqueeze(dim)."""
    shape = (*x.shape[:dim], 1, *x.shape[dim:])
    stride = x.strides[dim] * x.shape[dim] if dim < len(x.shape) else 1
    out = x.as_strided(shape, (*x.strides[:dim], stride, *x.strides[dim:]))
    node = x.tape.node(_view_backward, x)
    return node.attach(out) if node else out


def expand(x: Tensor, *shape: int) -> Tensor:
    """x.expand(shape): a view; the engine sums its gradient."""
    missing = len(shape) - len(x.shape)
    strides = [0] * missing + [
        0 if size == 1 and wide != 1 else stride
        for size, stride, wide in zip(x.shape, x.strides, shape[missing:], strict=True)
    ]
    out = x.as_strided(shape, tuple(strides))
    node = x.tape.node(pass_on, x)
    return node.attach(out) if node else out


@decomposable
def cat(parts: Sequence[Tensor], dim: int = -1) -> Tensor:
    """torch.cat: a copy; backward returns views. Autocast casts the parts to the widest of their dtypes."""
    tape, first = parts[0].tape, parts[0]
    dtype = promote([each.dtype for each in parts])
    parts = [to(each, dtype) for each in parts] if tape.autocast else parts
    dim %= len(first.shape)
    sizes = [each.shape[dim] for each in parts]

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        cuts = [(*grad.shape[:dim], size, *grad.shape[dim + 1 :]) for size in sizes]
        return [grad.as_strided(cut, grad.strides) for cut in cuts]

    node = tape.node(backward, *parts)
    shape = (*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :])
    out = tape.made("cat", shape, dtype, parts)
    return node.attach(out) if node else out


def stack(parts: Sequence[Tensor]) -> Tensor:
    """torch.stack(parts, -1): a copy; backward returns views."""
    tape, first, count = parts[0].tape, parts[0], len(parts)

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        return [grad.as_strided(grad.shape[:-1], grad.strides[:-1]) for _ in range(count)]

    node = tape.node(backward, *parts)
    out = tape.made("stack", (*first.shape, count), first.dtype, parts)
    return node.attach(out) if node else out
