"""GPT-2 as nanoGPT defines it: the same names, shapes and first weights, so that checkpoints go both ways.

The model ends at the last layer norm. Head and loss are `oomph.training.loss`: a training step never makes the
full logits, unless it is told to by `loss_chunk = 0`.
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
from oomph.training.cache import KeyValues

_KERNELS = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


class LayerNorm(nn.Module):
    """torch's layer norm, with a bias only where the config has one."""

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
        self.kernel = _KERNELS.get(config.attention)  # None: torch takes the flash kernel wherever there is one

    def forward(self, x: Tensor, past: KeyValues | None = None) -> Tensor:
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2))
        if past is not None:  # (B, heads, T, head size) each
            k, v = past.extend(k, v)
        with self._chosen_kernel():
            # Against a filled cache the one new token sees everything; otherwise each token sees those before it.
            y = F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=k.size(2) == T
            )
        y = y.transpose(1, 2).reshape(B, T, C)  # where this copies, the heads' own are let go before the product
        return F.dropout(self.c_proj(y), self.dropout, self.training)

    def _chosen_kernel(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.kernel is None else sdpa_kernel(self.kernel)


class MLP(nn.Module):
    """Four times as wide inside, with the exact GELU."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.c_proj(F.gelu(self.c_fc(x))), self.dropout, self.training)


class Block(nn.Module):
    """Attention, then the MLP, each added to the stream."""

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
    """Embeddings, blocks, a last layer norm, and the head's matrix beside them."""

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
        self._first_weights()

    def _first_weights(self) -> None:
        """Normal with 0.02, less for what is added to the stream; in nanoGPT's order, so that a seed gives the same."""
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
        """Logits (B, vocabulary) after the last of `tokens`, which follow what `past` holds; `past` takes them in."""
        x = self._embed(tokens, past[0].length)
        for block, keys_values in zip(self.blocks(), past, strict=True):
            x = block(x, keys_values)
        logits: Tensor = self.lm_head(self.transformer["ln_f"](x[:, -1]))
        return logits
