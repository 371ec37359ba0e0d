"""litgpt's GPT, its LoRA layers and a step of its scripts (0.5.13, with Lightning's Fabric), operation for operation.

The package is not installed for tests: it takes only versions of huggingface-hub from before transformers'.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oomph.config.reading.hugging_face import windowed
from oomph.config.schema import TrainConfig
from oomph.step.models.litgpt import PARTS, TARGETS
from oomph.step.trace.fakes import DTYPES

SCALE = 0.25


class RMSNorm(nn.Module):
    def __init__(self, size: int, offset: bool = False) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.ones(size)), offset

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        norm_x = torch.mean(x * x, dim=-1, keepdim=True)
        x_normed = x * torch.rsqrt(norm_x + 1e-5)
        weight = (1 + self.weight) if self.offset else self.weight
        return (x_normed * weight.float()).to(dtype=dtype)


def wanted(c: TrainConfig) -> list[str]:
    if c.method == "full":
        return []
    return list(TARGETS[:-1]) if c.lora_targets == "all-linear" else (c.lora_targets or "").split(",")


class LoRALinear(nn.Linear):
    def __init__(self, c: TrainConfig, target: str, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias)
        self.adapted = target in wanted(c)
        self.dropout = nn.Dropout(c.lora_dropout) if c.lora_dropout else nn.Identity()
        if self.adapted:
            self.lora_A = nn.Parameter(torch.empty(c.lora_rank, inputs))
            self.lora_B = nn.Parameter(torch.empty(outputs, c.lora_rank))

    def forward(self, x: Tensor) -> Tensor:
        pretrained = super().forward(x)
        if not self.adapted:
            return pretrained
        lora = (self.dropout(x) @ self.lora_A.transpose(0, 1) @ self.lora_B.transpose(0, 1)) * 2.0
        return pretrained + lora


class LoRAQKVLinear(nn.Linear):
    def __init__(self, c: TrainConfig, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__(inputs, outputs, bias)
        self.c, size, groups = c, c.head_dim or 0, c.num_key_value_heads or 0
        widths = dict(zip(PARTS, (c.n_head * size, groups * size, groups * size), strict=True))
        self.widths = [widths[name] for name in PARTS if name in wanted(c)]
        self.dropout = nn.Dropout(c.lora_dropout) if c.lora_dropout else nn.Identity()
        if self.widths:
            self.lora_A = nn.Parameter(torch.empty(c.lora_rank * len(self.widths), inputs))
            self.lora_B = nn.Parameter(torch.empty(sum(self.widths), c.lora_rank))
            self.register_buffer("lora_ind", torch.zeros(sum(self.widths), dtype=torch.long))

    def _conv1d(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.c.n_head == self.c.num_key_value_heads:
            return F.conv1d(x, weight, groups=len(self.widths))
        parts = zip(x.chunk(len(self.widths), dim=1), weight.split(self.widths), strict=True)
        return torch.cat([F.conv1d(a, b) for a, b in parts], dim=1)

    def _zero_pad(self, x: Tensor) -> Tensor:
        if len(self.widths) == 3:
            return x
        result = x.new_zeros(*x.shape[:-1], self.out_features)
        return result.index_copy_(dim=-1, index=self.lora_ind.clone(), source=x)

    def forward(self, x: Tensor) -> Tensor:
        pretrained = super().forward(x)
        if not self.widths:
            return pretrained
        after_a = F.linear(self.dropout(x), self.lora_A)
        after_b = self._conv1d(after_a.transpose(-2, -1), self.lora_B.unsqueeze(-1)).transpose(-2, -1)
        lora = self._zero_pad(after_b) * 2.0
        return pretrained + lora


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.size(-1) // 2
    x1, x2 = x[..., :half], x[..., half:]
    rotated = torch.cat((-x2, x1), dim=-1)
    roped = (x * cos) + (rotated * sin)
    return roped.to(dtype=x.dtype)


def capped(x: Tensor) -> Tensor:
    return torch.tanh(x / 30.0) * 30.0


class Attention(nn.Module):
    def __init__(self, c: TrainConfig, index: int) -> None:
        super().__init__()
        self.c, size, groups = c, c.head_dim or 0, c.num_key_value_heads or 0
        neox, whole = c.model_type == "gpt_neox", c.model_type == "olmo2"
        self.qkv = LoRAQKVLinear(c, c.n_embd, (c.n_head + 2 * groups) * size, neox or c.model_type == "qwen2")
        self.proj = LoRALinear(c, "projection", c.n_head * size, c.n_embd, neox)
        if c.model_type in ("qwen3", "olmo2"):
            self.norm_q = RMSNorm(c.n_head * size if whole else size)
            self.norm_k = RMSNorm(groups * size if whole else size)
        self.window = c.model_type == "gemma2" and windowed(c)[index]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, size, groups = self.c, self.c.head_dim or 0, self.c.num_key_value_heads or 0
        b, t, _ = x.size()
        qkv = self.qkv(x)
        q, k, v = qkv.split((c.n_head * size, groups * size, groups * size), dim=-1)
        if c.model_type == "olmo2":
            q, k = self.norm_q(q), self.norm_k(k)
        q, k, v = q.view(b, t, -1, size), k.view(b, t, -1, size), v.view(b, t, -1, size)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if c.model_type == "qwen3":
            q, k = self.norm_q(q), self.norm_k(k)
        turned = cos.shape[-1]
        q_roped = apply_rope(q[..., :turned], cos, sin)
        k_roped = apply_rope(k[..., :turned], cos, sin)
        q = torch.cat((q_roped, q[..., turned:]), dim=-1)
        k = torch.cat((k_roped, k[..., turned:]), dim=-1)
        if groups != c.n_head:
            k = k.repeat_interleave(c.n_head // groups, dim=1)
            v = v.repeat_interleave(c.n_head // groups, dim=1)
        mask = None
        if self.window:
            mask = torch.ones(t, t, dtype=q.dtype).triu(diagonal=1)
            mask.masked_fill_(mask.bool(), float("-inf"))
            window_mask = torch.full((t, t), float("-inf"), dtype=q.dtype)
            mask = window_mask.view(1, 1, t, t)
        y = self._attend(q, k, v, mask)
        y = y.reshape(b, t, size * c.n_head)
        return self.proj(y)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if self.c.model_type == "gemma2" and self.c.attn_logit_softcapping:
            scores = q @ k.mT * SCALE
            scores = capped(scores)
            if mask is None:
                mask = torch.ones(q.size(2), q.size(2), dtype=q.dtype).triu(diagonal=1)
                mask.masked_fill_(mask.bool(), torch.finfo(q.dtype).min)
            scores = scores + mask
            scores = F.softmax(scores, dim=-1, dtype=torch.float).to(dtype=q.dtype)
            y = scores @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, is_causal=mask is None)
        return y.transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, c: TrainConfig) -> None:
        super().__init__()
        self.kind, inner, neox = c.model_type, c.intermediate_size or 0, c.model_type == "gpt_neox"
        for name in ("fc",) if neox else ("fc_1", "fc_2"):
            setattr(self, name, LoRALinear(c, "mlp", c.n_embd, inner, neox))
        self.proj = LoRALinear(c, "mlp", inner, c.n_embd, neox)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "gpt_neox":
            x = self.fc(x)
            x = F.gelu(x)
            return self.proj(x)
        x_fc_1 = self.fc_1(x)
        x_fc_2 = self.fc_2(x)
        x = (F.gelu(x_fc_1, approximate="tanh") if self.kind == "gemma2" else F.silu(x_fc_1)) * x_fc_2
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, c: TrainConfig, index: int) -> None:
        super().__init__()
        kind, width, none = c.model_type, c.n_embd, nn.Identity()
        make = nn.LayerNorm if kind == "gpt_neox" else RMSNorm
        offset = (True,) if kind == "gemma2" else ()
        after = kind in ("gemma2", "olmo2")
        self.norm_1 = none if kind == "olmo2" else make(width, *offset)
        self.attn = Attention(c, index)
        self.post_attention_norm = make(width, *offset) if after else none
        self.norm_2 = none if kind == "olmo2" else make(width, *offset)
        self.mlp = Mlp(c)
        self.post_mlp_norm = make(width, *offset) if after else none
        self.parallel = kind == "gpt_neox" and c.use_parallel_residual

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_normed = self.norm_1(x)
        attention_output = self.attn(x_normed, cos, sin)
        attention_output = self.post_attention_norm(attention_output)
        if self.parallel:
            x_normed = self.norm_2(x)
            x = attention_output + x
        else:
            x = attention_output + x
            x_normed = self.norm_2(x)
        return self.post_mlp_norm(self.mlp(x_normed)) + x


class Litgpt(nn.Module):
    """The model; its forward is what `fit` computes of a batch: logits, which it holds, and the loss."""

    def __init__(self, c: TrainConfig) -> None:
        super().__init__()
        self.c = c
        blocks = nn.ModuleList(Block(c, index) for index in range(c.n_layer))
        last = nn.LayerNorm(c.n_embd) if c.model_type == "gpt_neox" else RMSNorm(c.n_embd, c.model_type == "gemma2")
        self.lm_head = LoRALinear(c, "head", c.n_embd, c.vocab_size)
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(c.vocab_size, c.n_embd), "h": blocks, "ln_f": last})
        self.to(torch.float32 if c.autocast else DTYPES[c.dtype or "float32"])
        turned = int((c.head_dim or 0) * c.partial_rotary_factor)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(c.block_size, turned, dtype=torch.float32))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(c.method == "full" or "lora_" in name)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Any, Tensor]:
        chunk = self.c.loss_chunk or 0
        if self.c.method == "full":
            logits = self._through_fabric(idx, 0)
            flat = logits[..., :-1, :].reshape(-1, logits.size(-1))
            return logits, mean_loss(flat.split(chunk), targets[..., 1:].reshape(-1).split(chunk), targets[..., 1:])
        logits = self._through_fabric(idx, chunk)
        logits[-1] = logits[-1][..., :-1, :]
        return logits, self._chunked(logits, targets[..., 1:])

    def _chunked(self, logits: list[Tensor], targets: Tensor) -> Tensor:
        chunks = [chunk.reshape(-1, chunk.size(-1)) for chunk in logits]
        wanted = [chunk.reshape(-1) for chunk in targets.split(logits[0].size(1), dim=1)]
        return mean_loss(chunks, wanted, targets)

    def _through_fabric(self, idx: Tensor, chunk: int) -> Any:
        half = torch.autocast("cpu", dtype=torch.bfloat16) if self.c.autocast else contextlib.nullcontext()
        with half:
            output = self._gpt(idx, chunk)
        return [each.to(torch.float32) for each in output] if chunk else output.to(torch.float32)

    def _gpt(self, idx: Tensor, chunk: int) -> Any:
        cos, sin = (each[: idx.size(1)].unsqueeze(0).view(1, 1, idx.size(1), -1) for each in (self.cos, self.sin))
        x = self.transformer.wte(idx)
        if self.c.model_type == "gemma2":
            x = x * torch.tensor(8.0, dtype=x.dtype)
        for block in self.transformer.h:
            x = block(x, cos, sin)
        x = self.transformer.ln_f(x)
        if chunk:
            return [self._head(part) for part in x.split(chunk, dim=1)]
        return self._head(x)

    def _head(self, x: Tensor) -> Tensor:
        logits = self.lm_head(x)
        return capped(logits) if self.c.final_logit_softcapping else logits


def mean_loss(chunks: Any, wanted: Any, targets: Tensor) -> Tensor:
    losses = [F.cross_entropy(a, b, reduction="none") for a, b in zip(chunks, wanted, strict=False)]
    non_masked = (targets != -100).sum()
    return torch.cat(losses).sum() / non_masked.maximum(torch.ones_like(non_masked))
