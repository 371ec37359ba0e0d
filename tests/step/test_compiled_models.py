"""A compiled trace of any module: its attention kernel, its optimizer, its checkpointed blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_compiled import config, measured_rise, peaks, planned
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from oomph.config.schema import TrainConfig
from oomph.step.ops import Kernel, Kind, Phase, Step
from oomph.step.trace.eager.program import trace
from oomph.step.trace.inductor.capture import capture
from oomph.step.trace.inductor.program import compiled

pytestmark = pytest.mark.filterwarnings("ignore")  # inductor warns of what this machine lacks


class Numbered(nn.Module):
    """Two blocks of one matrix each behind an embedding: Muon's parameters and others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for block in self.blocks:
            y = y + block(y).relu()
        return y.square().mean()


def test_muon_takes_the_same_matrices_compiled_and_eager() -> None:
    batch = torch.zeros(8, 16, dtype=torch.long)
    steps: list[Step] = [
        compiled(Numbered, (batch,), optimizer="muon", evaluation=False),
        trace(Numbered, (batch,), optimizer="muon"),
    ]
    states = [sorted(b.bytes for b in step.resident if b.kind is Kind.OPTIMIZER and b.bytes > 4) for step in steps]
    assert states[0] == states[1] == [4 * 16 * 16] * 2 + [4 * 64 * 16] * 2  # a momentum each; two moments


class Attentive(nn.Module):
    """One attention over four heads of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(128, 384)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 32)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


@pytest.mark.parametrize("asked", ["flash", "efficient", "math"])
def test_the_attention_asked_for_is_the_one_that_runs(asked: str) -> None:
    step = compiled(Attentive, (torch.zeros(2, 100, 128),), attention=asked, evaluation=False)
    ops = step.sections[0].ops
    made = [buffer.bytes for op in ops if op.phase is Phase.FORWARD for buffer in op.allocates]
    fused = [op for op in ops if op.kernel is Kernel.ATTENTION]
    assert len(fused) == (0 if asked == "math" else 2)  # forward and backward
    assert (4 * 2 * 4 * 128 in made) == (asked == "efficient")  # 100 rows of logsumexp, padded to 128
    assert any(op.shape == (8, 100, 100, 32) for op in ops) == (asked == "math")  # the scores as a plain product


class Wide(nn.Module):
    """A deep function that can be computed again."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.up, self.down, self.reentrant = nn.Linear(64, 1024), nn.Linear(1024, 64), reentrant

    def inner(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return x.square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_function_saves_memory_and_is_computed_again(reentrant: bool) -> None:
    def facts(model: Wide) -> tuple[int, int]:
        step = compiled(model, (torch.zeros(512, 64, requires_grad=reentrant),), dtype="float32", evaluation=False)
        products = [op for op in step.sections[0].ops if op.phase is Phase.BACKWARD and op.kernel is Kernel.GEMM]
        kept = sum(b.bytes for op in step.sections[0].ops if op.phase is Phase.FORWARD for b in op.allocates)
        freed = sum(b.bytes for op in step.sections[0].ops if op.phase is Phase.FORWARD for b in op.frees)
        return len(products), kept - freed

    (products, kept), (more_products, less_kept) = facts(Wide(None)), facts(Wide(reentrant))
    assert more_products > products
    assert less_kept < kept - 4 * 512 * 1024  # at least one layer's wide activation


def checkpointed_rise(settings: TrainConfig) -> int:
    step = planned(settings, cuda=False, first=True)
    weights = sum(buffer.bytes for buffer in step.resident if buffer.kind is Kind.PARAMETERS)
    return max(size for name, size in peaks(step, 1).items() if name.startswith("micro")) - weights


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("returns", [True, False])
def test_checkpointed_blocks_are_within_three_percent_of_a_real_compiled_step(layers: int, returns: bool) -> None:
    keys: dict[str, Any] = {"dtype": "float32", "optimizer_loop": "forloop", "n_layer": 4}
    settings = config(checkpoint_layers=layers, return_logits=returns, **keys)
    assert checkpointed_rise(settings) == pytest.approx(measured_rise(settings), rel=0.03)


class Normed(nn.Module):
    """A matrix behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x @ self.weight, (16,)).sum()


@pytest.mark.parametrize("cuda", [True, False])
def test_a_cards_rms_norm_has_a_backward_of_its_own(cuda: bool) -> None:
    found: dict[str, set[str]] = {}

    def keep(name: str, graph: GraphModule, _: Any) -> None:
        found[name] = {str(node.target) for node in graph.graph.nodes}

    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_mode:
        model, batch = Normed(), [torch.zeros(4, 16)]
        capture(model, batch, lambda out: (out,), keep, half=None, cuda=cuda, attention="flash", fake_mode=fake_mode)
    cubes = "aten.pow.Tensor_Scalar"  # of rsqrt's backward, where the parts are differentiated one by one
    assert (cubes in found["backward"]) is not cuda
