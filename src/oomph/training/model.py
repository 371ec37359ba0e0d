"""GPT-2 as nanoGPT defines it: the same names, shapes and initial weights, so that checkpoints work in both.

The model ends at the last layer norm. Head and loss are in `oomph.training.loss`: a training step never makes the
full logits, unless `loss_chunk = 0`.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from oomph.config import TrainConfig


class KeyValues:
    """One block's cached keys and values, in buffers of full length."""

    def __init__(self, batch: int, heads: int, tokens: int, head_size: int, like: Tensor) -> None:
        shape = (batch, heads, tokens, head_size)
        self.keys = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.values = torch.empty_like(self.keys)
        self.length = 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of new tokens (batch, heads, new, head size) and return all so far."""
        first, self.length = self.length, self.length + keys.size(2)
        self.keys[:, :, first : self.length] = keys
        self.values[:, :, first : self.length] = values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


_KERNELS = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


class LayerNorm(nn.Module):
    """torch's layer norm, with a bias only if the config has one."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.c_attn = nn.Linear(width, 3 * width, bias=config.bias)
        self.c_proj = nn.Linear(width, width, bias=config.bias)
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.kernel = _KERNELS.get(config.attention)  # None: torch takes the flash kernel where it can

    def forward(self, x: Tensor, past: KeyValues | None = None) -> Tensor:
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2))
        if past is not None:  # (B, heads, T, head size) each
            k, v = past.extend(k, v)
        with self._chosen_kernel():
            # With a filled cache the one new token sees everything; otherwise each token sees those before it.
            y = F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=k.size(2) == T
            )
        y = y.transpose(1, 2).reshape(B, T, C)  # if this copies, the heads' own output is freed before the product
        return F.dropout(self.c_proj(y), self.dropout, self.training)

    def _chosen_kernel(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.kernel is None else sdpa_kernel(self.kernel)


class MLP(nn.Module):
    """Four times as wide inside, with exact GELU."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.c_proj(F.gelu(self.c_fc(x))), self.dropout, self.training)


class Block(nn.Module):
    """Attention, then the MLP, each added to the residual stream."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.bias)
        self.attn = Attention(config)
        self.ln_2 = LayerNorm(config.n_embd, config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, past: KeyValues | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), past)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """Embeddings, blocks and a last layer norm; it also holds the head's matrix."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                "ln_f": LayerNorm(config.n_embd, config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.transformer["wte"].weight = self.lm_head.weight
        self._init_weights()

    def _init_weights(self) -> None:
        """nanoGPT's initial weights: normal with std 0.02, less for the projections into the residual stream.

        In nanoGPT's order, so that the same seed gives the same weights.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.n_layer))

    def blocks(self) -> nn.ModuleList:
        """The transformer blocks."""
        return cast(nn.ModuleList, self.transformer["h"])

    def trunk(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) to hidden states (B, T, width) for the head."""
        x = self._embed(tokens, 0)
        dropped = self.config.dropout > 0
        for index, block in enumerate(self.blocks()):
            if self.training and index < self.config.checkpoint_layers:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=dropped)
            else:
                x = block(x)
        hidden: Tensor = self.transformer["ln_f"](x)
        return hidden

    def _embed(self, tokens: Tensor, first: int) -> Tensor:
        positions = torch.arange(first, first + tokens.size(1), device=tokens.device)
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](positions)
        return F.dropout(x, self.config.dropout, self.training)

    @torch.no_grad()
    def next_logits(self, tokens: Tensor, past: list[KeyValues]) -> Tensor:
        """Logits (B, vocabulary) after the last of `tokens`, which follow those in `past` and are added to it."""
        x = self._embed(tokens, past[0].length)
        for block, keys_values in zip(self.blocks(), past, strict=True):
            x = block(x, keys_values)
        logits: Tensor = self.lm_head(self.transformer["ln_f"](x[:, -1]))
        return logits
