"""The GPT of "LLMs from scratch", for `--model`: what rows RASBT-01 to -07 of published.csv ran.

Written after ch05/10_llm-training-speed of github.com/rasbt/LLMs-from-scratch: attention in plain products, three
projections without biases, an untied head; in the first rows layer norm and GELU by hand. Its step returns the loss.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, WORDS, TOKENS, RATE = 768, 12, 12, 50257, 1024, 0.1


class LayerNorm(nn.Module):
    """A layer norm in single operations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normed = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normed + self.shift


class Gelu(nn.Module):
    """GELU's tanh form in single operations."""

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.sqrt(torch.tensor(2.0 / math.pi))
        return 0.5 * x * (1 + torch.tanh(factor * (x + 0.044715 * torch.pow(x, 3))))


class Attention(nn.Module):
    """Attention in plain products. `keeps_mask`: each block has its own mask as a buffer."""

    def __init__(self, keeps_mask: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.project, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(RATE)
        self.keeps_mask = keeps_mask
        if keeps_mask:
            self.register_buffer("mask", torch.triu(torch.ones(TOKENS, TOKENS), diagonal=1))

    mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        keys, queries, values = self.key(x), self.query(x), self.value(x)
        keys, values, queries = (
            each.view(batch, tokens, HEADS, width // HEADS).transpose(1, 2) for each in (keys, values, queries)
        )
        scores = queries @ keys.transpose(2, 3)
        if self.keeps_mask:
            mask = self.mask.bool()[:tokens, :tokens]
        else:
            mask = torch.triu(torch.ones(tokens, tokens, dtype=torch.bool, device=x.device), diagonal=1)
        scores.masked_fill_(mask, -torch.inf)
        weights = self.dropout(torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1))
        context = (weights @ values).transpose(1, 2)
        projected: Tensor = self.project(context.reshape(batch, tokens, width))
        return projected


class Block(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(self, keeps_mask: bool, by_hand: bool) -> None:
        super().__init__()
        norm = LayerNorm if by_hand else nn.LayerNorm
        gelu = Gelu() if by_hand else nn.GELU(approximate="tanh")
        self.attention = Attention(keeps_mask)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), gelu, nn.Linear(4 * WIDTH, WIDTH))
        self.norm_1, self.norm_2, self.dropout = norm(WIDTH), norm(WIDTH), nn.Dropout(RATE)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.norm_1(x)
        x = self.attention(x)
        x = self.dropout(x)
        x = x + shortcut
        shortcut = x
        x = self.norm_2(x)
        x = self.mlp(x)
        x = self.dropout(x)
        return x + shortcut


class Gpt(nn.Module):
    """GPT-2's size with an untied head."""

    def __init__(self, keeps_mask: bool, by_hand: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.dropout = nn.Dropout(RATE)
        self.blocks = nn.Sequential(*[Block(keeps_mask, by_hand) for _ in range(LAYERS)])
        self.norm = LayerNorm(WIDTH) if by_hand else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def logits(self, tokens: Tensor) -> Tensor:
        embedded = self.tokens(tokens)
        placed = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = embedded + placed
        x = self.dropout(x)
        x = self.blocks(x)
        x = self.norm(x)
        logits: Tensor = self.head(x)
        return logits

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(tokens)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def with_masks() -> Gpt:
    """Script 00: a mask in every block."""
    return Gpt(keeps_mask=True, by_hand=True)


def by_hand() -> Gpt:
    """Scripts 02 to 06: masks made where they are needed."""
    return Gpt(keeps_mask=False, by_hand=True)


def by_classes() -> Gpt:
    """Script 07: PyTorch's layer norm and GELU."""
    return Gpt(keeps_mask=False, by_hand=False)
