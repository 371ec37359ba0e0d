"""Qwen's first model, operation for operation, to trace: fused projections, rotary positions in float32, its own norm.

On a card with flash-attn's rotary kernel, whose memory a function with the same allocations takes; else in plain
operations, with a causal mask.
"""

from __future__ import annotations

from typing import Any

import torch
from hf_models import Hf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutput


class QwenConfig(PretrainedConfig):
    model_type = "qwen"


class Rotary(torch.autograd.Function):
    """flash-attn's ApplyRotaryEmb: a new tensor each way, and a clone of the gradient."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return torch.empty_like(grads[0].clone())


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


class Attention(nn.Module):
    def __init__(self, c: Any, flash: bool) -> None:
        super().__init__()
        self.heads, self.width, self.flash = c.num_attention_heads, c.hidden_size, flash
        self.c_attn = nn.Linear(self.width, 3 * self.width)
        self.c_proj = nn.Linear(self.width, self.width, bias=False)

    def _rotated(self, t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.flash:
            return Rotary.apply(t.float()).type_as(t)  # type: ignore[no-any-return]
        t_, t_pass_ = t[..., : cos.shape[-1]], t[..., cos.shape[-1] :]
        t_ = t_.float()
        t_pass_ = t_pass_.float()
        t_ = (t_ * cos) + (rotate_half(t_) * sin)
        return torch.cat((t_, t_pass_), dim=-1).type_as(t)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        mixed_x_layer = self.c_attn(x)
        query, key, value = mixed_x_layer.split(self.width, dim=2)
        query, key, value = (each.view(*x.shape[:2], self.heads, -1) for each in (query, key, value))
        query = self._rotated(query, cos, sin)
        key = self._rotated(key, cos, sin)
        mask = None
        if not self.flash:
            causal = torch.empty(1, 1, x.shape[1], x.shape[1], dtype=torch.bool)
            mask = torch.empty(x.shape[0], 1, x.shape[1], x.shape[1], dtype=query.dtype)
            del causal
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        attn_output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.flash).transpose(1, 2)
        context_layer = attn_output.contiguous().view(*x.shape)
        return self.c_proj(context_layer)  # type: ignore[no-any-return]


class Feedforward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2 = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.c_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a1 = self.w1(x)
        a2 = self.w2(x)
        intermediate_parallel = a1 * F.silu(a2)
        return self.c_proj(intermediate_parallel)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, c: Any, flash: bool) -> None:
        super().__init__()
        self.ln_1, self.attn = Norm(c.hidden_size), Attention(c, flash)
        self.ln_2, self.mlp = Norm(c.hidden_size), Feedforward(c.hidden_size, c.intermediate_size // 2)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        layernorm_output = self.ln_1(hidden_states)
        attn_output = self.attn(layernorm_output, cos, sin)
        residual = hidden_states
        layernorm_input = attn_output + residual
        layernorm_output = self.ln_2(layernorm_input)
        residual = layernorm_input
        mlp_output = self.mlp(layernorm_output)
        return residual + mlp_output  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self, c: Any, flash: bool, checkpointed: bool, adapted: bool) -> None:
        super().__init__()
        self.checkpointed, self.adapted = checkpointed, adapted
        self.wte = nn.Embedding(c.vocab_size, c.hidden_size)
        self.h = nn.ModuleList(Block(c, flash) for _ in range(c.num_hidden_layers))
        self.ln_f = Norm(c.hidden_size)
        size = c.hidden_size // c.num_attention_heads
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.ones(1, c.max_position_embeddings, 1, size))

    def forward(self, ids: Tensor) -> Tensor:
        inputs_embeds = self.wte(ids)
        if self.adapted and self.checkpointed:
            inputs_embeds.requires_grad_(True)
        hidden_states = inputs_embeds
        for block in self.h:
            if self.checkpointed:
                hidden_states = checkpoint(block, hidden_states, self.cos, self.sin, use_reentrant=True)
            else:
                hidden_states = block(hidden_states, self.cos, self.sin)
        return self.ln_f(hidden_states)  # type: ignore[no-any-return]


class QWenLMHeadModel(nn.Module):
    def __init__(self, c: Any, flash: bool, checkpointed: bool, adapted: bool) -> None:
        super().__init__()
        self.config = c
        self.transformer = Transformer(c, flash, checkpointed, adapted)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        hidden_states = self.transformer(input_ids)
        lm_logits = self.lm_head(hidden_states)
        shift_logits = lm_logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        loss = F.cross_entropy(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))
        return CausalLMOutput(loss=loss, logits=lm_logits)  # type: ignore[arg-type]


class Qwen(Hf):
    """The model as `Hf` has those of transformers. `flash`: with flash-attn."""

    flash = True

    @property
    def config(self) -> Any:
        return QwenConfig(
            hidden_size=self.width, num_hidden_layers=self.layers, num_attention_heads=self.heads,
            intermediate_size=2 * self.ffn, vocab_size=self.vocab, max_position_embeddings=self.tokens,
            tie_word_embeddings=False,
        )  # fmt: skip

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        made: nn.Module = QWenLMHeadModel(self.config, self.flash, self.checkpoint, bool(self.lora))
        made.to(dtype)
        made.transformer.cos, made.transformer.sin = (getattr(made.transformer, n).float() for n in ("cos", "sin"))  # type: ignore[union-attr]
        if self.lora:
            from peft import LoraConfig, get_peft_model

            made = get_peft_model(made, LoraConfig(**self.lora), autocast_adapter_dtype=not self.half_adapters)  # type: ignore[arg-type]
            for name, parameter in list(made.named_parameters()):
                if ".modules_to_save." in name:  # a deep copy of a fake tensor has a storage that no trace knows
                    owner = made.get_submodule(name.rpartition(".")[0])
                    owner.weight = nn.Parameter(torch.empty_like(parameter))
        return made.train()
