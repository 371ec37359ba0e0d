"""Which tensor was it? The sizes of a step's large tensors held against the allocation that failed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from oomph.config import TrainConfig
from oomph.runs.model import Oom
from oomph.runs.shapes import VOCABULARIES
from oomph.units import MIB

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Guess(msgspec.Struct, frozen=True):
    """A tensor whose size is that of the failed allocation."""

    name: str  # "the logits in float32"
    formula: str  # "8 × 1024 × 50304 × 4"
    bytes: int


def asked_for(size_bytes: int) -> int:
    """What the caching allocator asks the driver for when it has no block of its own for a tensor of this size.

    PyTorch's CUDACachingAllocator: up to 1 MiB from a segment of 2 MiB, up to 10 MiB from one of 20 MiB, more rounded
    up to 2 MiB.
    """
    if size_bytes <= MIB:
        return 2 * MIB
    if size_bytes < 10 * MIB:
        return 20 * MIB
    return -(-size_bytes // (2 * MIB)) * 2 * MIB


def name_allocation(oom: Oom, config: TrainConfig | None = None) -> list[Guess]:
    """The tensors it may have been, the likeliest first; empty where none fits or the message gives no size."""
    if oom.tried_mib is None:
        return []
    sizes = _of_step(config) if config is not None else _logits_of_any(oom)
    return [guess for guess in sizes if _is_size(oom, guess.bytes)]


def _is_size(oom: Oom, size_bytes: int) -> bool:
    slack = oom.tried_slack_mib * 1.000001 + 1e-9
    return any(abs(size / MIB - (oom.tried_mib or 0.0)) <= slack for size in (asked_for(size_bytes), size_bytes))


def _of_step(config: TrainConfig) -> Iterator[Guess]:
    """The large tensors of a training or evaluation step, the largest kinds first."""
    batch, length, width, words = config.batch_size, config.block_size, config.n_embd, config.vocab_size
    half = _BYTES[config.dtype or "bfloat16"] if config.autocast else 4
    half_name = config.dtype or "half precision"
    yield _guess("the logits, or their gradient, in float32", batch, length, words, 4)
    if half != 4:
        yield _guess(f"the logits in {half_name}", batch, length, words, half)
    if config.attention == "math":
        yield _guess("attention scores of one layer in float32", batch, config.n_head, length, length, 4)
        yield _guess(f"attention scores of one layer in {half_name}", batch, config.n_head, length, length, half)
    for name, times in (
        ("an MLP's hidden layer", 4),
        ("queries, keys and values of a layer", 3),
        ("a layer's output", 1),
    ):
        yield _guess(f"{name} in {half_name}", batch, length, times * width, half)
        if half != 4:
            yield _guess(f"{name} in float32", batch, length, times * width, 4)
    yield _guess("the token embedding, its gradient or an Adam moment", words, width, 4)
    yield _guess("an MLP's weights, their gradient or an Adam moment", 4 * width, width, 4)


def _guess(name: str, *factors: int) -> Guess:
    return Guess(name, " × ".join(map(str, factors)), math.prod(factors))


def _logits_of_any(oom: Oom) -> Iterator[Guess]:
    """Without a config: logits of GPT-2's vocabulary, for whole multiples of 1024 tokens."""
    for words in (50304, 50257):
        for size, name in ((4, "float32"), (2, "half precision")):
            middle = round((oom.tried_mib or 0.0) * MIB / (words * size) / 1024)
            for blocks in range(max(1, middle - 1), middle + 2):
                what = f"logits of {VOCABULARIES[words]} in {name}"
                yield Guess(what, f"{blocks * 1024} × {words} × {size}", blocks * 1024 * words * size)
