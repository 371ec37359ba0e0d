"""Arithmetic of operators other than matrix products, as the matrix products they are equivalent to.

The eager trace has tensors, the compiled one inductor's sizes: the formulas take sizes only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from oomph.step.ops import Op

ProductShape = tuple[int, int, int, int]  # a batch of matrix products: (batch, m, n, k)

# Compute-heavy operators without a formula here, without their leading underscore.
_UNCOUNTED = (
    "cdist_forward", "cdist_backward", "euclidean_dist", "fft_c2c", "fft_r2c", "fft_c2r", "grid_sampler_2d",
    "grid_sampler_3d", "grid_sampler_2d_backward", "grid_sampler_3d_backward", "cudnn_rnn", "cudnn_rnn_backward",
    "trilinear", "triangular_solve", "cholesky", "cholesky_solve", "flex_attention", "flex_attention_backward",
)  # fmt: skip
_UNCOUNTED_FAMILY, _NORM = "linalg_", "linalg_vector_norm"  # but a norm only reads


def convolution(weight: Sequence[int], positions: Sequence[int], groups: int, products: int = 1) -> ProductShape:
    """A convolution as a matrix product over all its positions, or `products` of that size, as in backward.

    `positions` is the shape the kernel moves over: the output, or a transposed convolution's input.
    """
    batch, _, *space = positions
    return groups * products, batch * prod(space), weight[0] // groups, prod(weight[1:])


def recurrent(steps: int, rows: int, inputs: int, weight: Sequence[int], products: int = 1) -> ProductShape:
    """A recurrent layer: at each step, all gates from the input and from the hidden state."""
    gates, hidden = weight
    return steps * products, rows, gates, inputs + hidden


def grouped(left: Sequence[int], right: Sequence[int]) -> ProductShape:
    """torch's `_grouped_mm` of experts: each row, or in a gradient each term of a sum, belongs to one expert."""
    return 1, left[-2], right[-1], left[-1]


def flops_of(shape: ProductShape) -> int:
    """FLOPs of the products: a multiply and an add count as two."""
    return 2 * prod(shape)


def attention_scores(tokens: int, keys: int, causal: bool) -> int:
    """The number of scores computed for one head: with a causal mask the lower triangle."""
    return tokens * (tokens + 1) // 2 if causal else tokens * keys


def attention(scores: int, size: int, value_size: int, backward: bool) -> int:
    """FLOPs of one head: scores and their weighted sum of values; in backward the scores again and four gradients."""
    return 2 * scores * (3 * size + 2 * value_size if backward else size + value_size)


def uncounted(ops: Iterable[Op]) -> list[str]:
    """The operators among these whose arithmetic is not counted."""
    names = dict.fromkeys(op.name.rpartition(".")[2].strip("_") for op in ops)
    return [name for name in names if name in _UNCOUNTED or (name.startswith(_UNCOUNTED_FAMILY) and name != _NORM)]
