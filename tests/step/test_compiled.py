"""Inductor's own plan, read without a card: against the arithmetic, and against what a compiled step allocates here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from real_compiled import config, measured_rise, peaks, planned
from torch import Tensor, nn

from oomph.step.ops import Kernel, Kind
from oomph.step.trace.inductor.program import compiled

pytestmark = pytest.mark.filterwarnings("ignore")  # inductor warns of what this machine lacks


class Small(nn.Module):
    """Not a GPT: two linear layers and a mean, which returns its loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 128), nn.Linear(128, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


def test_any_module_can_be_planned() -> None:
    step = compiled(Small(), (torch.zeros(256, 32),), dtype="float32")
    assert {b.name: b.bytes for b in step.resident if b.kind is Kind.PARAMETERS} == {
        "first.weight": 4 * 32 * 128,
        "first.bias": 4 * 128,
        "second.weight": 4 * 128 * 8,
        "second.bias": 4 * 8,
    }
    products = [op.shape for op in step.sections[0].ops if op.kernel is Kernel.GEMM]
    assert (1, 256, 128, 32) in products  # (batch, m, n, k) of the first layer
    assert (1, 128, 32, 256) in products  # of its weight's gradient


SHAPES = [
    {"n_layer": 1, "n_embd": 32, "vocab_size": 256},
    {"n_layer": 2, "n_embd": 64, "vocab_size": 1000, "bias": True},
    {"n_layer": 2, "n_embd": 96, "n_head": 3, "vocab_size": 4096, "block_size": 128},
    {"n_layer": 3, "n_embd": 64, "vocab_size": 300, "batch_size": 2},
    {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 8192, "block_size": 128},
    {"n_layer": 1, "n_embd": 48, "n_head": 3, "vocab_size": 65, "block_size": 256},
    {"n_layer": 4, "n_embd": 32, "vocab_size": 777, "batch_size": 1},
    {"n_layer": 2, "n_embd": 64, "vocab_size": 5001, "tie_weights": False},
    {"n_layer": 1, "n_embd": 192, "n_head": 6, "vocab_size": 2048, "block_size": 32, "batch_size": 8},
    {"n_layer": 2, "n_embd": 80, "n_head": 5, "vocab_size": 1024, "block_size": 96, "batch_size": 3, "bias": True},
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_plan_is_within_three_percent_of_a_real_compiled_step(shape: dict[str, Any], returns: bool) -> None:
    settings = config(dtype="float32", return_logits=returns, optimizer_loop="forloop", **shape)
    step = planned(settings, cuda=False, first=True)
    weights = sum(buffer.bytes for buffer in step.resident if buffer.kind is Kind.PARAMETERS)
    predicted = max(size for name, size in peaks(step, 1).items() if name.startswith("micro")) - weights
    assert predicted == pytest.approx(measured_rise(settings), rel=0.03)
