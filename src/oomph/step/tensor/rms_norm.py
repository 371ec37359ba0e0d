"""F.rms_norm without a weight: one kernel on a GPU, composed of others on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.ops import Kernel
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.functions import mean, mul, rsqrt, square, to
from oomph.step.tensor.tape import primitive
from oomph.step.tensor.tensor import Tensor


@primitive
def rms_norm(x: Tensor) -> Tensor:
    """F.rms_norm(x, (x.size(-1),)): CUDA's `_fused_rms_norm` keeps its input and each row's deviation in float32."""
    tape = x.tape
    if not tape.cuda:
        return _composed(x)
    node = tape.node(_fused_backward, x)
    if node:
        node.save(x)
    sizes = (("", x.bytes), ("rstd", 4 * (x.numel // x.shape[-1])))
    made = tape.launch("rms_norm", sizes, kernel=Kernel.REDUCTION, moved=2 * x.bytes)
    out = tape.tensor(made[0], x.shape, x.dtype)
    if node:
        node.save(made[1])
        node.attach(out)
    return out


def _fused_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    x, _ = node.unpack()
    grad = grads[0]
    assert grad is not None and isinstance(x, Tensor)
    return [node.tape.made("rms_norm.dx", x.shape, x.dtype, (grad, x), kernel=Kernel.REDUCTION)]


def _composed(x: Tensor) -> Tensor:
    """`rms_norm_composite`: in float32, in one expression whose parts live to its end."""
    wide = to(x, "float32")
    squares = square(wide)
    variance = mean(squares)
    x.tape.note("rms_norm.eps", moved=2 * variance.bytes)  # added in place
    root = rsqrt(variance)
    del squares, variance
    wide = mul(wide, root)
    return to(wide, x.dtype)
