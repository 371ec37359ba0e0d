"""Products, norms, elementwise functions, views and embeddings in smaller operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oomph.step.compile.decompose.nodes import as_dtype, as_float32, attach, constant, pointwise, recorder_of, reduction
from oomph.step.compile.graph import How, Recorder, Traced
from oomph.step.ops import Kernel, Kind
from oomph.step.tensor import functions as F
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.layout import (
    contiguous_strides,
    elementwise,
    numel,
    promote,
)
from oomph.step.tensor.tape import Module, forward
from oomph.step.tensor.tensor import Tensor

# --- products ----------------------------------------------------------------------------------------------------


def _turned(x: Tensor) -> Tensor:
    return F._swapped(x, len(x.shape) - 2, len(x.shape) - 1)


def _multiplied(a: Tensor, b: Tensor, *more: Tensor, kind: Kind | None = None) -> Tensor:
    """mm, bmm, or addmm where there is more to add. Backward is recorded under forward's autocast too."""
    recorder = recorder_of(a)
    if recorder.autocast is not None:
        a, b = as_dtype(a, recorder.autocast), as_dtype(b, recorder.autocast)
    (*batch, m, k), n = a.shape, b.shape[-1]
    count = numel(batch)
    unit = "tf32" if a.dtype == "float32" and a.tape.tf32 else a.dtype
    facts = {"shape": (count, m, n, k), "flops": 2 * count * m * n * k, "dtype": unit}
    op = "bmm" if batch else "addmm" if more else "mm"
    return recorder_of(a).record(op, How.PRODUCT, (a, b, *more), (*batch, m, n), a.dtype, kind=kind, facts=facts)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, kind: Kind | None = None) -> Tensor:
    """x @ weight.T + bias."""
    recorder, shape = recorder_of(x), x.shape

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        grad = F._reshaped(grad, (rows, outputs))
        dw = dx = db = None
        for index in (2, 1) if bias is None else (1, 2):  # mm's backward begins with the weight, addmm's with the input
            if index == 2 and node.needs(2):
                dw = _multiplied(_turned(grad), flat, kind=Kind.GRADIENTS)
            elif index == 1 and node.needs(1):
                dx = _multiplied(grad, _turned(turned), kind=recorder.kind)
        if node.needs(0):
            db = recorder.made("sum", (1, outputs), grad.dtype, (grad,), Kind.GRADIENTS, kernel=Kernel.REDUCTION)
            db = db.seen((outputs,), (1,))
        return [db, dx.seen(shape, contiguous_strides(shape)) if dx else None, dw]

    node = recorder.node(backward, bias, x, weight)
    outputs, inputs = weight.shape
    turned = _turned(weight)
    rows = x.numel // inputs
    flat = F._reshaped(x, (rows, inputs))
    out = _multiplied(flat, turned, *((bias,) if bias is not None else ()), kind=kind)
    wide = (*shape[:-1], outputs)
    return attach(node, out.seen(wide, contiguous_strides(wide)))


def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """bias + x @ weight."""
    recorder = recorder_of(x)
    if recorder.autocast is not None:
        weight, x, bias = F.lower(weight), F.lower(x), F.lower(bias)

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        dx = _multiplied(grad, _turned(weight), kind=recorder.kind) if node.needs(1) else None
        dw = _multiplied(_turned(x), grad, kind=Kind.GRADIENTS) if node.needs(2) else None
        return [grad, dx, dw]

    node = recorder.node(backward, bias, x, weight)
    return attach(node, _multiplied(x, weight, bias))


def _expanded(x: Tensor) -> Tensor:
    """x.expand to its own shape, which stays an operation."""

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        return grads

    node = x.tape.node(backward, x)
    return attach(node, recorder_of(x).record("expand", How.VIEW, (x,), x.shape, x.dtype, x.strides))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for (batch, heads, rows, columns): expand, view or copy, bmm."""
    recorder = recorder_of(a)
    a, b = (F.lower(a), F.lower(b)) if recorder.autocast is not None else (a, b)
    batch = a.shape[:-2]
    flat_a, flat_b = (F.reshape(_expanded(each), numel(each.shape[:-2]), *each.shape[-2:]) for each in (a, b))

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        db = _multiplied(_turned(flat_a), grad) if node.needs(1) else None
        return [_multiplied(grad, _turned(flat_b)) if node.needs(0) else None, db]

    node = recorder.node(backward, flat_a, flat_b)
    out = attach(node, _multiplied(flat_a, flat_b))
    return F.reshape(out, *batch, out.shape[-2], out.shape[-1])


# --- norms -------------------------------------------------------------------------------------------------------


@forward
def layer_norm(module: Module, x: Tensor) -> Tensor:
    """F.layer_norm: var_mean, then pointwise; everything in float32."""
    recorder = recorder_of(x)
    x = F.raised(x) if recorder.cuda else x
    weight, bias = module.parameter("weight"), module.maybe("bias")
    width, dtype = x.shape[-1], x.dtype
    row = (*x.shape[:-1], 1)

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        grad = as_float32(grad)
        scaled = pointwise("mul", grad, weight)
        times = pointwise("mul_n", scaled)
        sum_1 = reduction("sum", scaled, row)
        sum_2 = reduction("sum", pointwise("mul", scaled, normed), row)
        inner = pointwise("sub", pointwise("sub", times, sum_1), pointwise("mul", normed, sum_2))
        dx = as_dtype(pointwise("mul", pointwise("div_n", rstd), inner), dtype)
        dw = db = None
        if node.needs(1):
            dw = as_dtype(reduction("sum", pointwise("mul", grad, normed), (width,)), weight.dtype)
        if node.needs(2) and bias is not None:
            db = as_dtype(reduction("sum", grad, (width,)), bias.dtype)
        return [dx, dw, db]

    node = recorder.node(backward, x, weight, bias)
    wide = as_float32(x)
    call = recorder.record("var_mean", How.CALL, (wide,), row, "float32", reduction=True)
    variance, mean = (recorder.record("item", How.ITEM, (call,), row, "float32", key=i) for i in (0, 1))
    rstd = pointwise("rsqrt", pointwise("add_eps", variance))
    normed = pointwise("mul", pointwise("sub", wide, mean), rstd)
    out = pointwise("mul", normed, weight, dtype="float32")
    out = pointwise("add", out, bias, dtype="float32") if bias is not None else out
    return attach(node, as_dtype(out, dtype))


def mean(x: Tensor) -> Tensor:
    """x.mean(-1, keepdim=True)."""

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        return [pointwise("div", F.expand(grads[0], *node.shapes[0]))]

    node = x.tape.node(backward, x)
    return attach(node, reduction("mean", x, (*x.shape[:-1], 1)))


# --- elementwise -------------------------------------------------------------------------------------------------


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


def squashed(x: Tensor, name: str) -> Tensor:
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
    strides = elementwise(((x.shape, x.strides),))[1]
    numbers = recorder.record("random", How.RANDOM, (), x.shape, "float32", strides)
    mask = pointwise("gt", as_dtype(numbers, x.dtype), dtype="bool")
    out = pointwise("mul_p", pointwise("mul", mask, x, dtype=x.dtype))
    return attach(node, out)


def split(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """A call with an item for each part; backward puts their gradients side by side."""
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
    assert isinstance(x, Traced)
    out = x.seen((*x.shape[:dim], high - low, *x.shape[dim + 1 :]), x.strides, low * x.strides[dim], "slice")
    return attach(node, out)


def cat(parts: Sequence[Tensor], dim: int = -1) -> Tensor:
    """torch.cat; backward hands out slices."""
    first = parts[0]
    dtype = promote([each.dtype for each in parts])
    parts = [F.to(each, dtype) for each in parts] if first.tape.autocast else parts
    dim %= len(first.shape)
    sizes = [each.shape[dim] for each in parts]

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert isinstance(grad, Traced)
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        cuts = [(*grad.shape[:dim], size, *grad.shape[dim + 1 :]) for size in sizes]
        return [
            grad.seen(cut, grad.strides, start * grad.strides[dim], "slice")
            for cut, start in zip(cuts, starts, strict=True)
        ]

    node = first.tape.node(backward, *parts)
    return attach(node, _joined(parts, dim, dtype))


def _joined(parts: Sequence[Tensor], dim: int, dtype: str) -> Tensor:
    """Side by side along a dimension."""
    first, sizes = parts[0], [each.shape[dim] for each in parts]
    shape = (*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :])
    starts = tuple([sum(sizes[:index]) for index in range(len(sizes))])
    return recorder_of(first).record("cat", How.CAT, parts, shape, dtype, key=dim, places=(dim, starts))


# --- embeddings --------------------------------------------------------------------------------------------------


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


def arange(tape: Recorder, count: int) -> Tensor:
    """Positions."""
    return tape.record("arange", How.CONSTANT, (), (count,), "int64", kind=Kind.INPUTS)
