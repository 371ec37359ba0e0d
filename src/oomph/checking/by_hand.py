"""Attention as nanoGPT multiplies it out without scaled_dot_product_attention: what `attention = "math"` plans."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oomph.training.model import GPT


class ByHand(nn.Module):
    """A block's attention with every score in memory, and a triangle of its own to mask them with."""

    triangle: Tensor

    def __init__(self, c_attn: nn.Linear, c_proj: nn.Linear, heads: int, tokens: int, dropout: float) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.heads, self.dropout = c_attn, c_proj, heads, dropout
        self.register_buffer("triangle", torch.ones(tokens, tokens).tril().view(1, 1, tokens, tokens))

    def forward(self, x: Tensor, _past: None = None) -> Tensor:
        rows, tokens, width = x.shape
        query, key, value = self.c_attn(x).split(width, dim=2)
        key = key.view(rows, tokens, self.heads, -1).transpose(1, 2)  # (rows, heads, tokens, head size), all three
        query = query.view(rows, tokens, self.heads, -1).transpose(1, 2)
        value = value.view(rows, tokens, self.heads, -1).transpose(1, 2)
        weights = (query @ key.transpose(-2, -1)) * (1.0 / math.sqrt(key.size(-1)))
        weights = weights.masked_fill(self.triangle[:, :, :tokens, :tokens] == 0, -math.inf)
        weights = F.softmax(weights, dim=-1)
        weights = F.dropout(weights, self.dropout, self.training)
        mixed = (weights @ value).transpose(1, 2).contiguous().view(rows, tokens, width)
        return F.dropout(self.c_proj(mixed), self.dropout, self.training)


def attend_by_hand(model: GPT) -> None:
    """Every block's attention replaced, its weights kept."""
    config = model.config
    for block in model.blocks():
        attention: Any = block.attn
        block.attn = ByHand(attention.c_attn, attention.c_proj, config.n_head, config.block_size, config.dropout)
