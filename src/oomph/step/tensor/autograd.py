"""PyTorch's autograd engine: what is saved for backward, in which order nodes run, where gradients are added.

The engine runs the newest node that is ready (`torch/csrc/autograd/engine.cpp`). A node's results are brought to the
shape and dtype of its inputs (`validate_outputs`), and its arguments and saved tensors are freed. Two gradients of one
input are added: into the older one if nothing else refers to it (`input_buffer.cpp`), else into a new tensor.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING

from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.layout import Shape, contiguous_strides, is_dense, result_layout
from oomph.step.tensor.tensor import Storage, Tensor

if TYPE_CHECKING:
    from oomph.step.tensor.checkpoint import Holder
    from oomph.step.tensor.tape import Tape

Gradients = list[Tensor | None]
Backward = Callable[["Node", Gradients], Sequence[Tensor | None]]
Saved = Tensor | Storage


class Node:
    """One node of the backward graph: its function, its saved tensors, and the nodes that get its results."""

    __slots__ = ("backward", "block", "dtypes", "edges", "kind", "outputs", "saved", "scope", "seq", "shapes", "tape")

    def __init__(self, tape: Tape, backward: Backward, inputs: Sequence[Tensor | None]) -> None:
        self.tape = tape
        self.seq: float = tape.next_seq()
        self.backward = backward
        self.saved: list[Saved | Holder] = []
        self.edges = [None if t is None else t.edge for t in inputs]
        self.shapes = [() if t is None else t.shape for t in inputs]
        self.dtypes = ["" if t is None else t.dtype for t in inputs]
        self.outputs = 1
        self.scope, self.block, self.kind = tape.scope, tape.block, tape.kind

    def __lt__(self, other: Node) -> bool:
        return self.seq > other.seq  # the newest first

    def needs(self, index: int) -> bool:
        """Whether an input needs a gradient."""
        return self.edges[index] is not None

    def save(self, *tensors: Saved) -> None:
        """Save tensors for backward; in a checkpointed region, only note that they can be recomputed."""
        frame = self.tape.frame
        if frame is None:
            self.saved += [each.detach() if isinstance(each, Tensor) else each for each in tensors]
        else:
            for each in tensors:
                self.saved.append(frame.pack(each))

    def unpack(self) -> list[Saved]:
        """The saved tensors; a checkpointed region recomputes them now."""
        return [each if isinstance(each, (Tensor, Storage)) else each.unpack() for each in self.saved]

    def attach(self, out: Tensor, index: int = 0) -> Tensor:
        """Make this node the one that receives the result's gradient. Returns the result."""
        out.edge = (self, index)
        self.outputs = max(self.outputs, index + 1)
        return out


class Leaf(Node):
    """AccumulateGrad of a parameter: runs as soon as its gradient is ready."""

    __slots__ = ("name", "strides")

    def __init__(self, tape: Tape, name: str, shape: Shape, dtype: str) -> None:
        super().__init__(tape, _accumulate, ())
        self.seq = inf
        self.scope = name
        self.name, self.shapes, self.dtypes = name, [shape], [dtype]
        self.strides = contiguous_strides(shape)


def _accumulate(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    """The first gradient becomes `.grad`; later ones are added into it."""
    assert isinstance(node, Leaf)
    tape, grad = node.tape, grads[0]
    assert grad is not None
    if node.name in tape.grads:
        tape.note("grad", Kernel.POINTWISE, moved=3 * grad.bytes)
    elif grad.strides == node.strides or grad.is_contiguous:
        tape.note("grad", Kernel.NONE)
        tape.grads[node.name] = grad.storage
    else:  # its layout is not the parameter's: copied
        tape.grads[node.name] = tape.made("grad", grad.shape, grad.dtype, (grad,), Kind.GRADIENTS).storage
    return ()


class InputLeaf(Node):
    """AccumulateGrad of an activation made to require a gradient: holds both for as long as the graph lives."""

    __slots__ = ("storage",)

    def __init__(self, x: Tensor) -> None:
        super().__init__(x.tape, _hold, ())
        self.seq = inf
        self.shapes, self.dtypes, self.storage = [x.shape], [x.dtype], x.storage


def _hold(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    assert isinstance(node, InputLeaf) and grads[0] is not None
    node.tape.note("grad", Kernel.NONE)
    node.tape.kept_inputs += [node.storage, grads[0].storage]
    return ()


def run_backward(*roots: tuple[Tensor, Tensor]) -> None:
    """Run the graph that made the roots, each with its gradient, freeing it on the way."""
    tape = roots[0][0].tape
    edges = [root.edge for root, _ in roots if root.edge is not None]
    waits = _count_edges([node for node, _ in edges])
    arrived: dict[Node, Gradients] = {}
    for (node, slot), (_, grad) in zip(edges, roots, strict=True):
        arrived.setdefault(node, [None] * node.outputs)[slot] = grad
        del grad
    ready = [node for node in arrived if not waits.get(node)]
    heapq.heapify(ready)
    del roots
    before = tape.scope, tape.block, tape.kind
    while ready:
        node = heapq.heappop(ready)
        _run_node(node, arrived.pop(node), arrived, waits, ready)
    tape.scope, tape.block, tape.kind = before


def _count_edges(first: Sequence[Node]) -> dict[Node, int]:
    """The number of gradients each node waits for."""
    waits: dict[Node, int] = {}
    todo, seen = list(dict.fromkeys(first)), set(first)
    while todo:
        for edge in todo.pop().edges:
            if edge is not None:
                node = edge[0]
                waits[node] = waits.get(node, 0) + 1
                if node not in seen:
                    seen.add(node)
                    todo.append(node)
    return waits


def _run_node(
    node: Node, grads: Gradients, arrived: dict[Node, Gradients], waits: dict[Node, int], ready: list[Node]
) -> None:
    tape = node.tape
    tape.scope, tape.block = node.scope, node.block
    tape.kind = Kind.TEMPORARY if node.kind is Kind.ACTIVATIONS else node.kind
    results: Gradients = []
    if any(grad is not None for grad in grads):
        results = list(node.backward(node, grads))
        for index, edge in enumerate(node.edges):
            if edge is None:
                results[index] = None
            elif results[index] is not None:
                _fit(node, index, results)
    grads.clear()
    node.saved = []
    for index, edge in enumerate(node.edges):
        if edge is None:
            continue
        target, slot = edge
        if results:
            _meet(arrived.setdefault(target, [None] * target.outputs), slot, results, index)
        waits[target] -= 1
        if not waits[target]:
            arrived.setdefault(target, [None] * target.outputs)
            heapq.heappush(ready, target)
    node.edges = []


def _fit(node: Node, index: int, results: Gradients) -> None:
    """validate_outputs: the gradient in its input's shape and dtype."""
    tape, shape, dtype = node.tape, node.shapes[index], node.dtypes[index]
    grad, results[index] = results[index], None
    assert grad is not None
    if grad.shape != shape:
        fewer = len(grad.shape) > len(shape)  # sum_to keeps all dimensions, then views the result with fewer
        grad = tape.made("sum", shape, grad.dtype, (grad,), tape.grad_kind(node, index), kernel=Kernel.REDUCTION)
        grad = grad.as_strided(shape, grad.strides) if fewer else grad
    if grad.dtype != dtype:
        grad = tape.cast(grad, dtype, tape.grad_kind(node, index))
    results[index] = grad


def _meet(slots: Gradients, slot: int, results: Gradients, index: int) -> None:
    """Add two gradients of one input: into the older one if only the engine refers to it, else into a new tensor."""
    grad, results[index] = results[index], None
    if grad is None:
        return
    old = slots[slot]
    if old is None:
        slots[slot] = grad
        return
    tape = grad.tape
    if _is_alone(old):
        tape.note("add", Kernel.POINTWISE, moved=2 * old.bytes + grad.bytes)
        return
    shape, strides = result_layout(((old.shape, old.strides), (grad.shape, grad.strides)))
    kind = old.storage.kind if old.storage is not None else Kind.TEMPORARY
    slots[slot] = tape.made("add", shape, old.dtype, (old, grad), kind, strides=strides)


def _holders(tensor: Tensor) -> int:
    return sys.getrefcount(tensor.storage)


def _is_alone(tensor: Tensor) -> bool:
    """Whether only the engine refers to a tensor that can be added into."""
    return not tensor.is_view and is_dense(tensor.shape, tensor.strides) and _holders(tensor) <= _ONE_HOLDER


def _count_one_holder() -> int:
    """The count `_holders` returns for a storage with a single holder: its offset depends on the Python version."""
    from oomph.step.ops import Buffer
    from oomph.step.tensor.tensor import Ledger

    storage = Storage(Ledger(), Buffer("", 0, Kind.TEMPORARY))
    tensor = Tensor(None, storage, (), (), "float32")  # type: ignore[arg-type]
    del storage
    return _holders(tensor)


_ONE_HOLDER = _count_one_holder()
