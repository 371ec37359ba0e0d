"""Numbers and rows taken from tensors by their place, in smaller operations."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.compile.decompose.nodes import attach, constant, recorder_of
from oomph.step.compile.graph import How, Traced
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.tensor import Tensor


def select(x: Tensor, index: int) -> Tensor:
    """x[index]; backward writes its gradient into zeros, number by number."""

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad, shape = grads[0], node.shapes[0]
        assert grad is not None
        reads = (constant(grad, "full", shape, grad.dtype), grad)
        return [recorder_of(grad).record("select_scatter", How.POINTWISE, reads, shape, grad.dtype, key=index)]

    node = x.tape.node(backward, x)
    assert isinstance(x, Traced)
    return attach(node, x.seen(x.shape[1:], x.strides[1:], index * x.strides[0], "select"))
