"""Keys and values of the tokens so far, so that generating one more token costs one token's work."""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValues:
    """One block's keys and values, in buffers of full length."""

    def __init__(self, batch: int, heads: int, tokens: int, head_size: int, like: Tensor) -> None:
        shape = (batch, heads, tokens, head_size)
        self.keys = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.values = torch.empty_like(self.keys)
        self.length = 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take in those of new tokens (batch, heads, new, head size); return all so far."""
        first, self.length = self.length, self.length + keys.size(2)
        self.keys[:, :, first : self.length] = keys
        self.values[:, :, first : self.length] = values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]
