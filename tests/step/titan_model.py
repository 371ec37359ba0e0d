"""torchtitan's Llama 3: its model and selective checkpointing, as its source has them (see step/models/torchtitan)."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from oomph.config.schema import TrainConfig

SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def _rotated(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(turned * freqs_cis).flatten(3).type_as(x)


class Norm(nn.Module):
    """nn.RMSNorm as it was composed until torch 2.7."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)


class Attention(nn.Module):
    def __init__(self, c: TrainConfig) -> None:
        super().__init__()
        self.size, keys = c.n_embd // c.n_head, c.num_key_value_heads or c.n_head
        self.times = c.n_head // keys
        self.wq = nn.Linear(c.n_embd, c.n_head * self.size, bias=False)
        self.wk = nn.Linear(c.n_embd, keys * self.size, bias=False)
        self.wv = nn.Linear(c.n_embd, keys * self.size, bias=False)
        self.wo = nn.Linear(c.n_head * self.size, c.n_embd, bias=False)

    def _repeated(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, heads, size = x.shape
        if self.times == 1:
            return x
        wide = torch.unsqueeze(x, dim=3).expand(batch, tokens, heads, self.times, size)
        return wide.reshape(batch, tokens, heads * self.times, size)

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        xq, xk, xv = (each(x).view(batch, tokens, -1, self.size) for each in (self.wq, self.wk, self.wv))
        xq, xk = _rotated(xq, freqs_cis), _rotated(xk, freqs_cis)
        keys, values = self._repeated(xk), self._repeated(xv)
        xq, xk, xv = xq.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        output = F.scaled_dot_product_attention(xq, xk, xv, is_causal=True)
        return self.wo(output.transpose(1, 2).contiguous().view(batch, tokens, -1))


class FeedForward(nn.Module):
    def __init__(self, c: TrainConfig) -> None:
        super().__init__()
        inner = c.intermediate_size or 4 * c.n_embd
        self.w1, self.w2 = nn.Linear(c.n_embd, inner, bias=False), nn.Linear(inner, c.n_embd, bias=False)
        self.w3 = nn.Linear(c.n_embd, inner, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, c: TrainConfig) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(c), FeedForward(c)
        self.attention_norm, self.ffn_norm = Norm(c.n_embd), Norm(c.n_embd)

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self, c: TrainConfig) -> None:
        super().__init__()
        size = c.n_embd // c.n_head
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.n_embd)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.norm, self.output = Norm(c.n_embd), nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.register_buffer("freqs_cis", torch.ones(1, c.block_size, 1, size // 2, dtype=torch.complex64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.freqs_cis)
        return self.output(self.norm(h))


def _checkpointed(block: nn.Module, c: TrainConfig, index: int) -> nn.Module:
    if index >= c.checkpoint_layers:
        return block
    if c.checkpoint_policy == "full":
        return checkpoint_wrapper(block, preserve_rng_state=False)
    return checkpoint_wrapper(block, context_fn=_contexts, preserve_rng_state=False)


def _contexts() -> Any:
    counts: dict[str, int] = defaultdict(int)

    def policy(context: Any, function: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        key = "recompute" if context.is_recompute else "forward"
        is_mm = function == torch.ops.aten.mm.default
        counts[key] += is_mm
        saves = function in SAVED and not (is_mm and counts[key] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply_tp(model: nn.Module, mesh: Any) -> None:
    """torchtitan's parallelize_llama.apply_tp, with the loss parallel too."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    whole = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, whole)
    for layer in model.layers:  # type: ignore[union-attr]
        plan: dict[str, Any] = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        plan |= {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}
        parallelize_module(layer, mesh, plan)


def run(c: TrainConfig, steps: int = 3, mesh: Any = None) -> None:
    """torchtitan's loop; on a mesh of (dp, tp) by tensor parallelism, and by FSDP2 where dp is more than one."""
    torch.manual_seed(0)
    model = Transformer(c)
    if mesh is not None:
        apply_tp(model, mesh["tp"])
    for index, layer in enumerate(model.layers):
        model.layers[index] = _checkpointed(layer, c, index)
    if mesh is not None and mesh["dp"].size() > 1:
        for index, layer in enumerate(model.layers):
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=index < c.n_layer - 1)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, foreach=False)
    for _ in range(steps):
        tokens = torch.ones(c.batch_size, c.block_size, dtype=torch.long)
        labels = torch.ones(c.batch_size, c.block_size, dtype=torch.long)
        optimizer.zero_grad()
        with loss_parallel() if mesh is not None else nullcontext():
            pred = model(tokens)
            loss = F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1))
            del pred
            loss.backward()
        optimizer.step()
