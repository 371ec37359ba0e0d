"""Inductor's rewriting of the two graphs, as far as it affects memory (torch/_inductor/fx_passes/post_grad.py)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from oomph.step.compile.graph import How, Value
from oomph.step.tensor.layout import HALVES


def rewritten(graph: Sequence[Value], outputs: Collection[Value], cuda: bool) -> list[Value]:
    """The graph with mm + add fused into addmm, or addmm split into mm and add.

    A product whose only use is an addition in its dtype becomes one operation with it, and runs where the addition
    ran: its operands live until then. Where only elementwise operations read the sum, the two stay or are split.
    """
    inside, kept = set(graph), set(outputs)
    result: list[Value] = []
    for value in graph:
        apart = value.facts.get("product")
        if apart is not None and apart not in inside:  # forward has split them, and backward recomputes them
            inside.add(apart)
            result.append(apart)
        elif value.op == "add" and (found := _product_in(value, inside, kept)) is not None:
            if not (cuda and _is_read_elementwise(value, inside, kept)):
                result.remove(found)
                _absorb(value, found)
        elif value.op == "addmm" and cuda and value.dtype not in HALVES and _is_read_elementwise(value, inside, kept):
            result.append(_unfused(value, inside))
        result.append(value)
    return result


def _product_in(value: Value, inside: Collection[Value], kept: Collection[Value]) -> Value | None:
    """A product that only this addition reads, in the dtype of the other term; None if there is none."""
    if len(value.inputs) != 2:
        return None
    for found, other in (value.inputs, value.inputs[::-1]):
        alone = (
            found.op == "mm"
            and found in inside
            and found not in kept
            and [u for u in found.users if u in inside] == [value]
        )
        if alone and other.dtype == found.dtype == value.dtype and len(other.shape) <= 2:
            return found
    return None


def _is_read_elementwise(value: Value, inside: Collection[Value], kept: Collection[Value]) -> bool:
    if value in kept:
        return False
    for user in value.users:
        if user not in inside:
            continue
        if user.how in (How.VIEW, How.ITEM):
            if not _is_read_elementwise(user, inside, kept):
                return False
        elif user.how is not How.POINTWISE:
            return False
    return True


def _absorb(value: Value, product: Value) -> None:
    """Turn an addition into the product with a term added."""
    other = next(each for each in value.inputs if each is not product)
    value.op, value.how, value.facts, value.name = "addmm", How.PRODUCT, product.facts, product.name
    value.inputs = (*product.inputs, other)
    for operand in product.inputs:
        operand.users = [value if user is product else user for user in operand.users]
    product.users = []


def _unfused(value: Value, inside: set[Value]) -> Value:
    """The product of a fused addition, split off."""
    *operands, bias = value.inputs
    product = Value("mm", How.PRODUCT, tuple(operands), value.shape, value.dtype, value.strides)
    product.index, product.name, product.kind, product.block = value.index, value.name, value.kind, value.block
    product.facts, value.facts = value.facts, {"product": product}
    for operand in operands:
        operand.users = [product if user is value else user for user in operand.users]
    product.users = [value]
    value.op, value.how, value.inputs = "add", How.POINTWISE, (product, bias)
    inside.add(product)
    return product
