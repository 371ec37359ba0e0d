"""What a mixture of experts is made of: choosing experts, taking rows, products by group."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.functions import pointwise, raised
from oomph.step.tensor.layout import ITEM_BYTES, numel
from oomph.step.tensor.tape import primitive
from oomph.step.tensor.tensor import Storage, Tensor

_ALIGNMENT_BYTES = 16  # a row of a grouped product begins at a multiple of this


@primitive
def topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """torch.topk over the last dimension: values and indices, which are kept. Backward scatters into zeros."""
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


@primitive
def sort(x: Tensor) -> tuple[Tensor, Tensor]:
    """torch.sort of whole numbers: values and their places."""
    tape, size = x.tape, x.bytes
    made = tape.launch("sort", (("", size), ("places", 8 * x.numel)), Kind.TEMPORARY, moved=4 * size)
    return tape.tensor(made[0], x.shape, x.dtype), tape.tensor(made[1], x.shape, "int64")


@primitive
def histc(x: Tensor, bins: int) -> Tensor:
    """torch.histc: how many numbers are in each bin."""
    return x.tape.made("histc", (bins,), x.dtype, kind=Kind.TEMPORARY)


@primitive
def running_total(x: Tensor, dtype: str) -> Tensor:
    """x.cumsum(0, dtype=dtype): one of a copy, where the dtype is another."""
    spent = (x.numel * ITEM_BYTES[dtype],)
    return x.tape.made("cumsum", x.shape, dtype, (x,), Kind.TEMPORARY, spent=spent)


@primitive
def inverse(places: Tensor) -> Tensor:
    """The permutation that undoes another: its own numbers written to the places."""
    tape = places.tape
    found = tape.made("empty_like", places.shape, "int64", (places,), Kind.TEMPORARY)
    order = tape.made("arange", places.shape, "int64", (places,), Kind.TEMPORARY)
    tape.note("index_put", Kernel.INDEX, 2 * places.bytes)
    del order
    return found


@primitive
def take(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]: keeps which rows; backward adds into zeros."""
    node = x.tape.node(_scatter, x)
    if node:
        node.save(rows)
    shape = (rows.numel, *x.shape[1:])
    size = numel(shape) * ITEM_BYTES[x.dtype]
    out = x.tape.made("index", shape, x.dtype, kernel=Kernel.INDEX, moved=2 * size)
    return node.attach(out) if node else out


def _scatter(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    _saved = node.unpack()  # alive while this runs
    grad = grads[0]
    assert grad is not None
    zeros = node.tape.made("index.dx", node.shapes[0], grad.dtype)
    node.tape.note("index.dx", Kernel.INDEX, 3 * grad.bytes)
    return [zeros]


@primitive
def total(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """x.sum(dim), in float32 under a GPU's autocast. Backward sees each sum's gradient often."""
    x = raised(x)
    dim %= len(x.shape)

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad, shape = grads[0], node.shapes[0]
        assert grad is not None
        strides = list(grad.strides)
        if not keepdim:
            strides.insert(dim, 0)
        strides[dim] = 0
        return [grad.seen(shape, tuple(strides))]

    node = x.tape.node(backward, x)
    shape = (*x.shape[:dim], *((1,) if keepdim else ()), *x.shape[dim + 1 :])
    out = x.tape.made("sum", shape, x.dtype, (x,), kernel=Kernel.REDUCTION)
    return node.attach(out) if node else out


@primitive
def divide_into(x: Tensor, y: Tensor) -> Tensor:
    """x /= y: keeps y, and a copy of what x was."""
    tape = x.tape
    node = tape.node(_division_backward, x, y)
    if node:
        node.save(y)
        node.save(tape.made("clone", x.shape, x.dtype, (x,)))
    tape.note("div", moved=2 * x.bytes + y.bytes)
    out = tape.tensor(x.storage, x.shape, x.dtype, x.strides)
    return node.attach(out) if node else out


def _division_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    """Of y: -grad * ((x / y) / y); then of x: grad / y."""
    y, x = node.unpack()
    grad = grads[0]
    assert grad is not None and isinstance(x, Tensor) and isinstance(y, Tensor)
    quotient = pointwise("div", x, y)
    squared = pointwise("div", quotient, y)
    negative = pointwise("neg", grad)
    dy = pointwise("div.dy", negative, squared)
    del quotient, squared, negative
    return [pointwise("div.dx", grad, y), dy]


@primitive
def grouped_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """F.grouped_mm(x, weight.transpose(-2, -1), offs=offsets): the rows of each group by a matrix of their own.

    `weight` is (groups, outputs, inputs). Autocast does not know the operation: it computes in the weight's own dtype.
    """
    node = x.tape.node(_grouped_backward, x, weight)
    if node:
        node.save(x, weight, offsets)
    rows, inputs = x.shape
    outputs = weight.shape[1]
    out = x.tape.tensor(_grouped(x, "", rows, outputs, inputs, rows, outputs), (rows, outputs), x.dtype)
    return node.attach(out) if node else out


def _grouped_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    """The weight's gradient first."""
    _saved = node.unpack()  # alive while this runs
    grad, tape = grads[0], node.tape
    assert grad is not None
    (rows, inputs), (groups, outputs, _) = node.shapes
    results: Gradients = [None, None]
    if node.needs(1):
        kind = tape.grad_kind(node, 1)
        made = _grouped(grad, "dw", outputs, inputs, rows, groups * outputs, inputs, kind)
        results[1] = tape.tensor(made, node.shapes[1], grad.dtype)
    if node.needs(0):
        results[0] = tape.tensor(_grouped(grad, "dx", rows, inputs, outputs, rows, inputs), node.shapes[0], grad.dtype)
    return results


def _grouped(
    x: Tensor, name: str, m: int, n: int, k: int, rows: int, columns: int, kind: Kind | None = None
) -> Storage:
    """Products that together do the arithmetic of one of (m, k) and (k, n); the result has so many rows and columns."""
    item = ITEM_BYTES[x.dtype]
    aligned = _ALIGNMENT_BYTES // item
    size = rows * -(-columns // aligned) * aligned * item
    moved = size + (m * k + k * n) * item
    unit = "tf32" if x.dtype == "float32" and x.tape.tf32 else x.dtype
    flops, shape = 2 * m * n * k, (1, m, n, k)
    made = x.tape.launch(
        name, (("", size),), kind, kernel=Kernel.GEMM, moved=moved, flops=flops, shape=shape, dtype=unit
    )
    return made[0]
