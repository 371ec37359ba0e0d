"""Liger's fused loss, held against a model that runs the same operations: its kernel works in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from described_models import config_of, described, first_difference
from hf_models import Hf
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from oomph.config import from_dict
from oomph.planning.plan import plan
from oomph.step.tensor.libraries.liger_loss import chunk_rows

pytestmark = pytest.mark.filterwarnings("ignore")


class FusedLoss(torch.autograd.Function):
    """LigerFusedLinearCrossEntropyFunction, with operations in place for its kernels, as on a card before Ampere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        rows, width = x.shape
        words = weight.shape[0]
        size = 1 << (-(-rows // -(-words // width)) - 1).bit_length()
        grad_input = torch.zeros_like(x)
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
        loss_1d = torch.zeros(rows, dtype=torch.float32, device=x.device)
        _target_mask = target != -100
        for start in range(0, rows, size):
            chunk = x[start : start + size]
            logits = chunk @ weight.t()
            logits.mul_(2)
            grad_logits = logits
            grad_input[start : start + size] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += torch.mm(grad_logits.t(), chunk).float()
        ctx.save_for_backward(grad_input.detach(), grad_weight.detach() if grad_weight is not None else None)
        return torch.sum(loss_1d)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_input, grad_weight = ctx.saved_tensors
        _one = torch.ones((), device=grads[0].device)
        del _one
        return grad_input.mul_(2), grad_weight.mul_(2) if grad_weight is not None else None, None


class Liger(Hf):
    """A Llama whose forward ends in the fused loss, and returns no logits."""

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        made: Any = super().build(dtype)

        def forward(input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
            hidden = made.model(input_ids=input_ids, use_cache=False)[0]
            labels = nn.functional.pad(labels, (0, 1), value=-100)
            shifted = labels[..., 1:].contiguous()
            loss = FusedLoss.apply(hidden.view(-1, hidden.shape[-1]), made.lm_head.weight, shifted.view(-1))
            return CausalLMOutput(loss=loss)

        made.forward = forward
        return made  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "vocab"), [(64, 130), (50, 192), (8, 64)])
def test_the_described_loss_is_the_trace(precision: str, tokens: int, vocab: int) -> None:
    model = Liger("llama", kv_heads=2, tokens=tokens, vocab=vocab, tie=False)
    ours = described(config_of(model, precision, fused_loss="liger"), micro_steps=2)
    assert not first_difference(ours, model.traced(precision=precision, micro_steps=2))


@pytest.mark.parametrize(
    ("rows", "width", "words", "size"), [(16384, 4096, 32000, 2048), (8192, 1024, 151936, 64), (8, 64, 64, 8)]
)
def test_a_chunks_rows_are_a_power_of_two(rows: int, width: int, words: int, size: int) -> None:
    assert chunk_rows(rows, width, words) == size


def test_the_fused_loss_takes_the_logits_out_of_the_peak() -> None:
    shape = {"trainer": "hf", "model_type": "llama", "n_layer": 2, "n_head": 8, "n_embd": 512, "vocab_size": 128256}
    keys = shape | {"intermediate_size": 1376, "batch_size": 4, "block_size": 1024, "dtype": "bfloat16"}
    usual, fused = (plan(from_dict(keys | more), "RTX 4090") for more in ({}, {"fused_loss": "liger"}))
    logits = 4 * 1024 * 128256 * 4 / 2**20
    assert usual.memory.allocated_mib - fused.memory.allocated_mib > 2 * logits
