"""x[index] of a vector: a view of one number."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.tensor import Tensor


def select(x: Tensor) -> Tensor:
    """x[index], whichever it is; backward writes its gradient into zeros."""
    node = x.tape.node(_backward, x)
    out = x.seen(x.shape[1:], x.strides[1:])
    return node.attach(out) if node else out


def _backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    assert grads[0] is not None
    return [node.tape.made("select.dx", node.shapes[0], grads[0].dtype, (grads[0],))]
