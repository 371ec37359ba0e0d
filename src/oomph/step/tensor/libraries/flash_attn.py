"""flash-attn's rotary embedding (flash_attn/layers/rotary.py, 2.3): one fused Triton kernel, one autograd function."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.elementwise import pointwise
from oomph.step.tensor.tensor import Tensor


def flash_rotary(x: Tensor) -> Tensor:
    """ApplyRotaryEmb, not in place: saves only cosines and sines."""
    node = x.tape.node(_flash_rotary_backward, x)
    out = pointwise("rotary", x)
    return node.attach(out) if node else out


def _flash_rotary_backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    """The gradient is cloned first, to work around a bug of Triton 2.0."""
    assert grads[0] is not None
    do = pointwise("clone", grads[0])
    return [pointwise("rotary", do)]
