"""The operations that models are made of, each with its backward rule, as PyTorch's autograd has them.

An operation saves its inputs before it runs and its results after (as the generated `VariableType` does): a
checkpointed region that is computed again stops between the two where nothing more is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.kernels import cpu_layer_norm_backward_bytes
from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.autograd import Gradients, Leaf, Node
from oomph.step.tensor.layout import (
    HALVES,
    ITEM_BYTES,
    Shape,
    contiguous_strides,
    elementwise,
    numel,
    promote,
    viewed,
)
from oomph.step.tensor.tape import Module, Tape, forward, primitive
from oomph.step.tensor.tensor import Storage, Tensor

# --- precision --------------------------------------------------------------------------------------------------


def to(x: Tensor, dtype: str, kind: Kind | None = None) -> Tensor:
    """The tensor in another dtype: itself, where it has that."""
    if x.dtype == dtype:
        return x
    node = x.tape.node(_pass_on, x)
    out = x.tape.cast(x, dtype, kind)
    return node.attach(out) if node else out


def lower(x: Tensor) -> Tensor:
    """As autocast hands it to a matrix product: in half precision, a trained weight's copy kept until it ends."""
    tape = x.tape
    dtype = tape.autocast
    if dtype is None or x.dtype == dtype:
        return x
    leaf = x.edge[0] if x.edge is not None else None
    if not isinstance(leaf, Leaf) or x.dtype != "float32":
        return to(x, dtype)
    cached = tape.casts.get(leaf.name)
    if cached is None:
        scope, tape.scope = tape.scope, leaf.name
        cached = tape.casts[leaf.name] = to(x, dtype, Kind.HALF_WEIGHTS)
        tape.scope = scope
    return cached


def raised(x: Tensor) -> Tensor:
    """As a GPU's autocast hands it to an operation of its float32 list."""
    return to(x, "float32") if x.tape.cuda and x.tape.autocast is not None and x.dtype in HALVES else x


def _pass_on(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    return [grads[0]]


# --- views ------------------------------------------------------------------------------------------------------


def _view_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    assert grads[0] is not None
    return [_reshaped(grads[0], node.shapes[0])]


def _reshaped(x: Tensor, shape: Shape) -> Tensor:
    """A view where strides allow it, else a copy."""
    strides = viewed(x.shape, x.strides, shape)
    if strides is not None:
        return x.seen(shape, strides)
    return x.tape.made("clone", shape, x.dtype, (x,))


def reshape(x: Tensor, *shape: int) -> Tensor:
    """x.view(shape) or x.reshape(shape)."""
    if shape == x.shape:
        out = x.seen(x.shape, x.strides)
    else:
        strides = viewed(x.shape, x.strides, shape)
        if strides is None:
            return reshape(contiguous(x, "clone"), *shape)
        out = x.seen(shape, strides)
    node = x.tape.node(_view_backward, x)
    return node.attach(out) if node else out


def _swapped(x: Tensor, first: int, second: int) -> Tensor:
    shape, strides = list(x.shape), list(x.strides)
    shape[first], shape[second] = shape[second], shape[first]
    strides[first], strides[second] = strides[second], strides[first]
    return x.seen(tuple(shape), tuple(strides))


def transpose(x: Tensor, first: int, second: int) -> Tensor:
    """x.transpose(first, second)."""

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        return [_swapped(grads[0], first, second)]

    out = _swapped(x, first, second)
    node = x.tape.node(backward, x)
    return node.attach(out) if node else out


def contiguous(x: Tensor, name: str = "contiguous") -> Tensor:
    """x.contiguous(): a copy where it is not."""
    if x.is_contiguous:
        return x
    node = x.tape.node(_pass_on, x)
    out = x.tape.made(name, x.shape, x.dtype, (x,))
    return node.attach(out) if node else out


@primitive
def split(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """x.split(sizes, dim=-1): views; backward puts their gradients side by side."""

    def backward(node: Node, _grads: Gradients) -> Sequence[Tensor | None]:
        return [node.tape.made("split.dx", node.shapes[0], dtype, moved=2 * whole)]

    dtype, whole = x.dtype, x.bytes
    outs = [x.seen((*x.shape[:-1], size), x.strides) for size in sizes]
    node = x.tape.node(backward, x)
    if node:
        for index, out in enumerate(outs):
            node.attach(out, index)
    return outs


@primitive
def part(x: Tensor, low: int, high: int, dim: int = -1) -> Tensor:
    """x[..., low:high]: a view; backward writes its gradient into zeros."""
    if (low, high) == (0, x.shape[dim]):
        return x

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        return [node.tape.made("slice.dx", node.shapes[0], grads[0].dtype, (grads[0],))]

    dim %= len(x.shape)
    out = x.seen((*x.shape[:dim], high - low, *x.shape[dim + 1 :]), x.strides)
    node = x.tape.node(backward, x)
    return node.attach(out) if node else out


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """x.unsqueeze(dim)."""
    shape = (*x.shape[:dim], 1, *x.shape[dim:])
    stride = x.strides[dim] * x.shape[dim] if dim < len(x.shape) else 1
    out = x.seen(shape, (*x.strides[:dim], stride, *x.strides[dim:]))
    node = x.tape.node(_view_backward, x)
    return node.attach(out) if node else out


def expand(x: Tensor, *shape: int) -> Tensor:
    """x.expand(shape): a view; the engine sums its gradient."""
    missing = len(shape) - len(x.shape)
    strides = [0] * missing + [
        0 if size == 1 and wide != 1 else stride
        for size, stride, wide in zip(x.shape, x.strides, shape[missing:], strict=True)
    ]
    out = x.seen(shape, tuple(strides))
    node = x.tape.node(_pass_on, x)
    return node.attach(out) if node else out


@primitive
def cat(parts: Sequence[Tensor], dim: int = -1) -> Tensor:
    """torch.cat: a copy; backward hands out views. Autocast brings the parts to the widest of their dtypes."""
    tape, first = parts[0].tape, parts[0]
    dtype = promote([each.dtype for each in parts])
    parts = [to(each, dtype) for each in parts] if tape.autocast else parts
    dim %= len(first.shape)
    sizes = [each.shape[dim] for each in parts]

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        cuts = [(*grad.shape[:dim], size, *grad.shape[dim + 1 :]) for size in sizes]
        return [grad.seen(cut, grad.strides) for cut in cuts]

    node = tape.node(backward, *parts)
    shape = (*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :])
    out = tape.made("cat", shape, dtype, parts)
    return node.attach(out) if node else out


# --- elementwise ------------------------------------------------------------------------------------------------


def pointwise(name: str, *operands: Tensor, dtype: str | None = None) -> Tensor:
    """The result of an elementwise kernel, without history.

    A GPU's kernels convert what they read; the CPU's read copies in the common dtype.
    """
    tape = operands[0].tape
    if len(operands) == 1:
        x = operands[0]
        shape, strides = elementwise(((x.shape, x.strides),))
        return tape.made(name, shape, dtype or x.dtype, operands, strides=strides)
    sized = [x for x in operands if x.shape] or operands  # a single number takes the others' dtype
    common = promote([x.dtype for x in sized])
    shape, strides = elementwise([(x.shape, x.strides) for x in operands])
    spent: list[int] = []
    if not tape.cuda:
        spent = [x.numel * ITEM_BYTES[common] for x in sized if x.dtype != common]
    return tape.made(name, shape, dtype or common, operands, strides=strides, spent=spent)


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b."""
    node = a.tape.node(_add_backward, a, b)
    out = pointwise("add", a, b)
    return node.attach(out) if node else out


def _add_backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    assert grads[0] is not None
    return [grads[0], grads[0].detach()]  # two holders: where one meets another gradient, it is not alone


def sub(a: Tensor, b: Tensor) -> Tensor:
    """a - b."""

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        return [grads[0], pointwise("neg", grads[0]) if node.needs(1) else None]

    node = a.tape.node(backward, a, b)
    out = pointwise("sub", a, b)
    return node.attach(out) if node else out


def mul(a: Tensor, b: Tensor) -> Tensor:
    """a * b: keeps each factor that the other's gradient needs."""
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
    node = x.tape.node(_pass_on, x)
    out = pointwise("add", x)
    return node.attach(out) if node else out


def neg(x: Tensor) -> Tensor:
    """-x."""
    return scale(x, "neg")


@primitive
def activation(x: Tensor, name: str) -> Tensor:
    """gelu, silu: keeps its input, one pass back."""
    node = x.tape.node(_activation_backward, x)
    if node:
        node.save(x)
    out = pointwise(name, x)
    return node.attach(out) if node else out


@primitive
def squashed(x: Tensor, name: str) -> Tensor:
    """relu, tanh, sigmoid: keeps its result, one pass back."""
    node = x.tape.node(_activation_backward, x)
    out = pointwise(name, x)
    if node:
        node.save(out)
        node.attach(out)
    return out


def _activation_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    (kept,) = node.unpack()
    assert grads[0] is not None and isinstance(kept, Tensor)
    return [pointwise("dx", grads[0], kept)]


def square(x: Tensor) -> Tensor:
    """x.pow(2), or another power: in float32 under a GPU's autocast."""
    x = raised(x)
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
    x = raised(x)
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


@primitive
def mean(x: Tensor) -> Tensor:
    """x.mean(-1, keepdim=True)."""

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        return [node.tape.made("mean.dx", node.shapes[0], grads[0].dtype, (grads[0],))]

    node = x.tape.node(backward, x)
    shape = (*x.shape[:-1], 1)
    out = x.tape.made("mean", shape, x.dtype, (x,), kernel=Kernel.REDUCTION)
    return node.attach(out) if node else out


@primitive
def dropout(x: Tensor, rate: float) -> Tensor:
    """F.dropout: a GPU keeps a mask of a byte per number, the CPU noise of the input's own type."""
    tape = x.tape
    if not tape.training or rate == 0:
        return x
    node = tape.node(_activation_backward, x)
    if tape.cuda:
        kind, moved = tape.kind, 2 * x.bytes + x.numel
        results = tape.launch("dropout", (("out", x.bytes), ("mask", x.numel)), kind, moved=moved)
        strides = elementwise(((x.shape, x.strides),))[1]
        out, mask = (tape.tensor(results[i], x.shape, dtype, strides) for i, dtype in ((0, x.dtype), (1, "bool")))
        del results
        if node:
            node.save(mask)
    else:
        noise = tape.made("noise", x.shape, x.dtype, (x, x), strides=elementwise(((x.shape, x.strides),))[1])
        if node:
            node.save(noise)
        out = pointwise("dropout", x, noise)
    return node.attach(out) if node else out


# --- products ---------------------------------------------------------------------------------------------------


@forward
def linear(module: Module, x: Tensor, weight: Tensor | None = None, kind: Kind | None = None) -> Tensor:
    """nn.Linear. Under autocast bias, weight and a float32 input are cast, in this order."""
    bias = module.maybe("bias")
    weight = weight or module.parameter("weight")
    if x.tape.autocast is not None:
        bias = lower(bias) if bias is not None else None
        weight = lower(weight)
        x = lower(x)
    return product(x, weight, bias, kind)


@primitive
def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, kind: Kind | None = None) -> Tensor:
    """x @ weight.T + bias, as at::linear composes it: mm without a bias, addmm with one."""
    tape, shape = x.tape, x.shape
    rows = (x.numel // x.shape[-1], x.shape[-1])
    if viewed(shape, x.strides, rows) is None or (bias is not None and len(shape) != 2):
        x = reshape(x, *rows)  # its node runs after the weight's gradient is accumulated
    node = tape.node(_addmm_backward if bias is not None else _mm_backward, bias, x, weight)
    if node:
        if node.needs(2):
            node.save(x)
        if node.needs(1):
            node.save(weight)
    outputs, inputs = weight.shape
    storage = tape.product("", 1, x.numel // inputs, outputs, inputs, x.dtype, kind)
    out = tape.tensor(storage, (*shape[:-1], outputs), x.dtype)
    return node.attach(out) if node else out


def _mm_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    """The weight's gradient first."""
    grad, x, weight = _operands(node, grads)
    dw = _weight_grad(node, grad) if x is not None else None
    return [None, _input_grad(node, grad) if weight is not None else None, dw]


def _addmm_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    """The input's gradient first; the bias's is summed by the engine."""
    grad, x, weight = _operands(node, grads)
    dx = _input_grad(node, grad) if weight is not None else None
    return [grad, dx, _weight_grad(node, grad) if x is not None else None]


def _operands(node: Node, grads: Gradients) -> tuple[Tensor, Tensor | None, Tensor | None]:
    saved = iter(node.unpack())
    x = next(saved) if node.needs(2) else None
    weight = next(saved) if node.needs(1) else None
    grad, grads[0] = grads[0], None
    assert grad is not None and not (isinstance(x, Storage) or isinstance(weight, Storage))
    rows = (grad.numel // grad.shape[-1], grad.shape[-1])
    if viewed(grad.shape, grad.strides, rows) is None:  # the result was seen as rows: its gradient is copied to be
        grad = _reshaped(grad, rows)
    return grad, x, weight


def _input_grad(node: Node, grad: Tensor) -> Tensor:
    shape = node.shapes[1]
    inputs, outputs = shape[-1], grad.shape[-1]
    storage = node.tape.product("dx", 1, grad.numel // outputs, inputs, outputs, grad.dtype, node.tape.kind)
    return node.tape.tensor(storage, (grad.numel // outputs, inputs), grad.dtype).seen(shape, contiguous_strides(shape))


def _weight_grad(node: Node, grad: Tensor) -> Tensor:
    shape = node.shapes[2]
    outputs, inputs = shape
    kind = node.tape.grad_kind(node, 2)
    storage = node.tape.product("dw", 1, outputs, inputs, grad.numel // outputs, grad.dtype, kind)
    return node.tape.tensor(storage, shape, grad.dtype).seen(shape, contiguous_strides(shape))


@primitive
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for (batch, heads, rows, columns), as at::matmul composes it: operands as batches, copied if they must."""
    tape = a.tape
    a, b = (lower(a), lower(b)) if tape.autocast is not None else (a, b)
    batch = a.shape[:-2]
    flat_a, flat_b = (reshape(each, numel(each.shape[:-2]), *each.shape[-2:]) for each in (a, b))
    node = tape.node(_bmm_backward, flat_a, flat_b)
    if node:
        if node.needs(1):
            node.save(flat_a)
        if node.needs(0):
            node.save(flat_b)
    rows, inner, columns = flat_a.shape[1], flat_a.shape[2], flat_b.shape[2]
    storage = tape.product("bmm", flat_a.shape[0], rows, columns, inner, a.dtype)
    out = tape.tensor(storage, (flat_a.shape[0], rows, columns), a.dtype)
    if node:
        node.attach(out)
    return reshape(out, *batch, rows, columns)


def _bmm_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    _saved = node.unpack()  # alive while this runs
    grad = grads[0]
    assert grad is not None
    tape = node.tape
    (count, rows, inner), (_, _, columns) = node.shapes
    results: Gradients = [None, None]
    if node.needs(1):  # mat2's
        storage = tape.product("bmm.db", count, inner, columns, rows, grad.dtype)
        results[1] = tape.tensor(storage, node.shapes[1], grad.dtype)
    if node.needs(0):
        storage = tape.product("bmm.da", count, rows, inner, columns, grad.dtype)
        results[0] = tape.tensor(storage, node.shapes[0], grad.dtype)
    return results


# --- norms, embeddings ------------------------------------------------------------------------------------------


@primitive
@forward
def layer_norm(module: Module, x: Tensor) -> Tensor:
    """F.layer_norm: keeps its input and each row's mean and deviation. Autocast's is float32 on a GPU."""
    tape = x.tape
    x = raised(x)
    weight, bias = module.parameter("weight"), module.maybe("bias")
    node = tape.node(_layer_norm_backward, x, weight, bias)
    if node:
        node.save(x)
    rows, item = x.numel // x.shape[-1], ITEM_BYTES[x.dtype]
    statistic = 4 if tape.cuda else item
    sizes = (("out", x.bytes), ("mean", rows * statistic), ("rstd", rows * statistic))
    made = tape.launch("", sizes, kernel=Kernel.REDUCTION, moved=2 * x.bytes)
    out = tape.tensor(made[0], x.shape, x.dtype)
    if node:
        node.save(*made[1:])
        node.attach(out)
    return out


def _layer_norm_backward(node: Node, _grads: Gradients) -> Sequence[Tensor | None]:
    x, *_ = node.unpack()
    tape = node.tape
    assert isinstance(x, Tensor)
    width, item = x.shape[-1], ITEM_BYTES[node.dtypes[1]]
    wanted = [(part, index) for part, index in (("weight.grad", 1), ("bias.grad", 2)) if node.needs(index)]
    sizes = [("dx", x.bytes), *((part, width * item) for part, _ in wanted)]
    kinds = [tape.kind, *(tape.grad_kind(node, index) for _, index in wanted)]
    spent = () if tape.cuda else (cpu_layer_norm_backward_bytes(tape.threads, width, item),)
    made = tape.launch("", sizes, kinds, spent=spent, kernel=Kernel.REDUCTION, moved=3 * x.bytes)
    results: Gradients = [tape.tensor(made.pop(0), x.shape, x.dtype), None, None]
    for _, index in wanted:
        results[index] = tape.tensor(made.pop(0), (width,), node.dtypes[index])
    return results


@primitive
@forward
def embedding(module: Module, ids: Tensor) -> Tensor:
    """nn.Embedding: keeps the ids; its gradient is a whole table."""
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


@primitive
def arange(tape: Tape, count: int) -> Tensor:
    """Positions."""
    return tape.made("positions", (count,), "int64", kind=Kind.INPUTS, moved=0)
