"""Liger's kernels in a block, held against functions that keep and make the same tensors in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from described_models import config_of, described, first_difference
from hf_models import Hf
from torch import Tensor, nn

from oomph.config import from_dict
from oomph.planning.plan import plan
from oomph.step.tensor.libraries.liger import MULTIPROCESSORS

pytestmark = pytest.mark.filterwarnings("ignore")


class Norm(torch.autograd.Function):
    """LigerRMSNormFunction without its arithmetic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        rstd = torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _x, weight, _rstd = ctx.saved_tensors
        grad = grads[0].contiguous().view(-1, weight.shape[0]).view(grads[0].shape)
        if not ctx.needs_input_grad[1]:
            return grad, None
        rows = torch.empty(MULTIPROCESSORS, weight.shape[0], dtype=torch.float32, device=weight.device)
        return grad, rows.sum(dim=0).to(weight.dtype)


class SiluMul(torch.autograd.Function):
    """LigerSiLUMulFunction without its arithmetic."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.empty_like(a)

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        return ctx.saved_tensors


class Rope(torch.autograd.Function):
    """LigerRopeFunction without its arithmetic."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
        ctx.save_for_backward(cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        dq, dk = (grad.transpose(1, 2).contiguous() for grad in grads)
        return dq.transpose(1, 2), dk.transpose(1, 2), None, None


class Liger(Hf):
    """A model with those in its blocks."""

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        made = super().build(dtype)
        for module in made.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = lambda x, norm=module: Norm.apply(x, norm.weight)
            if type(module).__name__.endswith("MLP"):
                module.forward = lambda x, mlp=module: mlp.down_proj(SiluMul.apply(mlp.gate_proj(x), mlp.up_proj(x)))
        return made


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("lora", [{}, {"r": 4, "target_modules": "all-linear"}], ids=["full", "lora"])
@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_blocks_with_ligers_kernels_are_the_trace(
    family: str, precision: str, lora: dict[str, Any], checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=[""])
    monkeypatch.setattr(home, "apply_rotary_pos_emb", lambda q, k, cos, sin, *_: Rope.apply(q, k, cos, sin))
    model = Liger(family, kv_heads=2, checkpoint=checkpoint, lora=lora)
    ours = described(config_of(model, precision, liger_kernel=True, fused_loss="off"), micro_steps=2)
    assert not first_difference(ours, model.traced(precision=precision, micro_steps=2))


class Fast(Hf):
    """A model with fms-acceleration's norm, which computes no gradient of its weight."""

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        made = super().build(dtype)
        for module in made.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = lambda x, norm=module: Norm.apply(x, norm.weight.detach())
        return made


@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_blocks_with_fast_kernels_are_the_trace(
    checkpoint: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = __import__("transformers.models.llama.modeling_llama", fromlist=[""])
    monkeypatch.setattr(home, "apply_rotary_pos_emb", lambda q, k, cos, sin, *_: Rope.apply(q, k, cos, sin))
    model = Fast("llama", kv_heads=2, checkpoint=checkpoint)
    ours = described(config_of(model, precision, fast_kernels=True), micro_steps=2)
    assert not first_difference(ours, model.traced(precision=precision, micro_steps=2))


@pytest.mark.parametrize("loss", ["liger", "cce"])
def test_kernels_and_a_fused_loss_save_memory(loss: str) -> None:
    keys = {
        "trainer": "hf", "model_type": "llama", "n_layer": 4, "n_head": 8, "n_embd": 512, "vocab_size": 128256,
        "intermediate_size": 1376, "batch_size": 4, "block_size": 1024, "dtype": "bfloat16",
    }  # fmt: skip
    usual, fused, all_of_it = (
        plan(from_dict(keys | more), "RTX 4090")
        for more in ({}, {"fused_loss": loss}, {"fused_loss": loss, "liger_kernel": True})
    )
    logits = 4 * 1024 * 128256 * 4 / 2**20
    assert usual.memory.allocated_mib - fused.memory.allocated_mib > 2 * logits
    assert fused.memory.allocated_mib > all_of_it.memory.allocated_mib


def test_liger_brings_its_loss_but_not_to_trl() -> None:
    keys = {"model_type": "llama", "liger_kernel": True, "n_layer": 2}
    assert plan(from_dict(keys | {"trainer": "hf"}), "RTX 4090").config.fused_loss == "liger"
    assert plan(from_dict(keys | {"trainer": "trl"}), "RTX 4090").config.fused_loss == "trl"
