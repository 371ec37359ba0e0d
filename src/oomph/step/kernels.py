"""What PyTorch's kernels allocate besides their results, for step/tensor, step/compile and step/trace.

CUDA's are read from PyTorch's sources: `aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp` (mha_fwd,
mha_bwd) and `.../cuda/attention_backward.cu` (_efficient_attention_backward). The CPU's were seen with the profiler.
"""

from __future__ import annotations

FLASH_STATE_BYTES = (16, 8)  # the random state, two uint64, and an unused second one, one uint64
RANDOM_STATE_BYTES = 5056  # torch.get_rng_state(): a Mersenne Twister's 624 words of 8 bytes, and its position
_FLASH_ROWS = 128  # the backward pads a sequence to this
_EFFICIENT_ROWS = 32  # the forward pads its logsumexp to this
_EFFICIENT_TILE = 64  # rows and columns of a tile in the backward, with 16 bytes for its lock


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def flash_lse_bytes(batch: int, heads: int, tokens: int) -> int:
    """The logsumexp of each row: one float32 per head and token."""
    return 4 * batch * heads * tokens


def flash_backward_bytes(
    batch: int, heads: int, tokens: int, head_size: int, key_heads: int | None = None
) -> tuple[int, ...]:
    """Temporaries of the flash backward: each row's dot product, and the queries' gradient accumulated in float32.

    With fewer key heads than query heads, also the keys' and values' gradients per query head, in half precision.
    """
    rows = _up(tokens, _FLASH_ROWS)
    columns = _up(head_size, 32 if head_size <= 128 else 64)
    grouped = key_heads is not None and key_heads < heads
    expanded = 2 * (2 * batch * heads * tokens * head_size,) if grouped else ()
    return 4 * batch * heads * rows, 4 * batch * rows * heads * columns, *expanded


def flash_varlen_backward_bytes(
    documents: int, heads: int, tokens: int, head_size: int, key_heads: int
) -> tuple[int, ...]:
    """The same for flash-attn's backward of concatenated documents, `tokens` in all: each is padded (flash_attn 2.8,
    csrc/flash_attn/flash_api.cpp, mha_varlen_bwd)."""
    rows = tokens + _FLASH_ROWS * documents
    columns = _up(head_size, 32 if head_size <= 128 else 64)
    expanded = 2 * (2 * heads * tokens * head_size,) if key_heads < heads else ()
    return 4 * heads * rows, 4 * rows * heads * columns, *expanded


def efficient_rows(tokens: int) -> int:
    """The rows of the memory-efficient kernel's logsumexp, with padding."""
    return _up(tokens, _EFFICIENT_ROWS)


def flash3_backward_bytes(batch: int, heads: int, tokens: int, head_size: int, key_heads: int) -> tuple[int, ...]:
    """Temporaries of FlashAttention 3's backward: row dot products, logsumexp, the queries' gradient in float32, locks.

    With fewer key heads than query heads, also the keys' and values' gradients in float32.
    """
    rows, columns = _up(tokens, _FLASH_ROWS), _up(head_size, 32 if head_size <= 128 else 64)
    row_bytes, locks = 4 * batch * heads * rows, 4 * batch * heads * -(-tokens // _FLASH_ROWS)
    grouped = 2 * (4 * batch * key_heads * rows * columns,) if key_heads < heads else ()
    return row_bytes, row_bytes, row_bytes * columns, locks, *grouped


def efficient_lse_bytes(batch: int, heads: int, tokens: int) -> int:
    """The same as for flash, with padded rows."""
    return 4 * batch * heads * efficient_rows(tokens)


def efficient_backward_bytes(
    batch: int, heads: int, tokens: int, head_size: int, half: bool, value_size: int | None = None
) -> tuple[int, ...]:
    """Temporaries of the memory-efficient backward.

    In half precision: each row's dot product, and tiles that accumulate the queries' gradient in float32. In
    float32: the product of output and gradient, its row sums, and a transposed copy of those.
    """
    sums = 4 * batch * heads * tokens
    if not half:
        return 4 * batch * heads * tokens * (value_size or head_size), sums, sums
    tiles = -(-tokens // _EFFICIENT_TILE) * -(-head_size // _EFFICIENT_TILE)
    return sums, batch * heads * tiles * (4 * _EFFICIENT_TILE * _EFFICIENT_TILE + 16)


def _cpu_tile(tokens: int) -> tuple[int, int]:
    """Rows of queries and of keys that the CPU's flash kernel processes at once."""
    queries = 256 if tokens >= 768 else 64 if tokens >= 192 else 32
    return min(queries, tokens), min(512, tokens)


def cpu_flash_bytes(threads: int, tokens: int, head_size: int, half: bool = False) -> int:
    """Each thread's scores, row maxima and sums, and output; for half inputs also the scores in half precision."""
    queries, keys = _cpu_tile(tokens)
    halves = 2 * queries * keys if half else 0
    return threads * (4 * (queries * keys + 2 * queries + queries * head_size) + halves)


def cpu_flash_backward_bytes(threads: int, tokens: int, half: bool = False) -> tuple[int, int]:
    """Each thread's scores and their gradient, for half inputs also in half precision; and one tile's dot products."""
    queries, keys = _cpu_tile(tokens)
    return (6 if half else 4) * threads * 2 * queries * keys, 4 * queries


def cpu_layer_norm_backward_bytes(threads: int, width: int, weight_bytes: int) -> int:
    """Each thread's partial gradients of weight and bias."""
    return threads * 2 * width * weight_bytes


def cpu_lstm_workspace_bytes(steps: int, rows: int, inputs: int, hidden: int) -> int:
    """What oneDNN saves of an LSTM layer for backward, in whole pages: gates, outputs, and states with gradients.

    As oneDNN 3.12 lays it out for float32 (`src/cpu/rnn/rnn_utils.cpp`), checked on many shapes.
    """
    done, begun = 4 * steps * rows, 4 * 2 * (steps + 1) * rows  # one more state than steps; for two layers
    parts = [done * _spaced(4 * hidden), done * _spaced(hidden)]
    parts += 3 * [begun * _spaced(max(inputs, hidden))] + 2 * [begun * hidden]
    return sum(_up(part, 4096) for part in parts)


def cpu_lstm_bytes(steps: int, rows: int, inputs: int, hidden: int) -> tuple[int, ...]:
    """An LSTM layer's temporaries: both weights in oneDNN's layout, and the gates of all steps."""
    gates = 4 * _spaced(4 * hidden)
    return inputs * gates, hidden * gates, steps * rows * gates


def _spaced(columns: int) -> int:
    """The row pitch oneDNN uses: whole cache lines, but not a multiple of 1024 bytes."""
    whole = _up(columns, 16)
    return whole + 16 if whole % 256 == 0 else whole


def safe_softmax_bytes(rows: int, columns: int, float_bytes: int) -> tuple[int, int, int]:
    """The mask of -inf scores, the mask of rows with nothing else, and the zero that fills them."""
    return rows * columns, rows, float_bytes
