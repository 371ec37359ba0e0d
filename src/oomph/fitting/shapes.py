"""Model shapes that cards run well and that learn well, and the settings that belong to a size.

Sources, each named where it is used:
- Radford et al. 2019 (GPT-2), table 2: the proportions of depth and width.
- Brown et al. 2020 (GPT-3, arXiv 2005.14165), table 2.1 and appendix B: learning rates, batch, warm-up, decay.
- Kaplan et al. 2020 (arXiv 2001.08361): section 3.1, proportions matter little; equation D.1, learning rate by size.
- Hoffmann et al. 2022 (Chinchilla, arXiv 2203.15556), table 3: about 20 tokens a parameter for the compute.
- Muennighoff et al. 2023 (arXiv 2305.16264): up to 4 passes over the data are about as good as new data.
"""

from __future__ import annotations

from itertools import pairwise
from math import log

import msgspec

HEAD_SIZE = 64  # every GPT-2 has it; a multiple of what tensor cores load, and flash attention's fastest
TOKENS_PER_PARAMETER = 20.0  # Chinchilla
GOOD_PASSES = 4.0  # Muennighoff et al.
GPT3_RATES = ((768, 6.0e-4), (1024, 3.0e-4), (1536, 2.5e-4), (2048, 2.0e-4), (2560, 1.6e-4), (4096, 1.2e-4))
BATCH_TOKENS = 524_288  # GPT-3's half a million, up to 760 M parameters
FEWEST_STEPS = 5_000  # a run of fewer steps learns little from each: the batch is made smaller instead
WARMUP_TOKENS = 375_000_000  # GPT-3
WARMUP_SHARE = 0.05  # of a short run


class Shape(msgspec.Struct, frozen=True, order=True):
    """Depth and width, with heads of 64."""

    n_layer: int
    n_embd: int

    @property
    def n_head(self) -> int:
        return self.n_embd // HEAD_SIZE

    @property
    def block_parameters(self) -> int:
        """Parameters without the embeddings."""
        return 12 * self.n_layer * self.n_embd**2

    def changes(self) -> dict[str, int]:
        """As config keys."""
        return {"n_layer": self.n_layer, "n_head": self.n_head, "n_embd": self.n_embd}


def usual_depth(width: int) -> int:
    """The layers that GPT-2's family gives a width: width / 64 up to 768, then 12 more for each 256."""
    if width <= 768:
        return max(1, round(width / 64))
    return 12 + round((width - 768) * 12 / 256)


def ladder(vocab_size: int, widest: int = 4096) -> list[Shape]:
    """Shapes near GPT-2's proportions, the smallest first: each width with its usual depth and a quarter about it."""
    shapes = set()
    for width in range(HEAD_SIZE * 2, widest + 1, HEAD_SIZE):
        depth = usual_depth(width)
        shapes |= {Shape(layers, width) for layers in range(max(1, round(depth * 0.75)), round(depth * 1.25) + 1)}
    return sorted(shapes, key=lambda shape: (shape.block_parameters + vocab_size * shape.n_embd, shape.n_layer))


def learning_rate(shape: Shape) -> float:
    """The top of the schedule: GPT-3's by width, between its sizes along the logarithm; below its smallest, Kaplan's
    0.003239 - 0.0001395 ln N for N parameters without embeddings."""
    if shape.n_embd < GPT3_RATES[0][0]:
        return float(f"{0.003239 - 0.0001395 * log(shape.block_parameters):.1e}")
    for (low, low_rate), (high, high_rate) in pairwise(GPT3_RATES):
        if shape.n_embd <= high:
            share = log(shape.n_embd / low) / log(high / low)
            return float(f"{low_rate * (high_rate / low_rate) ** share:.1e}")
    return GPT3_RATES[-1][1]


def batch_sequences(tokens: float, block_size: int) -> int:
    """Sequences to a step: half a million tokens, or, for a short run, the largest power of two that leaves it enough
    steps."""
    most = max(1, int(min(BATCH_TOKENS, tokens / FEWEST_STEPS)) // block_size)
    return 1 << (most.bit_length() - 1)


def schedule(rate: float, tokens: float, sequences: int, block_size: int) -> dict[str, int | float]:
    """Steps, learning rate, warm-up and evaluations of a run over that many tokens with that rate at the top."""
    steps = max(1, -(-int(tokens) // (sequences * block_size)))
    warmup = min(WARMUP_TOKENS / (sequences * block_size), steps * WARMUP_SHARE)
    return {
        "max_iters": steps,
        "lr_decay_iters": steps,
        "learning_rate": rate,
        "min_lr": float(f"{rate / 10:.1e}"),  # GPT-3 ends at a tenth
        "warmup_iters": max(1, round(warmup)),
        "eval_interval": _round_down(max(1, steps // 40)),
    }


def _round_down(number: int) -> int:
    """To one digit: 524 becomes 500."""
    scale: int = 10 ** (len(str(number)) - 1)
    return number // scale * scale
