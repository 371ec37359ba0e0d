"""Views, decomposed."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.compile.decompose.nodes import attach, constant, recorder_of
from oomph.step.compile.graph import GraphTensor, How
from oomph.step.tensor import casts
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.layout import promote
from oomph.step.tensor.tensor import Tensor


def split(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """A call with an item for each part; backward concatenates their gradients."""
    recorder = recorder_of(x)

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        return [_joined([each for each in grads if each is not None], len(node.shapes[0]) - 1, x.dtype)]

    node = recorder.node(backward, x)
    call = recorder.record("split", How.CALL, (x,), x.shape, x.dtype, view=True)
    outs: list[Tensor] = []
    start = 0
    for index, size in enumerate(sizes):
        shape = (*x.shape[:-1], size)
        out = recorder.record("item", How.ITEM, (call,), shape, x.dtype, x.strides, offset=start, key=index)
        start += size
        outs.append(node.attach(out, index) if node else out)
    return outs


def part(x: Tensor, low: int, high: int, dim: int = -1) -> Tensor:
    """x[..., low:high]; backward writes its gradient into zeros."""
    if (low, high) == (0, x.shape[dim]):
        return x
    dim %= len(x.shape)

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        shape, places = node.shapes[0], (dim, (0, low))
        zeros = constant(grad, "full", shape, grad.dtype)
        write = recorder_of(grad).record
        return [write("slice_scatter", How.POINTWISE, (zeros, grad), shape, grad.dtype, key=places, places=places)]

    node = x.tape.node(backward, x)
    assert isinstance(x, GraphTensor)
    out = x.as_strided((*x.shape[:dim], high - low, *x.shape[dim + 1 :]), x.strides, low * x.strides[dim], "slice")
    return attach(node, out)


def cat(parts: Sequence[Tensor], dim: int = -1) -> Tensor:
    """torch.cat; backward returns slices."""
    first = parts[0]
    dtype = promote([each.dtype for each in parts])
    parts = [casts.to(each, dtype) for each in parts] if first.tape.autocast else parts
    dim %= len(first.shape)
    sizes = [each.shape[dim] for each in parts]

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert isinstance(grad, GraphTensor)
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        cuts = [(*grad.shape[:dim], size, *grad.shape[dim + 1 :]) for size in sizes]
        return [
            grad.as_strided(cut, grad.strides, start * grad.strides[dim], "slice")
            for cut, start in zip(cuts, starts, strict=True)
        ]

    node = first.tape.node(backward, *parts)
    return attach(node, _joined(parts, dim, dtype))


def _joined(parts: Sequence[Tensor], dim: int, dtype: str) -> Tensor:
    """The parts concatenated along a dimension."""
    first, sizes = parts[0], [each.shape[dim] for each in parts]
    shape = (*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :])
    starts = tuple([sum(sizes[:index]) for index in range(len(sizes))])
    return recorder_of(first).record("cat", How.CAT, parts, shape, dtype, key=dim, places=(dim, starts))


def select(x: Tensor, index: int) -> Tensor:
    """x[index]; backward scatters its gradient into zeros, element by element."""

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad, shape = grads[0], node.shapes[0]
        assert grad is not None
        reads = (constant(grad, "full", shape, grad.dtype), grad)
        return [recorder_of(grad).record("select_scatter", How.POINTWISE, reads, shape, grad.dtype, key=index)]

    node = x.tape.node(backward, x)
    assert isinstance(x, GraphTensor)
    return attach(node, x.as_strided(x.shape[1:], x.strides[1:], index * x.strides[0], "select"))
