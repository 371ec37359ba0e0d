"""rms_norm in smaller operations."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.compile.decompose.nodes import as_dtype, as_float32, attach, pointwise, recorder_of, reduction
from oomph.step.tensor import functions as F
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.tensor import Tensor


def rms_norm(x: Tensor) -> Tensor:
    """F.rms_norm without a weight: CUDA has an operation with a backward of its own, the CPU differentiates its parts.

    Both are computed in float32 (torch/_decomp/decompositions.py `_fused_rms_norm`, `_fused_rms_norm_backward`).
    """
    recorder, dtype = recorder_of(x), x.dtype
    if not recorder.cuda:
        wide = F.to(x, "float32")
        return F.to(F.mul(wide, F.rsqrt(F.shift(F.mean(F.square(wide))))), dtype)
    row = (*x.shape[:-1], 1)

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        grad = as_float32(grads[0])
        total = reduction("sum", pointwise("mul", normed, grad), row)
        inner = pointwise("sub", grad, pointwise("mul", pointwise("div_n", normed), total))
        return [as_dtype(pointwise("mul", inner, rstd), dtype)]

    node = recorder.node(backward, x)
    wide = as_float32(x)
    rstd = pointwise("rsqrt", pointwise("add_eps", reduction("mean", pointwise("pow", wide), row)))
    normed = pointwise("mul", wide, rstd)
    return attach(node, as_dtype(normed, dtype))
