"""The nodes that decompositions are written with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oomph.step.compile.graph import GraphRecorder, How
from oomph.step.ops import Kind
from oomph.step.tensor import elementwise
from oomph.step.tensor.autograd import Node
from oomph.step.tensor.layout import (
    HALVES,
    Shape,
)
from oomph.step.tensor.tensor import Tensor


def recorder_of(x: Tensor) -> GraphRecorder:
    """The recorder that a tensor belongs to."""
    assert isinstance(x.tape, GraphRecorder)
    return x.tape


def pointwise(op: str, *reads: Tensor, dtype: str | None = None) -> Tensor:
    """An elementwise node, by default in its operands' promoted dtype."""
    return elementwise.pointwise(op, *reads, dtype=dtype)


def reduction(op: str, x: Tensor, shape: Shape, dtype: str | None = None) -> Tensor:
    """A reduction node with a smaller shape."""
    return recorder_of(x).record(op, How.REDUCTION, (x,), shape, dtype or x.dtype)


def constant(x: Tensor, op: str, shape: Shape, dtype: str) -> Tensor:
    """A node without inputs, in x's graph."""
    return recorder_of(x).record(op, How.CONSTANT, (), shape, dtype)


ResultLayout = tuple[Shape, str, Shape | None]  # shape, dtype, and strides if not contiguous


def called(
    op: str, reads: Sequence[Tensor], results: Sequence[ResultLayout], kind: Kind | None = None, **facts: Any
) -> list[Tensor]:
    """The results of an opaque kernel; `facts` are those of its operation."""
    recorder = recorder_of(reads[0])
    call = recorder.record(op, How.CALL, reads, (), reads[0].dtype, kind=kind, work=facts)
    return [
        recorder.record("item", How.ITEM, (call,), shape, dtype, strides, key=index, kind=kind)
        for index, (shape, dtype, strides) in enumerate(results)
    ]


def as_float32(x: Tensor) -> Tensor:
    """The tensor in float32, which PyTorch computes half-precision inputs in."""
    return x.tape.cast(x, "float32") if x.dtype in HALVES else x


def as_dtype(x: Tensor, dtype: str) -> Tensor:
    """The tensor in that dtype."""
    return x if x.dtype == dtype else x.tape.cast(x, dtype)


def attach(node: Node | None, out: Tensor) -> Tensor:
    """The result, with its autograd node if it has one."""
    return node.attach(out) if node else out
