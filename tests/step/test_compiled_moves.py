"""The bytes a compiled step reads and writes: what inductor's kernels touch, and the arithmetic against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from real_compiled import config, planned
from test_compiled import Small
from test_compiled_models import Attentive

from oomph.step.compile import programs
from oomph.step.ops import Kernel, Op, Phase, Step
from oomph.step.trace.inductor.program import compiled

pytestmark = pytest.mark.filterwarnings("ignore")  # inductor warns of what this machine lacks


def ops(step: Step, phase: Phase, kernel: Kernel) -> list[Op]:
    return [op for op in step.sections[0].ops if (op.phase, op.kernel) == (phase, kernel)]


def test_a_buffer_that_a_kernel_updates_in_place_is_read_and_written() -> None:
    step = compiled(Small(), (torch.zeros(256, 32),), dtype="float32", evaluation=False)
    (activated,) = ops(step, Phase.FORWARD, Kernel.POINTWISE)
    assert not activated.allocates  # the relu of the first layer, over its product
    assert activated.bytes_moved == 2 * 4 * 256 * 128 + 4 * 128  # and the bias, read


def test_a_kernel_that_returns_several_buffers_writes_them_all() -> None:
    step = compiled(Attentive, (torch.zeros(2, 100, 128),), evaluation=False)
    for phase, tensors, numbers in ((Phase.FORWARD, 4, 1), (Phase.BACKWARD, 8, 1)):
        (attention,) = ops(step, phase, Kernel.ATTENTION)  # q, k, v and the output; with all their gradients
        sums = numbers * 4 * 2 * 4 * 100
        assert attention.bytes_moved == pytest.approx(tensors * 2 * 2 * 100 * 128 + sums, abs=64)  # a random state


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "keys", [{}, {"autocast": False}, {"dropout": 0.1, "bias": True}, {"return_logits": False}], ids=str
)
def test_by_arithmetic_a_micro_step_moves_what_inductors_kernels_move(keys: dict[str, Any]) -> None:
    shape = {"n_layer": 3, "n_head": 4, "n_embd": 256, "block_size": 256, "batch_size": 4, "vocab_size": 2048}
    settings = config(**shape, **keys)
    moved = [
        {kernel: sum(op.bytes_moved for op in step.sections[1].ops if op.kernel is kernel) for kernel in Kernel}
        for step in (programs.build(settings, evaluates=False), planned(settings, evaluation=False))
    ]
    assert sum(moved[0].values()) == pytest.approx(sum(moved[1].values()), rel=0.05)
    for kernel in (Kernel.GEMM, Kernel.ATTENTION):
        assert moved[0][kernel] == pytest.approx(moved[1][kernel], rel=0.02)
