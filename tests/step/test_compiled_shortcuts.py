"""What is left out or remembered while inductor plans changes nothing: its own way is the oracle."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from real_compiled import config
from torch import Tensor, nn
from torch.nn import functional as F
from trace_gpt import Gpt

from oomph.step.ops import Buffer, Step
from oomph.step.trace.inductor import capture as compiled_capture
from oomph.step.trace.inductor import plan as compiled_inductor
from oomph.step.trace.inductor.program import compiled

pytestmark = pytest.mark.filterwarnings("ignore")  # inductor warns of what this machine lacks


class Image(nn.Module):
    """A convolution whose norm updates its running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.convolve(x)).relu().mean((2, 3))), y)


def facts(step: Step) -> list[tuple[Any, ...]]:
    """Everything a list says, its buffers by the order in which they come."""
    seen: dict[Buffer, int] = {}

    def known(buffers: tuple[Buffer, ...]) -> list[tuple[Any, ...]]:
        return [(seen.setdefault(b, len(seen)), b.name, b.bytes, b.kind, b.block) for b in buffers]

    found: list[tuple[Any, ...]] = [*known(step.resident)]
    for section in step.sections:
        for op in section.ops:
            costs = (op.kernel, op.shape, op.dtype, op.flops, op.bytes_moved)
            found.append((section.name, op.name, op.phase, *costs, known(op.allocates), known(op.frees)))
    return found


def gpt(**keys: Any) -> Step:
    tokens = torch.zeros(4, 64, dtype=torch.long)
    return compiled(lambda: Gpt(config(n_layer=1, **keys)), (tokens, tokens.clone()), evaluation=False)


def image() -> Step:
    batch = (torch.zeros(4, 3, 16, 16), torch.zeros(4, dtype=torch.long))
    return compiled(Image, batch, dtype="float32", cuda=False, evaluation=False)


@pytest.mark.parametrize(
    "of", [pytest.param(lambda: gpt(dropout=0.1), marks=pytest.mark.slow), image], ids=["gpt", "image"]
)
def test_with_and_without_the_shortcuts_the_list_is_the_same(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = facts(of())
    for room, name in (
        (compiled_capture, "leaving_out_text"),
        (compiled_inductor, "doing_once"),
        (compiled_inductor, "describing_kernels"),
    ):
        monkeypatch.setattr(room, name, contextlib.nullcontext)
    assert facts(of()) == quick
