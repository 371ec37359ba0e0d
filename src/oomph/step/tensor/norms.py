"""Norms: layer_norm, and rms_norm (one kernel on a GPU, composed on the CPU)."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.kernels import cpu_layer_norm_backward_bytes
from oomph.step.ops import Kernel
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.casts import autocast_float32, to
from oomph.step.tensor.elementwise import mean, mul, rsqrt, square
from oomph.step.tensor.layout import ITEM_BYTES
from oomph.step.tensor.tape import Module, decomposable, forward
from oomph.step.tensor.tensor import Tensor


@decomposable
@forward
def layer_norm(module: Module, x: Tensor) -> Tensor:
    """F.layer_norm: saves its input and each row's mean and deviation. Under a GPU's autocast it is float32."""
    tape = x.tape
    bias = module.maybe("bias")
    bias = autocast_float32(bias) if bias is not None else None
    weight = autocast_float32(module.parameter("weight"))
    x = autocast_float32(x)
    node = tape.node(_layer_norm_backward, x, weight, bias)
    if node:
        node.save(x, weight, *([bias] if bias is not None else []))
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
    temporaries = () if tape.cuda else (cpu_layer_norm_backward_bytes(tape.threads, width, item),)
    made = tape.launch("", sizes, kinds, temporaries=temporaries, kernel=Kernel.REDUCTION, moved=3 * x.bytes)
    results: Gradients = [tape.tensor(made.pop(0), x.shape, x.dtype), None, None]
    for _, index in wanted:
        results[index] = tape.tensor(made.pop(0), (width,), node.dtypes[index])
    return results


@decomposable
def rms_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """F.rms_norm(x, (x.size(-1),), weight): CUDA's `_fused_rms_norm` saves its input and each row's deviation in
    float32. Under autocast it is float32. It requires x's dtype of the weight: otherwise, as on a CPU, the norm is
    composed."""
    tape = x.tape
    weight = autocast_float32(weight) if weight is not None else None
    x = autocast_float32(x)
    if not tape.cuda or (weight is not None and weight.dtype != x.dtype):
        return _composed_rms_norm(x, weight)
    node = tape.node(_rms_norm_backward, x, weight)
    if node:
        node.save(x)
    sizes = (("", x.bytes), ("rstd", 4 * (x.numel // x.shape[-1])))
    made = tape.launch("rms_norm", sizes, kernel=Kernel.REDUCTION, moved=2 * x.bytes)
    out = tape.tensor(made[0], x.shape, x.dtype)
    if node:
        node.save(made[1])
        node.attach(out)
    return out


def _rms_norm_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    x, _ = node.unpack()
    grad, tape = grads[0], node.tape
    assert grad is not None and isinstance(x, Tensor)
    dx = tape.made("rms_norm.dx", x.shape, x.dtype, (grad, x), kernel=Kernel.REDUCTION)
    if not node.dtypes[1]:
        return [dx, None]
    kind = tape.grad_kind(node, 1)
    return [dx, tape.made("rms_norm.dw", node.shapes[1], node.dtypes[1], kind=kind, kernel=Kernel.REDUCTION)]


def _composed_rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    """`rms_norm_composite`: in float32, in one expression whose intermediates live to its end."""
    wide = to(x, "float32")
    squares = square(wide)
    variance = mean(squares)
    x.tape.note("rms_norm.eps", moved=2 * variance.bytes)  # added in place
    root = rsqrt(variance)
    del squares, variance
    wide = mul(wide, root)
    if weight is not None:
        wide = mul(wide, weight)
    return to(wide, x.dtype)
