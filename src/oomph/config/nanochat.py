"""nanochat's settings by depth, as scripts/base_train.py derives them (github.com/karpathy/nanochat at 92d63d4).

The width is 64 times the depth, in whole heads of 128. The number of tokens is 12 times the parameters that scale (the
blocks' matrices and the head); the batch grows with its 0.383th power from 2¹⁹ tokens at depth 12, a power of two.
"""

from __future__ import annotations

import math
import re

DEPTH = 20  # --depth
PRESETS = tuple(f"nanochat-d{depth}" for depth in (12, DEPTH, 26, 32))  # a selection: any depth works
_ASPECT, _HEAD, _VOCABULARY, _TOKENS, _SEQUENCES = 64, 128, 32768, 2048, 32
_TOKENS_PER_PARAMETER, _BATCH_TOKENS, _BATCH_POWER, _BATCH_DEPTH = 12, 2**19, 0.383, 12
_GATE_CHANNELS = 12
_NAME = re.compile(r"nanochat-d([1-9][0-9]{0,2})")

# base_train's defaults. It evaluates one split of the data, nanoGPT two.
DEFAULTS: dict[str, int | float | str | bool] = {
    "model_type": "nanochat", "optimizer": "muon", "vocab_size": _VOCABULARY, "tie_weights": False,
    "block_size": _TOKENS, "batch_size": _SEQUENCES, "window_pattern": "SSSL", "grad_clip": 0.0,
    "learning_rate": 0.02, "weight_decay": 0.28, "warmup_iters": 40, "eval_interval": 250,
}  # fmt: skip
_EVALUATED = 80 * 524288  # tokens


def depth_of(name: str) -> int | None:
    """The depth that a preset such as nanochat-d20 asks for."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def shape(depth: int) -> dict[str, int]:
    """Everything that follows from the depth."""
    width = -(-depth * _ASPECT // _HEAD) * _HEAD
    return {
        "n_layer": depth,
        "n_head": width // _HEAD,
        "n_embd": width,
        "gradient_accumulation_steps": micro_steps(depth, _SEQUENCES, _TOKENS),
        "max_iters": max(1, _target_tokens(depth) // _total_batch(depth)),
    }


def micro_steps(depth: int, batch_size: int, block_size: int) -> int:
    """Micro-steps in a step, whose number of tokens depends only on the depth."""
    return max(1, _total_batch(depth) // (batch_size * block_size))


def eval_iters(batch_size: int, block_size: int) -> int:
    """Batches of each of nanoGPT's two splits that together have nanochat's evaluation tokens."""
    return max(1, _EVALUATED // (batch_size * block_size) // 2)


def _total_batch(depth: int) -> int:
    """Tokens in an optimizer step."""
    grown = (_target_tokens(depth) / _target_tokens(_BATCH_DEPTH)) ** _BATCH_POWER
    return int(2 ** round(math.log2(_BATCH_TOKENS * grown)))


def _target_tokens(depth: int) -> int:
    width = -(-depth * _ASPECT // _HEAD) * _HEAD
    gates = -(-depth // 2) * _GATE_CHANNELS * (width // _HEAD)
    return _TOKENS_PER_PARAMETER * (12 * depth * width * width + gates + _VOCABULARY * width)
