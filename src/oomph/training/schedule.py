"""The learning rate of a step: nanoGPT's linear warm-up, then a cosine down to the least rate."""

from __future__ import annotations

import math

from oomph.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of the optimizer step with this number, counted from 0."""
    if not config.decay_lr:
        return config.learning_rate
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if step >= config.lr_decay_iters:
        return config.min_lr
    done = (step - config.warmup_iters) / (config.lr_decay_iters - config.warmup_iters)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (config.learning_rate - config.min_lr)
