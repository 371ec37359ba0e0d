"""Activations by transformers' names for them."""

from __future__ import annotations

from oomph.step.tensor.functions import activation, add, mul, scale, shift, square, squashed
from oomph.step.tensor.tensor import Tensor


def activate(x: Tensor, name: str) -> Tensor:
    """ACT2FN[name](x)."""
    if name == "relu":
        return squashed(x, name)
    return gelu_new(x) if name == "gelu_new" else activation(x, name)


def gelu_new(x: Tensor) -> Tensor:
    """0.5 * x * (1.0 + tanh(c * (x + 0.044715 * x.pow(3)))), a pass each."""
    return mul(scale(x), shift(squashed(scale(add(x, scale(square(x)))), "tanh")))
