"""A GPT of nanoGPT's shape to trace, and the comparison of two op lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from oomph.config.schema import TrainConfig
from oomph.step.ops import Buffer, Section, Step
from oomph.step.trace import trace


class Norm(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.heads, self.rate = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        rate = self.rate if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
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
        x = self.dropout(x)
        return x


class Block(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.ln_1, self.attn = Norm(config.n_embd, config.bias), Attention(config)
        self.ln_2, self.mlp = Norm(config.n_embd, config.bias), Feedforward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class ChunkedLoss(torch.autograd.Function):
    """Head and loss a chunk of rows at a time, as `gpt_eager_loss` describes it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, learns: bool) -> Tensor:
        head, rows = weight, hidden.shape[0]
        if torch.is_autocast_enabled("cpu"):
            half = torch.get_autocast_dtype("cpu")
            head = weight.to(half)
            hidden = hidden.to(half)
        loss = torch.zeros((), dtype=torch.float32)
        if learns:
            ctx.grads = [torch.empty_like(hidden), torch.zeros_like(weight)]
        for first in range(0, rows, chunk):
            part = slice(first, min(first + chunk, rows))
            grads = (ctx.grads[0][part], ctx.grads[1]) if learns else None
            one_chunk(hidden[part], head, targets[part].view(-1, 1), loss, rows, grads)
        return loss.div_(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight = ctx.grads
        ctx.grads = None
        return hidden.mul_(grad), weight.mul_(grad), None, None, None


def one_chunk(hidden: Tensor, head: Tensor, targets: Tensor, loss: Tensor, rows: int, grads: Any) -> None:
    logits = torch.mm(hidden, head.t())
    logits = logits.float()
    logits = torch.log_softmax(logits, -1)
    loss.sub_(logits.gather(1, targets).sum())
    if grads is None:
        return
    logits.exp_().scatter_add_(1, targets, torch.full(targets.shape, -1.0)).div_(rows)
    logits = logits.to(head.dtype)
    torch.mm(logits, head, out=grads[0])
    grads[1].add_(torch.mm(logits.t(), hidden))


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
        x = self.transformer["drop"](token + position)
        for index, block in enumerate(self.transformer["h"]):
            if self.training and index < self.config.checkpoint_layers:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        x = self.transformer["ln_f"](x)
        if self.config.loss_chunk:
            flat, learns = x.view(-1, x.size(-1)), torch.is_grad_enabled()
            weight, chunk = self.lm_head.weight, self.config.loss_chunk
            return ChunkedLoss.apply(flat, weight, targets.view(-1), chunk, learns)
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return (logits, loss) if self.config.return_logits else loss


def traced(config: TrainConfig, cuda: bool = True, first: bool = False, fake: bool = True) -> Step:
    """The config's model, traced as the config says."""
    batch = [torch.zeros(config.batch_size, config.block_size, dtype=torch.long) for _ in range(2)]
    return trace(
        (lambda: Gpt(config)),
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
