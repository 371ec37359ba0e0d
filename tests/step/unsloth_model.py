"""Unsloth's Llama and Qwen3 with adapters, and a step (2026.8.19, unsloth_zoo 2026.8.13), operation for operation.

Triton's kernels, which write into what is there or into memory made before them, are left out, and so are their
arithmetic and a few numbers for each sequence. The package itself wants a GPU to be imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from oomph.config.schema import TrainConfig
from oomph.step.trace.fakes import DTYPES

SCALE = 2.0
BLOCK = 64  # weights with one scale


class Layer(nn.Module):
    """A linear layer, of 4 bits or not, with adapters or without. `buffer` is the weight that all share."""

    def __init__(self, c: TrainConfig, name: str, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.quantized, self.size, self.dropout = c.quantization != "off", (outputs, inputs), c.lora_dropout
        self.adapted = name in (c.lora_targets or "").split(",")
        dtype = DTYPES[c.base_dtype or c.dtype or ""]
        if self.quantized:
            self.register_buffer("packed", torch.empty(outputs * inputs // 2, dtype=torch.uint8))
        else:
            self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype), requires_grad=False) if bias else None
        if self.adapted:
            own = DTYPES[c.adapter_dtype or "float32"]
            self.lora_A = nn.Parameter(torch.empty(c.lora_rank, inputs, dtype=own))
            self.lora_B = nn.Parameter(torch.empty(outputs, c.lora_rank, dtype=own))

    def shared(self) -> Tensor:
        """fast_dequantize(use_global_buffer=True)"""
        return self.buffer[: self.size[0] * self.size[1]].view(self.size) if self.quantized else self.weight

    def copied(self) -> Tensor:
        """fast_dequantize"""
        if not self.quantized:
            return self.weight
        out = torch.empty(self.size, dtype=self.buffer.dtype, device=self.buffer.device)
        _absmax = torch.empty(-(-self.size[0] * self.size[1] // BLOCK), dtype=torch.float32, device=out.device)
        return out

    def forward(self, x: Tensor) -> Tensor:
        """peft's layer."""
        result = nn.functional.linear(x, self.weight, self.bias)
        if not self.adapted:
            return result
        dtype = result.dtype
        x = x.to(self.lora_A.dtype)
        result = result + self.through(x) * SCALE
        return result.to(dtype)

    def through(self, x: Tensor) -> Tensor:
        linear, dropout = nn.functional.linear, nn.functional.dropout
        return linear(linear(dropout(x, self.dropout) if self.dropout else x, self.lora_A), self.lora_B)


def matmul_lora(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    dtype, shape = x.dtype, x.shape
    x = x.view(-1, shape[-1])
    out = torch.matmul(x, weight.t())
    a, b = a.t(), b.t()
    xa = torch.matmul(x, a.to(dtype))
    out.addmm_(xa, b.to(dtype), alpha=SCALE)
    return out.view(*shape[:-1], -1)


def fill(d_a: Tensor, d_b: Tensor, x: Tensor, dy: Tensor, a: Tensor, b: Tensor) -> None:
    d_a.addmm_(x.t(), dy @ b.t(), alpha=SCALE, beta=0)
    d_b.addmm_(a.t() @ x.t(), dy, alpha=SCALE, beta=0)


class LoraMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: Any, *_adapters: Tensor) -> Tensor:
        e, g = (matmul_lora(x, each.shared(), each.lora_A, each.lora_B) for each in (mlp.gate_proj, mlp.up_proj))
        h = torch.empty(e.shape, dtype=e.dtype, device=e.device)
        i = matmul_lora(h, mlp.down_proj.shared(), mlp.down_proj.lora_A, mlp.down_proj.lora_B)
        ctx.mlp = mlp
        ctx.save_for_backward(x, e, g)
        return i

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, e, g), dy = ctx.saved_tensors, grads[0]
        gate, up, down = ctx.mlp.gate_proj, ctx.mlp.up_proj, ctx.mlp.down_proj
        shape, dtype = x.shape, x.dtype
        dy, x, e, g = (each.view(-1, each.shape[-1]) for each in (dy, x, e, g))
        ga, gb, ua, ub, da, db = (each.to(dtype) for layer in (gate, up, down) for each in (layer.lora_A, layer.lora_B))
        ga, gb, ua, ub, da, db = ga.t(), gb.t(), ua.t(), ub.t(), da.t(), db.t()
        dw = matmul_lora(dy, down.shared().t(), db, da)
        h, df, de = dw, e, g
        d_da, d_db, d_ga, d_gb, d_ua, d_ub = (torch.empty_like(each) for each in (da, db, ga, gb, ua, ub))
        fill(d_da, d_db, h, dy, da, db)
        fill(d_ua, d_ub, x, df, ua, ub)
        fill(d_ga, d_gb, x, de, ga, gb)
        weight = up.copied()
        dx = torch.matmul(df, weight, out=x)
        del weight
        dx.addmm_(df @ ub.t(), ua.t(), alpha=SCALE)
        weight = gate.copied()
        dx.addmm_(de, weight)
        del weight
        dx.addmm_(de @ gb.t(), ga.t(), alpha=SCALE)
        return dx.view(shape), None, d_ga.t(), d_gb.t(), d_ua.t(), d_ub.t(), d_da.t(), d_db.t()


class LoraQkv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: Any, *_adapters: Tensor) -> tuple[Tensor, ...]:
        flat = x.view(-1, x.shape[-1])
        found = [matmul_lora(flat, each.shared(), each.lora_A, each.lora_B) for each in layers]
        ctx.layers = layers
        ctx.save_for_backward(x)
        return tuple(each.view(*x.shape[:2], -1) for each in found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        shape, dtype = x.shape, x.dtype
        dq, dk, dv = (each.reshape(-1, each.shape[-1]) for each in grads)
        x = x.view(-1, x.shape[-1])
        casts = [each.to(dtype) for layer in ctx.layers for each in (layer.lora_A, layer.lora_B)]
        casts = [each.t() for each in casts]
        made = [torch.empty_like(each) for each in casts]
        for index, dy in enumerate((dq, dk, dv)):
            fill(made[2 * index], made[2 * index + 1], x, dy, casts[2 * index], casts[2 * index + 1])
        weight = ctx.layers[0].copied()
        dx = torch.matmul(dq, weight, out=x)
        del weight
        dx.addmm_(dq @ casts[1].t(), casts[0].t(), alpha=SCALE)
        for index, dy in ((1, dk), (2, dv)):
            weight = ctx.layers[index].copied()
            dx.addmm_(dy, weight)
            del weight
            dx.addmm_(dy @ casts[2 * index + 1].t(), casts[2 * index].t(), alpha=SCALE)
        return dx.view(shape), None, *(each.t() for each in made)


class LoraW(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any, a: Tensor, b: Tensor) -> Tensor:
        out = matmul_lora(x, layer.shared(), a, b)
        ctx.layer = layer
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,), layer = ctx.saved_tensors, ctx.layer
        shape, dtype = x.shape, x.dtype
        dy, x = grads[0].reshape(-1, grads[0].shape[-1]), x.reshape(-1, x.shape[-1])
        a, b = layer.lora_A.to(dtype), layer.lora_B.to(dtype)
        a, b = a.t(), b.t()
        d_a, d_b = torch.empty_like(a), torch.empty_like(b)
        fill(d_a, d_b, x, dy, a, b)
        weight = layer.copied()
        dx = dy @ weight
        del weight
        dx.addmm_(dy @ b.t(), a.t(), alpha=SCALE)
        return dx.view(shape), None, d_a.t(), d_b.t()


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        r = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, r)
        return y.view(*shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        shape = grads[0].shape
        dy = grads[0].reshape(-1, shape[-1])
        _x, _weight, _r = ctx.saved_tensors
        return dy.view(*shape), None


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, q: Tensor) -> Tensor:
        shape = q.shape
        q = q.reshape(shape[0] * shape[1], shape[2] * shape[3])
        return q.reshape(shape)

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        shape = grads[0].shape
        dy = grads[0].reshape(shape[0] * shape[1], shape[2] * shape[3])
        return dy.reshape(shape)


class RopeQk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        ctx.indices = indices.reshape(-1).to(dtype=torch.int32)
        return (q if q.is_contiguous() else q.clone()), (k if k.is_contiguous() else k.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dq, dk = (each if each.is_contiguous() else each.clone() for each in grads)
        ctx.indices = None
        return dq, dk, None


class Flash(torch.autograd.Function):
    """flash-attn's function of (batch, tokens, heads, size), and xformers' around it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, document: int | None) -> Tensor:
        batch, tokens, heads, _ = q.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
        state = torch.empty(2, dtype=torch.int64, device=q.device)
        ctx.save_for_backward(q, k, v, out, lse, state)
        ctx.document = document
        return out

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        q, k, v, *_rest = ctx.saved_tensors
        (batch, tokens, heads, size), wide = q.shape, -(-q.shape[-1] // 32) * 32
        found = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (q, k, v)]
        rows = batch * -(-tokens // 128) * 128
        if ctx.document is not None:
            rows = batch * tokens + 128 * batch * -(-tokens // ctx.document)
        _held = [torch.empty(rows * heads * n, dtype=torch.float32, device=q.device) for n in (1, wide)]
        if k.shape[2] < heads:
            _held += [torch.empty(batch, tokens, heads, size, dtype=q.dtype, device=q.device) for _ in range(2)]
        return *found, None


class Mlp(nn.Module):
    def __init__(self, c: TrainConfig) -> None:
        super().__init__()
        width, inner = c.n_embd, c.intermediate_size or 0
        self.gate_proj, self.up_proj = (Layer(c, name, width, inner) for name in ("gate_proj", "up_proj"))
        self.down_proj = Layer(c, "down_proj", inner, width)

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        if all(each.adapted and not each.dropout for each in layers):
            return LoraMlp.apply(x, self, *(each for layer in layers for each in (layer.lora_A, layer.lora_B)))
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class RmsNorm(nn.Module):
    def __init__(self, c: TrainConfig, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=DTYPES[c.base_dtype or c.dtype or ""]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return Norm.apply(x, self.weight)


class Attention(nn.Module):
    def __init__(self, c: TrainConfig) -> None:
        super().__init__()
        self.c, self.size, self.groups = c, c.head_dim or 0, c.num_key_value_heads or 0
        queries, keys, biased = c.n_head * self.size, self.groups * self.size, c.model_type == "qwen2"
        self.q_proj = Layer(c, "q_proj", c.n_embd, queries, biased)
        self.k_proj, self.v_proj = (Layer(c, name, c.n_embd, keys, biased) for name in ("k_proj", "v_proj"))
        self.o_proj = Layer(c, "o_proj", queries, c.n_embd)
        if c.model_type == "qwen3":
            self.q_norm, self.k_norm = RmsNorm(c, self.size), RmsNorm(c, self.size)

    def forward(self, x: Tensor, indices: Tensor | None) -> Tensor:
        layers, (batch, tokens, _) = (self.q_proj, self.k_proj, self.v_proj), x.shape
        if all(each.adapted and not each.dropout and each.bias is None for each in layers):
            adapters = [each for layer in layers for each in (layer.lora_A, layer.lora_B)]
            q, k, v = LoraQkv.apply(x, layers, *adapters)
        else:
            q, k, v = (each(x) for each in layers)
        q, k, v = (each.view(batch, tokens, -1, self.size) for each in (q, k, v))
        if self.c.model_type == "qwen3":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if indices is None:
            q = Rope.apply(q.transpose(1, 2).contiguous()).transpose(1, 2)
            k = Rope.apply(k.transpose(1, 2).contiguous()).transpose(1, 2)
        else:
            q, k = RopeQk.apply(q, k, indices)
        a = self.attend(x, q, k, v).reshape(batch, tokens, -1)
        if self.o_proj.adapted and not self.o_proj.dropout:
            return LoraW.apply(a, self.o_proj, self.o_proj.lora_A, self.o_proj.lora_B)
        return self.o_proj(a)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        batch, tokens, heads, size = q.shape
        groups = heads // self.groups
        if self.c.attention == "flash" and x.requires_grad and groups != 1:
            k, v = (each.view(batch, tokens, self.groups, 1, size) for each in (k, v))
            k, v = (each.expand(batch, tokens, self.groups, groups, size) for each in (k, v))
            k, v = (each.reshape(batch, tokens, heads, size) for each in (k, v))
        return Flash.apply(q, k, v, None if self.c.packing == "off" else self.c.block_size)


class Block(nn.Module):
    def __init__(self, c: TrainConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mlp(c)
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(c, c.n_embd), RmsNorm(c, c.n_embd)

    def forward(self, hidden_states: Tensor, indices: Tensor | None) -> Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(hidden_states, indices)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states


class Checkpoint(torch.autograd.Function):
    """UnslothCheckpointFunction: the input goes to the host, and comes back into `buffer`; None: it stays."""

    @staticmethod
    def forward(ctx: Any, block: Any, buffer: Tensor | None, x: Tensor, indices: Tensor | None) -> Tensor:
        ctx.block, ctx.buffer, ctx.indices, ctx.shape = block, buffer, indices, x.shape
        ctx.save_for_backward(x if buffer is None else None)
        with torch.no_grad():
            return block(x, indices)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach() if ctx.buffer is None else ctx.buffer[: ctx.shape.numel()].view(ctx.shape).detach()
        x.requires_grad_(True)
        with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            out = ctx.block(x, ctx.indices)
        torch.autograd.backward(out, grads[0])
        grad, ctx.indices = x.grad, None  # the Trainer lets go of the loss, and the graph with it
        del x
        return None, None, grad, None


class FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, chunk: int) -> Tensor:
        _labels = torch.empty_like(labels)
        grad_inputs = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head) if head.requires_grad else None
        loss = torch.zeros(1, dtype=torch.float32, device=hidden.device)[0]
        rows = hidden.reshape(-1, hidden.shape[-1])
        for part in torch.split(rows, chunk):
            logits = part @ head.t()
            _rows = [torch.empty(len(part), dtype=torch.float32, device=hidden.device) for _ in range(3)]
            del _rows
            grad = logits @ head
            own = logits.t() @ part if grad_head is not None else None
            del logits
            del grad, own
        ctx.save_for_backward(grad_inputs, grad_head)
        return loss

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        grad, head = ctx.saved_tensors
        return grad * 2.0, None if head is None else head * 2.0, None, None


class Unsloth(nn.Module):
    """The model and its loss, of a settled config."""

    def __init__(self, c: TrainConfig) -> None:
        super().__init__()
        self.c, dtype = c, DTYPES[c.base_dtype or c.dtype or ""]
        whole = (c.modules_to_save or "").split(",")
        self.embed_tokens = nn.Embedding(c.vocab_size, c.n_embd, dtype=dtype)
        self.embed_tokens.requires_grad_("embed_tokens" in whole)
        self.layers = nn.ModuleList([Block(c) for _ in range(c.n_layer)])
        self.norm = RmsNorm(c, c.n_embd)
        self.lm_head = nn.Parameter(torch.empty(c.vocab_size, c.n_embd, dtype=dtype), requires_grad="lm_head" in whole)
        count = c.batch_size * c.block_size * c.n_embd
        self.register_buffer("input", torch.empty(count, dtype=dtype))
        self.offloads = count > 2**20
        quantized = [each for each in self.modules() if isinstance(each, Layer) and each.quantized]
        if quantized:
            size = max(each.size[0] * each.size[1] for each in quantized)
            shared = torch.empty(size, dtype=dtype)
            for each in quantized:
                each.register_buffer("buffer", shared)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.loss(ids, labels)

    def decoder(self, ids: Tensor) -> Tensor:
        indices = None
        if self.c.packing != "off":
            indices = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
        inputs_embeds = self.embed_tokens(ids)  # held to the end
        if self.c.checkpoint_layers and not inputs_embeds.requires_grad:
            inputs_embeds.requires_grad_(True)
        hidden_states = inputs_embeds
        for index, layer in enumerate(self.layers):
            if self.c.checkpoint_layers:
                offloads = self.offloads and index < self.c.n_layer - 1
                hidden_states = Checkpoint.apply(layer, self.input if offloads else None, hidden_states, indices)
            else:
                hidden_states = layer(hidden_states, indices)
        return self.norm(hidden_states)

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        flat = self.c.packing != "off"
        hidden_states = self.decoder(ids.view(1, -1) if flat else ids)
        labels = torch.empty_like(labels.view(1, -1)) if flat else labels
        tokens, most = labels.numel(), self.c.loss_chunk or 1
        count = 1 if tokens <= most else 4 * -(-tokens // (4 * most))
        return FusedLoss.apply(hidden_states, self.lm_head, labels, -(-tokens // count))
