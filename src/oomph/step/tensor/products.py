"""Matrix products: linear layers, batched products, and the grouped products of a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.casts import autocast_half
from oomph.step.tensor.layout import ITEM_BYTES, contiguous_strides, numel, viewed
from oomph.step.tensor.tape import Module, decomposable, forward
from oomph.step.tensor.tensor import Storage, Tensor
from oomph.step.tensor.views import as_shape, reshape

_ALIGNMENT_BYTES = 16  # a row of a grouped product begins at a multiple of this


@forward
def linear(module: Module, x: Tensor, weight: Tensor | None = None, kind: Kind | None = None) -> Tensor:
    """nn.Linear. Under autocast bias, weight and a float32 input are cast, in this order."""
    bias = module.maybe("bias")
    weight = weight or module.parameter("weight")
    if x.tape.autocast is not None:
        bias = autocast_half(bias) if bias is not None else None
        weight = autocast_half(weight)
        x = autocast_half(x)
    return product(x, weight, bias, kind)


@decomposable
def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, kind: Kind | None = None) -> Tensor:
    """x @ weight.T + bias, as at::linear composes it: mm without a bias, addmm with one."""
    tape, shape = x.tape, x.shape
    rows = (x.numel // x.shape[-1], x.shape[-1])
    if bias is None and not weight.requires_grad and viewed(shape, x.strides, rows) is None:
        return _batched(x, weight, kind)
    if viewed(shape, x.strides, rows) is None or (bias is not None and len(shape) != 2):
        x = reshape(x, *rows)  # its node runs after the weight's gradient is accumulated
    node = tape.node(_addmm_backward if bias is not None else _mm_backward, bias, x, weight)
    if node:
        if node.needs(2):
            node.save(x)
        if node.needs(1):
            node.save(weight)
    outputs, inputs = weight.shape
    rows = (x.numel // inputs, outputs)
    storage = tape.kept(lambda: tape.product("", 1, *rows, inputs, x.dtype, kind), product=True)
    out = tape.tensor(storage, (*shape[:-1], outputs), x.dtype)
    return node.attach(out) if node else out


def _batched(x: Tensor, weight: Tensor, kind: Kind | None) -> Tensor:
    """at::matmul of a frozen weight and an input that is not rows in memory: a product per batch element."""
    tape, (batch, tokens, inputs), outputs = x.tape, x.shape, weight.shape[0]

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        storage = tape.product("dx", batch, tokens, inputs, outputs, grads[0].dtype)
        return [tape.tensor(storage, (batch, tokens, inputs), grads[0].dtype)]

    node = tape.node(backward, x)
    storage = tape.product("", batch, tokens, outputs, inputs, x.dtype, kind)
    out = tape.tensor(storage, (batch, tokens, outputs), x.dtype)
    return node.attach(out) if node else out


def _mm_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    """Gradients of mm, the weight's first."""
    grad, x, weight = _operands(node, grads)
    dw = _weight_grad(node, grad) if x is not None else None
    return [None, _input_grad(node, grad) if weight is not None else None, dw]


def _addmm_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    """Gradients of addmm, the input's first; the engine sums the bias's."""
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
    if viewed(grad.shape, grad.strides, rows) is None:  # it cannot be viewed as rows, so it is copied
        grad = as_shape(grad, rows)
    return grad, x, weight


def _input_grad(node: Node, grad: Tensor) -> Tensor:
    shape = node.shapes[1]
    inputs, outputs = shape[-1], grad.shape[-1]
    storage = node.tape.product("dx", 1, grad.numel // outputs, inputs, outputs, grad.dtype, node.tape.kind)
    dx = node.tape.tensor(storage, (grad.numel // outputs, inputs), grad.dtype)
    return dx if len(shape) == 2 else dx.as_strided(shape, contiguous_strides(shape))


def _weight_grad(node: Node, grad: Tensor) -> Tensor:
    shape = node.shapes[2]
    outputs, inputs = shape
    kind = node.tape.grad_kind(node, 2)
    storage = node.tape.product("dw", 1, outputs, inputs, grad.numel // outputs, grad.dtype, kind)
    return node.tape.tensor(storage, shape, grad.dtype).as_strided(shape, contiguous_strides(shape))


@decomposable
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for (batch, heads, rows, columns), as at::matmul composes it: operands as batches, copied if necessary."""
    tape = a.tape
    a, b = (autocast_half(a), autocast_half(b)) if tape.autocast is not None else (a, b)
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
    if node.needs(1):  # mat2's gradient
        storage = tape.product("bmm.db", count, inner, columns, rows, grad.dtype)
        results[1] = tape.tensor(storage, node.shapes[1], grad.dtype)
    if node.needs(0):
        storage = tape.product("bmm.da", count, rows, inner, columns, grad.dtype)
        results[0] = tape.tensor(storage, node.shapes[0], grad.dtype)
    return results


def grouped_conv1d(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """F.conv1d(x, weight, groups=groups) of (batch, channels, tokens) with kernels of size 1: a product per group."""
    tape, (batch, channels, tokens), outputs = x.tape, x.shape, weight.shape[0]
    inputs, own = channels // groups, outputs // groups
    if tape.autocast is not None:
        weight, x = autocast_half(weight), autocast_half(x)

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        _saved, grad = node.unpack(), grads[0]
        assert grad is not None
        dx = tape.product("conv.dx", batch * groups, inputs, tokens, own, grad.dtype)
        dw = tape.product("conv.dw", groups, own, inputs, batch * tokens, grad.dtype, tape.grad_kind(node, 1))
        return [tape.tensor(dx, node.shapes[0], grad.dtype), tape.tensor(dw, node.shapes[1], grad.dtype)]

    node = tape.node(backward, x, weight)
    if node:
        node.save(x, weight)
    storage = tape.product("conv", batch * groups, own, tokens, inputs, x.dtype)
    out = tape.tensor(storage, (batch, outputs, tokens), x.dtype)
    return node.attach(out) if node else out


@forward
def conv1d(module: Module, x: Tensor) -> Tensor:
    """Conv1D: torch.addmm(bias, x.view(-1, inputs), weight), the weight of shape (inputs, outputs)."""
    bias, weight = module.parameter("bias"), module.parameter("weight")
    shape = (*x.shape[:-1], weight.shape[1])
    return reshape(addmm(bias, reshape(x, x.numel // x.shape[-1], x.shape[-1]), weight), *shape)


@decomposable
def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """bias + x @ weight. Autocast casts from the last argument to the first."""
    tape = x.tape
    if tape.autocast is not None:
        weight, x, bias = autocast_half(weight), autocast_half(x), autocast_half(bias)
    node = tape.node(_conv1d_backward, bias, x, weight)
    if node:
        if node.needs(2):
            node.save(x)
        if node.needs(1):
            node.save(weight)
    (rows, inputs), outputs = x.shape, weight.shape[1]
    out = tape.tensor(tape.product("", 1, rows, outputs, inputs, x.dtype), (rows, outputs), x.dtype)
    return node.attach(out) if node else out


def _conv1d_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    """Gradients of Conv1D, the input's first; the engine sums the bias's."""
    _saved = node.unpack()  # alive while this runs
    grad, tape = grads[0], node.tape
    assert grad is not None
    results: Gradients = [grad, None, None]
    _, (rows, inputs), (_, outputs) = node.shapes
    if node.needs(1):
        results[1] = tape.tensor(tape.product("dx", 1, rows, inputs, outputs, grad.dtype), (rows, inputs), grad.dtype)
    if node.needs(2):
        made = tape.product("dw", 1, inputs, outputs, rows, grad.dtype, tape.grad_kind(node, 2))
        results[2] = tape.tensor(made, (inputs, outputs), grad.dtype)
    return results


@decomposable
def grouped_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """F.grouped_mm(x, weight.transpose(-2, -1), offs=offsets): each group's rows times its own matrix.

    `weight` is (groups, outputs, inputs). Autocast does not cover the operation: it computes in the weight's dtype.
    """
    node = x.tape.node(_grouped_backward, x, weight)
    if node:
        node.save(*([x] if node.needs(1) else []), *([weight] if node.needs(0) else []), offsets)
    rows, inputs = x.shape
    outputs = weight.shape[1]
    out = x.tape.tensor(_grouped(x, "", rows, outputs, inputs, rows, outputs), (rows, outputs), x.dtype)
    return node.attach(out) if node else out


def _grouped_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    """Gradients of grouped_mm, the weight's first."""
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
    """A grouped product that costs as much as one of (m, k) and (k, n); its result is `rows` × `columns`."""
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
