"""torchtune's decoder and recipe step (0.6.1, with torchao 0.18's NF4Tensor), operation for operation, to trace.

The packages themselves are not installed for tests: torchtune 0.6.1 imports with torchao before 0.13 only, and those
do not import with the torch that is tested with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

from oomph.config.schema import TrainConfig
from oomph.step.models import lora
from oomph.step.trace.fakes import DTYPES

_BLOCK, _SCALES = 64, 256


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight=self.scale).to(x.dtype)


class Rotary(nn.Module):
    """Llama's and Mistral's: pairs of numbers, in float32."""

    def __init__(self, size: int, tokens: int) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(tokens, size // 2, 2, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.size(1)
        xshaped = x.float().reshape(*x.shape[:-1], -1, 2)
        cache = self.cache[:tokens].view(-1, tokens, 1, xshaped.size(3), 2)
        x_out = torch.stack(
            [
                xshaped[..., 0] * cache[..., 0] - xshaped[..., 1] * cache[..., 1],
                xshaped[..., 1] * cache[..., 0] + xshaped[..., 0] * cache[..., 1],
            ],
            -1,
        )
        return x_out.flatten(3).type_as(x)


class HalvesRotary(nn.Module):
    """Qwen2's, with tables in x's dtype, and Phi-3's."""

    def __init__(self, size: int, tokens: int, casts: bool) -> None:
        super().__init__()
        self.casts = casts
        self.register_buffer("cache", torch.zeros(tokens, 2 * size, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        tokens, size = x.size(1), x.size(-1)
        cache = self.cache[:tokens].view(-1, tokens, 1, size * 2)
        cos, sin = cache[..., :size], cache[..., size:]
        if self.casts:
            cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        x1, x2 = x[..., : size // 2], x[..., size // 2 :]
        rotated = torch.cat((-x2, x1), dim=-1)
        x_out = (x * cos) + (rotated * sin)
        return x_out.type_as(x)


class LinearNF4(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.weight(), None


class Adapted(nn.Linear):
    """nn.Linear, FrozenNF4Linear, LoRALinear or DoRALinear, as the config has it for a module of that name."""

    def __init__(self, c: TrainConfig, name: str, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias)
        self.c, self.shape = c, (outputs, inputs)
        if c.method == "qlora" and name != "output":
            self._quantize()
        self.adapted = c.method != "full" and lora.is_adapted(c, name, self.shape)
        self.dropout = nn.Dropout(c.lora_dropout) if c.lora_dropout else nn.Identity()
        if self.adapted and c.method == "dora":
            self.magnitude = nn.Parameter(torch.empty(outputs))
        if self.adapted:
            self.lora_a = nn.Linear(inputs, c.lora_rank, bias=False)
            self.lora_b = nn.Linear(c.lora_rank, outputs, bias=False)

    def _quantize(self) -> None:
        del self.weight
        count = self.shape[0] * self.shape[1]
        blocks = count // _BLOCK
        self.register_buffer("quantized_data", torch.zeros(count // 2, dtype=torch.uint8))
        self.register_buffer("quantized_scalers", torch.zeros(blocks, dtype=torch.int8))
        self.register_buffer("quantization_factor", torch.zeros(blocks // _SCALES))
        self.register_buffer("scaler_mean", torch.zeros(()))
        self.register_buffer("nf4", torch.zeros(16))

    def original_weight(self) -> Tensor:
        first_elements = (self.quantized_data >> 4).to(torch.long)
        second_elements = (self.quantized_data & 0b1111).to(torch.long)
        dequantized_first = self.nf4[first_elements]
        dequantized_second = self.nf4[second_elements]
        scalers = self._scalers()
        repeated = scalers.unsqueeze(-1).expand(scalers.size(0), _BLOCK // 2)
        scaled_first = dequantized_first * repeated.flatten()
        scaled_second = dequantized_second * repeated.flatten()
        scaled_first = scaled_first.unsqueeze(-1).transpose(0, 1)
        scaled_second = scaled_second.unsqueeze(-1).transpose(0, 1)
        return torch.stack([scaled_first, scaled_second], dim=-1).reshape(self.shape)

    def _scalers(self) -> Tensor:
        blocks = self.quantized_scalers.view(-1, _SCALES)
        return (blocks / self.quantization_factor.unsqueeze(-1)).flatten().to(self.nf4.dtype) + self.scaler_mean

    def forward(self, x: Tensor) -> Tensor:
        if self.c.method == "qlora" and hasattr(self, "nf4"):
            out = LinearNF4.apply(x, self.original_weight)
            if self.bias is not None:
                out = out + self.bias
        else:
            out = F.linear(x, self.weight, self.bias)
        if not self.adapted:
            return out
        if self.c.method == "dora":
            return self._dora(x, out)
        lora_out = self.lora_a(self.dropout(x))
        lora_out = 2.0 * self.lora_b(lora_out)
        return out + lora_out

    def _dora(self, x: Tensor, base_out: Tensor) -> Tensor:
        x = self.dropout(x)
        lora_out = self.lora_b(self.lora_a(x))
        x_eye = torch.eye(self.shape[1], dtype=x.dtype)
        lora_weight = self.lora_b(self.lora_a(x_eye)).T
        weight_norm = self._weight_norm(self.weight.to(x.dtype), lora_weight.detach()).detach()
        scale = (self.magnitude / weight_norm).view(1, -1)
        dora_out = (scale - 1) * base_out + scale * lora_out * 2.0
        return dora_out + base_out

    def _weight_norm(self, weight: Tensor, lora_weight: Tensor) -> Tensor:
        weight = weight + 2.0 * lora_weight
        return torch.linalg.norm(weight, dim=1).to(weight.dtype)


class Attention(nn.Module):
    def __init__(self, c: TrainConfig, rotary: nn.Module) -> None:
        super().__init__()
        size, self.heads, self.keys = c.head_dim or 0, c.n_head, c.num_key_value_heads or 0
        biased = c.model_type == "qwen2"
        self.size = size
        self.q_proj = Adapted(c, "q_proj", c.n_embd, self.heads * size, biased)
        self.k_proj = Adapted(c, "k_proj", c.n_embd, self.keys * size, biased)
        self.v_proj = Adapted(c, "v_proj", c.n_embd, self.keys * size, biased)
        self.output_proj = Adapted(c, "output_proj", self.heads * size, c.n_embd)
        self.pos_embeddings = rotary

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, self.heads, self.size)
        q = self.pos_embeddings(q)
        q = q.transpose(1, 2)
        k = self.k_proj(x)
        v = self.v_proj(x)
        k, v = k.view(b, s, -1, self.size), v.view(b, s, -1, self.size)
        k = self.pos_embeddings(k)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if self.heads != self.keys:
            wide = (b, self.keys, self.heads // self.keys, -1, self.size)
            k = k.unsqueeze(2).expand(wide).flatten(1, 2)
            v = v.unsqueeze(2).expand(wide).flatten(1, 2)
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output = output.transpose(1, 2).contiguous().view(b, s, -1)
        return self.output_proj(output)


class FeedForward(nn.Module):
    def __init__(self, c: TrainConfig) -> None:
        super().__init__()
        inner = c.intermediate_size or 0
        self.w1 = Adapted(c, "w1", c.n_embd, inner)
        self.w2 = Adapted(c, "w2", inner, c.n_embd)
        self.w3 = Adapted(c, "w3", c.n_embd, inner)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.w1(x))
        h = h * self.w3(x)
        return self.w2(h)


class Layer(nn.Module):
    def __init__(self, c: TrainConfig, rotary: nn.Module) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(c, rotary), FeedForward(c)
        self.sa_norm, self.mlp_norm = RMSNorm(c.n_embd), RMSNorm(c.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        h = self.sa_norm(x)
        attn_out = self.attn(h)
        h = attn_out + x
        mlp_out = self.mlp(self.mlp_norm(h))
        return h + mlp_out


class Torchtune(nn.Module):
    """The decoder; its forward is the recipes' `_loss_step`."""

    def __init__(self, c: TrainConfig) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(DTYPES[c.dtype or "float32"])
        super().__init__()
        size, rows = c.head_dim or 0, c.max_position_embeddings or c.block_size
        halves = c.model_type in ("qwen2", "phi3")
        rotary = HalvesRotary(size, rows, c.model_type == "qwen2") if halves else Rotary(size, rows)
        layers = [Layer(c, rotary) for _ in range(c.n_layer)]
        wrapped = [checkpoint_wrapper(layer) for layer in layers] if c.checkpoint_layers else layers
        self.tok_embeddings, self.layers = nn.Embedding(c.vocab_size, c.n_embd), nn.ModuleList(wrapped)
        self.norm = RMSNorm(c.n_embd)
        self.output = None if c.tie_weights else Adapted(c, "output", c.n_embd, c.vocab_size)
        self.register_buffer("ignored", torch.full((c.batch_size, 1), -100))
        self.chunked = bool(c.loss_chunk)
        torch.set_default_dtype(before)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(c.method == "full" or ".lora_" in name or "magnitude" in name)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self._decode(tokens)
        labels = torch.hstack((labels[..., 1:], self.ignored[: labels.shape[0]]))
        if not isinstance(logits, list):
            labels = labels.reshape(-1)
            logits = logits.reshape(-1, logits.size(-1))
            loss = F.cross_entropy(logits, labels)
        else:
            loss = self._chunked_loss(logits, labels)
        del logits
        return loss

    def _decode(self, tokens: Tensor) -> Any:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self._unembed(h)

    def _unembed(self, h: Tensor) -> Any:
        h = self.norm(h)
        return [self._head(chunk) for chunk in h.chunk(8, dim=1)] if self.chunked else self._head(h).float()

    def _head(self, h: Tensor) -> Tensor:
        return F.linear(h, self.tok_embeddings.weight) if self.output is None else self.output(h)

    def _chunked_loss(self, logits: list[Tensor], labels: Tensor) -> Tensor:
        total_elements = (labels != -100).sum()
        targets = [chunk.reshape(-1) for chunk in labels.chunk(8, dim=1)]
        logits = [chunk.reshape(-1, chunk.size(-1)) for chunk in logits]
        total_loss: Any = 0.0
        for chunk, target in zip(logits, targets, strict=True):
            total_loss += F.cross_entropy(chunk.float(), target, reduction="sum")
        return total_loss / total_elements
