"""Dtype conversions: what autocast casts, and the weight copies it caches."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.ops import Kind
from oomph.step.tensor.autograd import Gradients, Leaf, Node
from oomph.step.tensor.layout import HALVES
from oomph.step.tensor.tensor import Tensor


def to(x: Tensor, dtype: str, kind: Kind | None = None) -> Tensor:
    """The tensor in another dtype; itself if it already has that."""
    if x.dtype == dtype:
        return x
    node = x.tape.node(pass_on, x)
    out = x.tape.cast(x, dtype, kind)
    return node.attach(out) if node else out


def autocast_half(x: Tensor) -> Tensor:
    """The tensor as autocast passes it to a matrix product: in half precision, a trained weight's copy cached."""
    tape = x.tape
    dtype = tape.autocast
    if dtype is None or x.dtype == dtype:
        return x
    leaf = x.edge[0] if x.edge is not None else None
    if not isinstance(leaf, Leaf) or x.dtype != "float32":
        return to(x, dtype)
    cached = tape.casts.get(leaf.name)
    if cached is None:
        scope, tape.scope = tape.scope, leaf.name
        cached = tape.casts[leaf.name] = to(x, dtype, Kind.HALF_WEIGHTS)
        tape.scope = scope
    return cached


def autocast_float32(x: Tensor) -> Tensor:
    """The tensor as a GPU's autocast passes it to an operation on its float32 list."""
    return to(x, "float32") if x.tape.cuda and x.tape.autocast is not None and x.dtype in HALVES else x


def pass_on(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    return [grads[0]]
