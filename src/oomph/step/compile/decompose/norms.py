"""Norms, decomposed."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.compile.decompose.nodes import as_dtype, as_float32, attach, pointwise, recorder_of, reduction
from oomph.step.compile.graph import How
from oomph.step.tensor import casts, elementwise
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.tape import Module, forward
from oomph.step.tensor.tensor import Tensor


@forward
def layer_norm(module: Module, x: Tensor) -> Tensor:
    """F.layer_norm: var_mean, then pointwise; everything in float32."""
    recorder = recorder_of(x)
    x = casts.autocast_float32(x) if recorder.cuda else x
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


def rms_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """F.rms_norm: one operation with its own backward on CUDA; on the CPU its parts are differentiated.

    Both are computed in float32 (torch/_decomp/decompositions.py `_fused_rms_norm`, `_fused_rms_norm_backward`).
    """
    recorder = recorder_of(x)
    weight = casts.autocast_float32(weight) if weight is not None else None
    x = casts.autocast_float32(x)
    dtype = x.dtype
    if not recorder.cuda or (weight is not None and weight.dtype != dtype):
        wide = casts.to(x, "float32")
        wide = elementwise.mul(wide, elementwise.rsqrt(elementwise.shift(elementwise.mean(elementwise.square(wide)))))
        return casts.to(wide if weight is None else elementwise.mul(wide, weight), dtype)
    row, width = (*x.shape[:-1], 1), x.shape[-1]

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        grad = as_float32(grads[0])
        scaled = grad if weight is None else pointwise("mul", grad, as_float32(weight))
        total = reduction("sum", pointwise("mul", normed, scaled), row)
        inner = pointwise("sub", scaled, pointwise("mul", pointwise("div_n", normed), total))
        dw = None
        if weight is not None and node.needs(1):
            dw = as_dtype(reduction("sum", pointwise("mul", grad, normed), (width,)), weight.dtype)
        return [as_dtype(pointwise("mul", inner, rstd), dtype), dw]

    node = recorder.node(backward, x, weight)
    wide = as_float32(x)
    rstd = pointwise("rsqrt", pointwise("add_eps", reduction("mean", pointwise("pow", wide), row)))
    normed = pointwise("mul", wide, rstd)
    out = normed if weight is None else pointwise("mul", normed, weight, dtype="float32")
    return attach(node, as_dtype(out, dtype))
