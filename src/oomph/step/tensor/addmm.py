"""torch.addmm of a matrix that is not transposed, as transformers' Conv1D computes it."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.functions import lower, reshape
from oomph.step.tensor.tape import Module, forward, primitive
from oomph.step.tensor.tensor import Tensor


@forward
def conv1d(module: Module, x: Tensor) -> Tensor:
    """Conv1D: torch.addmm(bias, x.view(-1, inputs), weight), the weight of shape (inputs, outputs)."""
    bias, weight = module.parameter("bias"), module.parameter("weight")
    shape = (*x.shape[:-1], weight.shape[1])
    return reshape(addmm(bias, reshape(x, x.numel // x.shape[-1], x.shape[-1]), weight), *shape)


@primitive
def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """bias + x @ weight. Autocast casts from the last argument to the first."""
    tape = x.tape
    if tape.autocast is not None:
        weight, x, bias = lower(weight), lower(x), lower(bias)
    node = tape.node(_backward, bias, x, weight)
    if node:
        if node.needs(2):
            node.save(x)
        if node.needs(1):
            node.save(weight)
    (rows, inputs), outputs = x.shape, weight.shape[1]
    out = tape.tensor(tape.product("", 1, rows, outputs, inputs, x.dtype), (rows, outputs), x.dtype)
    return node.attach(out) if node else out


def _backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    """The input's gradient first; the bias's is summed by the engine."""
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
