"""Arithmetic of operators that are no plain matrix product, as the matrix products they amount to.

The eager trace asks with tensors, the compiled one with inductor's sizes: the formulas take sizes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from oomph.step.ops import Op

ProductShape = tuple[int, int, int, int]  # of a batch of matrix products: (batch, m, n, k)

# Operators that compute much and have no formula here, without their leading underscore.
_UNCOUNTED = (
    "cdist_forward", "cdist_backward", "euclidean_dist", "fft_c2c", "fft_r2c", "fft_c2r", "grid_sampler_2d",
    "grid_sampler_3d", "grid_sampler_2d_backward", "grid_sampler_3d_backward", "cudnn_rnn", "cudnn_rnn_backward",
    "trilinear", "triangular_solve", "cholesky", "cholesky_solve", "flex_attention", "flex_attention_backward",
)  # fmt: skip
_UNCOUNTED_FAMILY, _NORM = "linalg_", "linalg_vector_norm"  # but a norm only reads


def convolution(weight: Sequence[int], positions: Sequence[int], groups: int, products: int = 1) -> ProductShape:
    """A convolution as a matrix product over all its positions, or `products` of that size, as backward has.

    `positions` is the shape of the side that the kernel moves over: what comes out, or what goes into a transposed one.
    """
    batch, _, *space = positions
    return groups * products, batch * prod(space), weight[0] // groups, prod(weight[1:])


def recurrent(steps: int, rows: int, inputs: int, weight: Sequence[int], products: int = 1) -> ProductShape:
    """A recurrent layer: at each of its steps, all gates from the input and from the hidden state."""
    gates, hidden = weight
    return steps * products, rows, gates, inputs + hidden


def grouped(left: Sequence[int], right: Sequence[int]) -> ProductShape:
    """What experts compute together in torch's `_grouped_mm`: each row, or in a gradient each sum, belongs to one."""
    return 1, left[-2], right[-1], left[-1]


def flops_of(shape: ProductShape) -> int:
    """A multiply and an add each."""
    return 2 * prod(shape)


def attention_scores(tokens: int, keys: int, causal: bool) -> int:
    """Scores of one head that are computed: a causal mask leaves the lower triangle."""
    return tokens * (tokens + 1) // 2 if causal else tokens * keys


def attention(scores: int, size: int, value_size: int, backward: bool) -> int:
    """FLOPs of one head: scores and their weighted sum of values; in backward the scores again and four gradients."""
    return 2 * scores * (3 * size + 2 * value_size if backward else size + value_size)


def uncounted(ops: Iterable[Op]) -> list[str]:
    """The operators among these whose arithmetic nobody counted."""
    names = dict.fromkeys(op.name.rpartition(".")[2].strip("_") for op in ops)
    return [name for name in names if name in _UNCOUNTED or (name.startswith(_UNCOUNTED_FAMILY) and name != _NORM)]
