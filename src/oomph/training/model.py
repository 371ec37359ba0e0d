"""GPT-2 as nanoGPT defines it: the same names, shapes and initial weights, so that checkpoints work in both.

Config keys replace its parts by newer ones, independently: rotary positions, RMSNorm, normed queries and keys, grouped
queries, other activations, a gated MLP. With all of them it is Qwen3's arithmetic under nanoGPT's names.

Its trunk ends at the last norm. Head and loss are in `oomph.training.loss`: a training step never makes the
full logits, unless `loss_chunk = 0`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from oomph.config import TrainConfig
from oomph.config.shape import head_size, inner_size, key_value_heads, qkv_widths
from oomph.training.lora import add_adapters
from oomph.training.loss import head_loss

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Rotary = tuple[Tensor, Tensor]  # cosines and sines, (tokens, 1, half a head)


class KeyValues:
    """One block's cached keys and values, in buffers of full length."""

    def __init__(self, batch: int, heads: int, tokens: int, head_size: int, like: Tensor) -> None:
        shape = (batch, heads, tokens, head_size)
        self.keys = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.values = torch.empty_like(self.keys)
        self.length = 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens (batch, heads, new, head size) and return all so far."""
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


class RMSNorm(nn.Module):
    """torch's RMSNorm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def make_norm(config: TrainConfig) -> LayerNorm | RMSNorm:
    """A norm of the residual stream."""
    if config.norm_type == "rmsnorm":
        return RMSNorm(config.n_embd, config.rms_norm_eps)
    return LayerNorm(config.n_embd, config.bias)


def rotary_tables(tokens: int, size: int, theta: float) -> Rotary:
    """Cosines and sines of every position, as transformers' Llama computes them."""
    frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(tokens, dtype=torch.float32), frequencies).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys (B, T, heads, size), rotated: the first half of each head pairs with the second."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.widths = qkv_widths(config)
        self.head_size = head_size(config)
        self.c_attn = nn.Linear(config.n_embd, sum(self.widths), bias=config.bias)
        self.c_proj = nn.Linear(self.widths[0], config.n_embd, bias=config.bias)
        self.q_norm = RMSNorm(self.head_size, config.rms_norm_eps) if config.use_qk_norm else None
        self.k_norm = RMSNorm(self.head_size, config.rms_norm_eps) if config.use_qk_norm else None
        self.grouped = key_value_heads(config) != config.n_head
        self.dropout = config.dropout
        self.kernel = _KERNELS.get(config.attention)  # None: torch takes the flash kernel if it can

    def forward(self, x: Tensor, rotary: Rotary | None = None, past: KeyValues | None = None) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (part.view(B, T, -1, self.head_size) for part in self.c_attn(x).split(self.widths, dim=2))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotated(q, *rotary), rotated(k, *rotary)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, head size) each
        if past is not None:
            k, v = past.extend(k, v)
        with self._chosen_kernel():
            # With a filled cache the one new token sees everything; otherwise each token sees those before it.
            y = F.scaled_dot_product_attention(
                q,
                k,
                v,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=k.size(2) == T,
                enable_gqa=self.grouped,
            )
        y = y.transpose(1, 2).flatten(2)  # if this copies, the heads' own output is freed before the product
        return F.dropout(self.c_proj(y), self.dropout, self.training)

    def _chosen_kernel(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.kernel is None else sdpa_kernel(self.kernel)


def relu2(x: Tensor) -> Tensor:
    """The square of relu, as a product: autocast computes powers in float32."""
    kept = F.relu(x)
    return kept * kept


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu, "relu2": relu2}


class MLP(nn.Module):
    """A wider hidden layer with an activation, optionally gated."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        inner = inner_size(config)
        self.gated = config.is_gated_act
        self.c_fc = nn.Linear(config.n_embd, 2 * inner if self.gated else inner, bias=config.bias)
        self.c_proj = nn.Linear(inner, config.n_embd, bias=config.bias)
        self.activation = _ACTIVATIONS[config.hidden_act or "gelu"]
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.c_proj(self._activate(self.c_fc(x))), self.dropout, self.training)

    def _activate(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.activation(x)
        gate, up = x.chunk(2, dim=-1)
        return self.activation(gate) * up


class Block(nn.Module):
    """Attention, then the MLP, each added to the residual stream."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = Attention(config)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: Rotary | None = None, past: KeyValues | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), rotary, past)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """Embeddings, blocks and a last norm; it also holds the head's matrix."""

    cos: Tensor | None
    sin: Tensor | None

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.config = config
        rotates = config.position_embedding_type == "rotary"
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                **({} if rotates else {"wpe": nn.Embedding(config.block_size, config.n_embd)}),
                "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                "ln_f": make_norm(config),
            }
        )
        tables = rotary_tables(config.block_size, head_size(config), config.rope_theta) if rotates else (None, None)
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, table, persistent=False)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.transformer["wte"].weight = self.lm_head.weight
        self._init_weights()
        if config.method == "lora":
            add_adapters(self, config)

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
                std = 0.0 if self.config.zero_init else 0.02 / math.sqrt(2 * self.config.n_layer)
                nn.init.normal_(parameter, std=std)

    def cast(self) -> None:
        """Bring the weights to the dtypes of the config: float32 under autocast, frozen ones to their own."""
        config = self.config
        self.to(dtype=torch.float32 if config.autocast else DTYPES[config.dtype or "float32"])
        if config.method == "lora":
            base, adapters = DTYPES[config.base_dtype or "float32"], DTYPES[config.adapter_dtype or "float32"]
            for parameter in self.parameters():
                parameter.data = parameter.data.to(adapters if parameter.requires_grad else base)

    def blocks(self) -> nn.ModuleList:
        """The transformer blocks."""
        return cast(nn.ModuleList, self.transformer["h"])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of tokens and targets (B, T)."""
        chunk = self.config.loss_chunk or 0
        return head_loss(self.trunk(tokens), self.lm_head.weight, targets, chunk, self.config.compile)

    def trunk(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) to hidden states (B, T, width) for the head."""
        x = self._embed(tokens, 0)
        dropped, rotary = self.config.dropout > 0, self._rotary(0, tokens.size(1))
        for index, block in enumerate(self.blocks()):
            if self.training and index < self.config.checkpoint_layers:
                x = checkpoint(block, x, rotary, use_reentrant=False, preserve_rng_state=dropped)
            else:
                x = block(x, rotary)
        hidden: Tensor = self.transformer["ln_f"](x)
        return hidden

    def _embed(self, tokens: Tensor, first: int) -> Tensor:
        x: Tensor = self.transformer["wte"](tokens)
        if self.cos is None:
            positions = torch.arange(first, first + tokens.size(1), device=tokens.device)
            x = x + self.transformer["wpe"](positions)
        return F.dropout(x, self.config.dropout, self.training)

    def _rotary(self, first: int, count: int) -> Rotary | None:
        """The rotations of `count` positions; None if positions are learned."""
        if self.cos is None or self.sin is None:
            return None
        return self.cos[first : first + count], self.sin[first : first + count]

    @torch.no_grad()
    def next_logits(self, tokens: Tensor, past: list[KeyValues]) -> Tensor:
        """Logits (B, vocabulary) after the last of `tokens`, which follow those in `past` and are added to it."""
        first = past[0].length
        x, rotary = self._embed(tokens, first), self._rotary(first, tokens.size(1))
        for block, keys_values in zip(self.blocks(), past, strict=True):
            x = block(x, rotary, keys_values)
        logits: Tensor = self.lm_head(self.transformer["ln_f"](x[:, -1]))
        return logits
