"""A GPT of nanoGPT's shape to trace, and the comparison of two op lists."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from oomph.config.schema import TrainConfig
from oomph.step.ops import Buffer, Op, Section, Step
from oomph.step.trace.eager.program import trace
from oomph.training.loss import chunked_loss, head_loss
from oomph.training.model import GPT


class Norm(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


def attends_by_hand(config: TrainConfig) -> bool:
    """Whether the program multiplies queries and keys itself, as nanoGPT does without the fused kernels."""
    return config.trainer == "nanogpt" and config.attention == "math"


class Attention(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.heads, self.rate = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.mask: Tensor | None
        ones = torch.ones(1, 1, config.block_size, config.block_size)
        self.register_buffer("mask", ones.tril() if attends_by_hand(config) else None)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        if self.mask is None:
            rate = self.rate if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        else:  # as nanoGPT without scaled_dot_product_attention has it, every name alive as long as there
            weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            weights = weights.masked_fill(self.mask[:, :, :tokens, :tokens] == 0, float("-inf"))
            weights = F.softmax(weights, dim=-1)
            weights = F.dropout(weights, self.rate, self.training)
            y = weights @ v
        y = y.transpose(1, 2).contiguous().view(batch, tokens, width)
        return self.resid_dropout(self.c_proj(y))


class Feedforward(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        x = self.gelu(x)
        x = self.c_proj(x)
        return self.dropout(x)


class Block(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.ln_1, self.attn = Norm(config.n_embd, config.bias), Attention(config)
        self.ln_2, self.mlp = Norm(config.n_embd, config.bias), Feedforward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """nanoGPT's modules in nanoGPT's order."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.config = config
        width, vocab = config.n_embd, config.vocab_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, width),
                "wpe": nn.Embedding(config.block_size, width),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": Norm(width, config.bias),
            }
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if config.tie_weights:
            self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        positions = torch.arange(0, tokens.shape[1], dtype=torch.long)
        token = self.transformer["wte"](tokens)
        position = self.transformer["wpe"](positions)
        embedded = token + position
        if self.config.trainer == "oomph":
            del token, position
        x = self.transformer["drop"](embedded)
        del embedded
        if self.config.trainer == "oomph":
            del positions
        for index, block in enumerate(self.transformer["h"]):
            if self.training and index < self.config.checkpoint_layers:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.config.dropout > 0)
            else:
                x = block(x)
        x = self.transformer["ln_f"](x)
        if self.config.loss_chunk:
            rows, wanted = x.flatten(0, 1), targets.flatten()
            return chunked_loss(rows, self.lm_head.weight, wanted, self.config.loss_chunk)
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return (logits, loss) if self.config.return_logits else loss


class Own(nn.Module):
    """oomph train's own model with the loss, for configs whose parts are not nanoGPT's."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.model = GPT(config)
        self.config = config

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        return head_loss(self.model.trunk(tokens), self.model.lm_head.weight, targets, self.config.loss_chunk or 0)


def traced(config: TrainConfig, cuda: bool = True, first: bool = False, fake: bool = True) -> Step:
    """The config's model, traced as the config says."""
    batch = [torch.zeros(config.batch_size, config.block_size, dtype=torch.long) for _ in range(2)]
    return trace(
        (lambda: (Own if config.norm_type == "rmsnorm" else Gpt)(config)),
        batch,
        dtype=config.dtype or "float32",
        autocast=config.autocast,
        cuda=cuda,
        attention=config.attention,
        optimizer=config.optimizer,
        optimizer_loop=config.optimizer_loop or "fused",
        accumulation=config.gradient_accumulation_steps,
        grad_clip=config.grad_clip,
        first=first,
        fake=fake,
    )


def unfolded(step: Step) -> Step:
    """The step with every group of operations written out as often as it runs."""
    sections = []
    for section in step.sections:
        ops: list[Op] = []
        for times, group in groupby(section.ops, key=lambda op: op.times):
            ops += [replace(op, times=1) for op in group] * times
        sections.append(Section(section.name, tuple(ops), section.times))
    return Step(step.resident, tuple(sections))


def _up(size_bytes: int, rounding: int) -> int:
    return -(-size_bytes // rounding) * rounding


def rounded(buffers: Iterable[Buffer], rounding: int = 512) -> list[int]:
    """Sizes as the allocator books them, in order."""
    return sorted(_up(buffer.bytes, rounding) for buffer in buffers)


def movements(section: Section, rounding: int = 512) -> list[int]:
    """Every change of what is allocated: each operation's allocations, and what is freed until the next ones."""
    changes: list[int] = []
    for op in section.ops:
        allocated, freed = sum(rounded(op.allocates, rounding)), sum(rounded(op.frees, rounding))
        if allocated:
            changes.append(allocated)
        if freed and changes and changes[-1] < 0:
            changes[-1] -= freed
        elif freed:
            changes.append(-freed)
    return changes
