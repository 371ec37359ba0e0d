"""What PyTorch's kernels allocate beside their results. Shared by the arithmetic and the trace.

CUDA's are read from PyTorch's sources: `aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp` (mha_fwd,
mha_bwd) and `.../cuda/attention_backward.cu` (_efficient_attention_backward). The CPU's are seen by PyTorch's profiler.
"""

from __future__ import annotations

FLASH_STATE_BYTES = (16, 8)  # the random state and an unused twin: two uint64, and one
_FLASH_ROWS = 128  # the backward pads a sequence to this
_EFFICIENT_ROWS = 32  # the forward pads its logsumexp to this
_EFFICIENT_TILE = 64  # rows and columns of a tile in the backward, with 16 bytes for its lock


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def flash_lse_bytes(batch: int, heads: int, tokens: int) -> int:
    """The logarithm of each row's sum: one float32 a head and token."""
    return 4 * batch * heads * tokens


def flash_backward_bytes(batch: int, heads: int, tokens: int, head_size: int) -> tuple[int, int]:
    """Temporaries of the flash backward: each row's dot product, and the queries' gradient summed up in float32."""
    rows = _up(tokens, _FLASH_ROWS)
    columns = _up(head_size, 32 if head_size <= 128 else 64)
    return 4 * batch * heads * rows, 4 * batch * rows * heads * columns


def efficient_lse_bytes(batch: int, heads: int, tokens: int) -> int:
    """As flash's, with rows padded."""
    return 4 * batch * heads * _up(tokens, _EFFICIENT_ROWS)


def efficient_backward_bytes(batch: int, heads: int, tokens: int, head_size: int, half: bool) -> tuple[int, ...]:
    """Temporaries of the memory-efficient backward.

    In half precision: each row's dot product, and tiles in which the queries' gradient is summed up in float32. In
    float32: the product of output and gradient, its row sums, and those sums once more, transposed.
    """
    sums = 4 * batch * heads * tokens
    if not half:
        return 4 * batch * heads * tokens * head_size, sums, sums
    tiles = -(-tokens // _EFFICIENT_TILE) * -(-head_size // _EFFICIENT_TILE)
    return sums, batch * heads * tiles * (4 * _EFFICIENT_TILE * _EFFICIENT_TILE + 16)


def _cpu_tile(tokens: int) -> tuple[int, int]:
    """Rows of queries and of keys that the CPU's flash kernel takes at once."""
    queries = 256 if tokens >= 768 else 64 if tokens >= 192 else 32
    return min(queries, tokens), min(512, tokens)


def cpu_flash_bytes(threads: int, tokens: int, head_size: int) -> int:
    """A thread's scores, its rows' maxima and sums, and its output."""
    queries, keys = _cpu_tile(tokens)
    return 4 * threads * (queries * keys + 2 * queries + queries * head_size)


def cpu_flash_backward_bytes(threads: int, tokens: int) -> tuple[int, int]:
    """Each thread's scores and their gradient, and one tile's dot products."""
    queries, keys = _cpu_tile(tokens)
    return 4 * threads * 2 * queries * keys, 4 * queries


def cpu_layer_norm_backward_bytes(threads: int, width: int) -> int:
    """Each thread's share of the weight's and the bias's gradient."""
    return 4 * threads * 2 * width


def safe_softmax_bytes(rows: int, columns: int, float_bytes: int) -> tuple[int, int, int]:
    """Which scores are minus infinity, which rows hold nothing else, and the zero these are filled with."""
    return rows * columns, rows, float_bytes
