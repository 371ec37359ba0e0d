"""Indexing, sorting and counting, decomposed."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.compile.decompose.nodes import as_dtype, as_float32, attach, called, constant, pointwise, recorder_of
from oomph.step.compile.graph import GraphRecorder, How
from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.tape import Module, forward
from oomph.step.tensor.tensor import Tensor


@forward
def embedding(module: Module, ids: Tensor) -> Tensor:
    """nn.Embedding; backward scatters into a table of zeros."""
    recorder, weight = recorder_of(ids), module.parameter("weight")

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        dtype = grad.dtype
        wide = as_float32(grad)
        flags = pointwise("and", pointwise("ge", ids, dtype="bool"), pointwise("lt", ids, dtype="bool"))
        flags = pointwise("and", flags, pointwise("ne", ids, dtype="bool"))
        zeros = constant(grad, "full", node.shapes[0], wide.dtype)
        reads = (zeros, flags, ids, wide)
        kind = recorder.grad_kind(node, 0)
        return [as_dtype(recorder.record("scatter", How.SCATTER, reads, node.shapes[0], wide.dtype, kind=kind), dtype)]

    node = recorder.node(backward, weight)
    out = recorder.record("embedding", How.GATHER, (weight, ids), (*ids.shape, weight.shape[1]), weight.dtype)
    return attach(node, out)


def arange(tape: GraphRecorder, count: int) -> Tensor:
    """torch.arange: positions."""
    return tape.record("arange", How.CONSTANT, (), (count,), "int64", kind=Kind.INPUTS)


def _written(start: Tensor, places: Tensor, rows: Tensor, fallback: bool = False) -> Tensor:
    """Rows written or added to a tensor at the given indices; `fallback`: by PyTorch's own kernel."""
    reads = (start, places, rows)
    return recorder_of(rows).record("index_put", How.SCATTER, reads, start.shape, rows.dtype, fallback=fallback)


def _zeros(like: Tensor, shape: Shape) -> Tensor:
    return constant(like, "full", shape, like.dtype)


def take(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]; backward adds the rows into zeros. Before Hopper inductor has no kernel that adds bfloat16 like this."""
    recorder = recorder_of(x)

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        fallback = recorder.cuda and grad.dtype == "bfloat16"
        return [_written(_zeros(grad, node.shapes[0]), rows, grad, fallback)]

    node = recorder.node(backward, x)
    shape = (rows.numel, *x.shape[1:])
    return attach(node, recorder.record("index", How.POINTWISE, (x, rows), shape, x.dtype, gathers=True))


def inverse(places: Tensor) -> Tensor:
    """The inverse of a permutation: positions scattered into an empty tensor, which is never shared."""
    recorder = recorder_of(places)
    start = recorder.record("empty", How.CONSTANT, (), places.shape, "int64", key=len(recorder.values))
    return _written(start, places, constant(places, "arange", places.shape, "int64"))


def topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """torch.topk over the last dimension; backward writes into zeros."""

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        return [_written(_zeros(grads[0], node.shapes[0]), indices, grads[0])]

    node = x.tape.node(backward, x)
    shape = (*x.shape[:-1], count)
    values, indices = called("topk", (x,), [(shape, x.dtype, None), (shape, "int64", None)], kernel=Kernel.REDUCTION)
    return attach(node, values), indices


def sort(x: Tensor) -> tuple[Tensor, Tensor]:
    """torch.sort: values and indices. Inductor's own kernel for rows of up to 512 is not distinguished."""
    values, places = called("sort", (x,), [(x.shape, x.dtype, None), (x.shape, "int64", None)], kernel=Kernel.POINTWISE)
    return values, places


def histc(x: Tensor, bins: int) -> Tensor:
    """torch.histc."""
    return called("histc", (x,), [((bins,), x.dtype, None)], kernel=Kernel.POINTWISE)[0]


def running_total(x: Tensor, dtype: str) -> Tensor:
    """x.cumsum(0, dtype=dtype): a separate kernel, never recomputed."""
    return called("cumsum", (x,), [(x.shape, dtype, None)], kernel=Kernel.REDUCTION)[0]
