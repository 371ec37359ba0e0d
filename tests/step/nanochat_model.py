"""A GPT of nanochat's shape, operation for operation, to trace: rotary positions, norms without weights, value
embeddings, windows, a residual from the first embedding and one to the middle."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from oomph.config.schema import TrainConfig
from oomph.step.models import nanochat
from oomph.step.trace.fakes import DTYPES


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


class Cast(nn.Linear):
    """A linear layer whose weight takes its input's dtype."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(dtype=x.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[3] // 2
    first, second = x[..., :half], x[..., half:]
    left = first * cos + second * sin
    right = first * (-sin) + second * cos
    return torch.cat([left, right], 3)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    grouped, tokens = q.size(1) != k.size(1), q.size(2)
    if window >= tokens:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    rows = 0 + torch.arange(tokens).unsqueeze(1)
    columns = torch.arange(tokens).unsqueeze(0)
    mask = columns <= rows
    mask = mask & ((rows - columns) <= window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


class Attention(nn.Module):
    def __init__(self, c: TrainConfig, index: int) -> None:
        super().__init__()
        self.heads, self.keys = c.n_head, c.num_key_value_heads or c.n_head
        size = c.n_embd // c.n_head
        self.c_q, self.c_k = Cast(c.n_embd, c.n_embd), Cast(c.n_embd, self.keys * size)
        self.c_v, self.c_proj = Cast(c.n_embd, self.keys * size), Cast(c.n_embd, c.n_embd)
        self.ve_gate = Cast(12, self.keys) if nanochat.has_value_embedding(c, index) else None

    def forward(self, x: Tensor, ve: Tensor | None, cos: Tensor, sin: Tensor, window: int) -> Tensor:
        batch, tokens, width = x.size()
        q = self.c_q(x).view(batch, tokens, self.heads, -1)
        k = self.c_k(x).view(batch, tokens, self.keys, -1)
        v = self.c_v(x).view(batch, tokens, self.keys, -1)
        if ve is not None and self.ve_gate is not None:
            ve = ve.view(batch, tokens, self.keys, -1)
            gate = 3 * torch.sigmoid(self.ve_gate(x[..., :12]))
            v = v + gate.unsqueeze(-1) * ve
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k = norm(q), norm(k)
        q = q * 1.2
        k = k * 1.2
        y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), window).transpose(1, 2)
        y = y.contiguous().view(batch, tokens, width)
        return self.c_proj(y)


class Feedforward(nn.Module):
    def __init__(self, c: TrainConfig) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Cast(c.n_embd, 4 * c.n_embd), Cast(4 * c.n_embd, c.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        x = F.relu(x).square()
        return self.c_proj(x)


class Block(nn.Module):
    def __init__(self, c: TrainConfig, index: int) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(c, index), Feedforward(c)

    def forward(self, x: Tensor, ve: Tensor | None, cos: Tensor, sin: Tensor, window: int) -> Tensor:
        x = x + self.attn(norm(x), ve, cos, sin, window)
        return x + self.mlp(norm(x))


class Nanochat(nn.Module):
    """Tables of embeddings in the dtype of the activations, everything else in float32."""

    def __init__(self, c: TrainConfig) -> None:
        super().__init__()
        self.config, self.dtype = c, DTYPES[c.dtype or "float32"]
        rows, size = nanochat.padded_vocabulary(c), c.n_embd // c.n_head
        self.resid_lambdas, self.x0_lambdas = (nn.Parameter(torch.ones(c.n_layer)) for _ in range(2))
        self.smear_lambda, self.backout_lambda = (nn.Parameter(torch.ones(1)) for _ in range(2))
        blocks = nn.ModuleList(Block(c, index) for index in range(c.n_layer))
        table = torch.float32 if self.dtype is torch.float16 else self.dtype
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(rows, c.n_embd, dtype=table), "h": blocks})
        self.lm_head, self.smear_gate = Cast(c.n_embd, rows), Cast(24, 1)
        keys = (c.num_key_value_heads or c.n_head) * size
        given = [index for index in range(c.n_layer) if nanochat.has_value_embedding(c, index)]
        self.value_embeds = nn.ModuleDict({str(i): nn.Embedding(rows, keys, dtype=table) for i in given})
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.ones(1, 10 * c.block_size, 1, size // 2, dtype=self.dtype))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        c, count = self.config, tokens.shape[1]
        cos, sin = self.cos[:, :count], self.sin[:, :count]  # type: ignore[index]
        x = self.transformer["wte"](tokens)
        x = x.to(self.dtype)
        x = norm(x)
        gate = self.smear_lambda.to(x.dtype) * torch.sigmoid(self.smear_gate(x[:, 1:, :24]))
        x = torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], dim=1)
        first, middle = x, None
        for index, block in enumerate(self.transformer["h"]):
            x = self.resid_lambdas[index] * x + self.x0_lambdas[index] * first
            ve = self.value_embeds[str(index)](tokens).to(x.dtype) if str(index) in self.value_embeds else None
            window = nanochat.windows(c)[index]
            if index < c.checkpoint_layers:
                x = checkpoint(block, x, ve, cos, sin, window, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, ve, cos, sin, window)
            if index == c.n_layer // 2:
                middle = x
        x = x - self.backout_lambda.to(x.dtype) * middle
        x = norm(x)
        logits = self.lm_head(x)
        logits = logits[..., : c.vocab_size]
        logits = logits.float()
        logits = 15 * torch.tanh(logits / 15)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
