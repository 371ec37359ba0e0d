"""x[index] of a vector: a view of one number."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.tape import primitive
from oomph.step.tensor.tensor import Tensor


@primitive
def select(x: Tensor, index: int) -> Tensor:
    """x[index]; backward writes its gradient into zeros."""
    del index  # which only a recorded program needs
    node = x.tape.node(_backward, x)
    out = x.seen(x.shape[1:], x.strides[1:])
    return node.attach(out) if node else out


def _backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    assert grads[0] is not None
    return [node.tape.made("select.dx", node.shapes[0], grads[0].dtype, (grads[0],))]
