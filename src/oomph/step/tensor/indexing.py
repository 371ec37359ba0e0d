"""Indexing by row: embeddings, and the sorting of tokens by expert."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.layout import ITEM_BYTES, numel
from oomph.step.tensor.tape import Module, Tape, decomposable, forward
from oomph.step.tensor.tensor import Tensor


@decomposable
@forward
def embedding(module: Module, ids: Tensor) -> Tensor:
    """nn.Embedding: saves the ids; its gradient is a whole table."""
    weight = module.parameter("weight")
    node = ids.tape.node(_embedding_backward, weight)
    if node:
        node.save(ids)
    shape = (*ids.shape, weight.shape[1])
    size = numel(shape) * ITEM_BYTES[weight.dtype]
    out = ids.tape.made("", shape, weight.dtype, kernel=Kernel.INDEX, moved=2 * size)
    return node.attach(out) if node else out


def _embedding_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    _saved = node.unpack()  # alive while this runs
    grad = grads[0]
    assert grad is not None
    table = numel(node.shapes[0]) * ITEM_BYTES[grad.dtype]
    kind = node.tape.grad_kind(node, 0)
    moved = table + 2 * grad.bytes
    return [node.tape.made("weight.grad", node.shapes[0], grad.dtype, kind=kind, kernel=Kernel.INDEX, moved=moved)]


@decomposable
def arange(tape: Tape, count: int) -> Tensor:
    """torch.arange: positions."""
    return tape.made("positions", (count,), "int64", kind=Kind.INPUTS, moved=0)


@decomposable
def topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """torch.topk over the last dimension: values and indices, which are saved. Backward scatters into zeros."""
    tape = x.tape
    node = tape.node(_scatter, x)
    shape = (*x.shape[:-1], count)
    results = (("", numel(shape) * ITEM_BYTES[x.dtype]), ("indices", 8 * numel(shape)))
    made = tape.launch("topk", results, kernel=Kernel.REDUCTION, moved=2 * x.bytes)
    values, indices = tape.tensor(made[0], shape, x.dtype), tape.tensor(made[1], shape, "int64")
    if node:
        node.save(indices)
        node.attach(values)
    return values, indices


@decomposable
def sort(x: Tensor) -> tuple[Tensor, Tensor]:
    """torch.sort of integers: values and indices."""
    tape, size = x.tape, x.bytes
    made = tape.launch("sort", (("", size), ("places", 8 * x.numel)), Kind.TEMPORARY, moved=4 * size)
    return tape.tensor(made[0], x.shape, x.dtype), tape.tensor(made[1], x.shape, "int64")


@decomposable
def histc(x: Tensor, bins: int) -> Tensor:
    """torch.histc: the count in each bin."""
    return x.tape.made("histc", (bins,), x.dtype, kind=Kind.TEMPORARY)


@decomposable
def running_total(x: Tensor, dtype: str) -> Tensor:
    """x.cumsum(0, dtype=dtype): of a copy, if the dtype differs."""
    temporaries = (x.numel * ITEM_BYTES[dtype],)
    return x.tape.made("cumsum", x.shape, dtype, (x,), Kind.TEMPORARY, temporaries=temporaries)


@decomposable
def inverse(places: Tensor) -> Tensor:
    """The inverse of a permutation: positions scattered to its indices."""
    tape = places.tape
    found = tape.made("empty_like", places.shape, "int64", (places,), Kind.TEMPORARY)
    order = tape.made("arange", places.shape, "int64", (places,), Kind.TEMPORARY)
    tape.note("index_put", Kernel.INDEX, 2 * places.bytes)
    del order
    return found


@decomposable
def take(x: Tensor, rows: Tensor, dims: int = 1) -> Tensor:
    """x[rows], over the first `dims` dimensions of x: saves the indices; backward adds into zeros."""
    node = x.tape.node(_scatter, x)
    if node:
        node.save(rows)
    shape = (rows.numel, *x.shape[dims:])
    size = numel(shape) * ITEM_BYTES[x.dtype]
    out = x.tape.made("index", shape, x.dtype, kernel=Kernel.INDEX, moved=2 * size)
    return node.attach(out) if node else out


def one_hot(x: Tensor, classes: int) -> Tensor:
    """torch.nn.functional.one_hot: zeros, and a one at each index."""
    found = x.tape.made("one_hot", (*x.shape, classes), "int64", kind=Kind.TEMPORARY)
    x.tape.note("scatter", Kernel.INDEX, 3 * x.bytes)
    return found


def places(mask: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """torch.where(mask) of a 2-D mask with `count` ones: the indices along each dimension, views of one result."""
    found = mask.tape.made("where", (count, 2), "int64", (mask,), Kind.TEMPORARY)
    return found.as_strided((count,), (2,)), found.as_strided((count,), (2,))


def add_rows(into: Tensor, rows: Tensor, x: Tensor) -> Tensor:
    """into.index_add_(0, rows, x): saves the indices, and x, for its shape alone."""
    tape = x.tape
    node = tape.node(_add_rows_backward, into, x)
    if node:
        node.save(rows, x)
    tape.note("index_add", Kernel.INDEX, 3 * x.bytes)
    out = tape.tensor(into.storage, into.shape, into.dtype, into.strides)
    return node.attach(out) if node else out


def _add_rows_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    _saved, grad = node.unpack(), grads[0]
    assert grad is not None
    size = numel(node.shapes[1]) * ITEM_BYTES[grad.dtype]
    return [grad, node.tape.made("index_select", node.shapes[1], grad.dtype, kernel=Kernel.INDEX, moved=2 * size)]


def put_columns(x: Tensor, columns: int) -> Tensor:
    """zeros(..., columns).index_copy_(-1, which, x): saves a copy of the indices, and x, for its shape alone."""
    tape, shape = x.tape, (*x.shape[:-1], columns)
    width = x.shape[-1]

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        _saved, grad = node.unpack(), grads[0]
        assert grad is not None
        size = numel(node.shapes[0]) * ITEM_BYTES[grad.dtype]
        return [tape.made("index_select", node.shapes[0], grad.dtype, kernel=Kernel.INDEX, moved=2 * size)]

    out = tape.made("zeros", shape, x.dtype)
    which = tape.made("lora_ind", (width,), "int64")
    node = tape.node(backward, x)
    if node:
        node.save(which, x)
    tape.note("index_copy", Kernel.INDEX, 2 * x.bytes)
    return node.attach(out) if node else out


def _scatter(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    _saved = node.unpack()  # alive while this runs
    grad = grads[0]
    assert grad is not None
    zeros = node.tape.made("index.dx", node.shapes[0], grad.dtype)
    node.tape.note("index.dx", Kernel.INDEX, 3 * grad.bytes)
    return [zeros]
