"""Models that are no GPT: convolutions, recurrence, buffers that forward updates, attention without a mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oomph.checking.child import peak_allocated_bytes
from oomph.predict.memory import find_peak
from oomph.step.kernels import cpu_lstm_workspace_bytes
from oomph.step.ops import Kernel, Kind, Op, Phase, Step
from oomph.step.trace.eager.program import trace
from oomph.step.trace.flops import uncounted
from oomph.step.trace.inductor.program import compiled

pytestmark = pytest.mark.filterwarnings("ignore")  # inductor warns of what this machine lacks
IMAGES = (torch.zeros(4, 3, 16, 16), torch.zeros(4, dtype=torch.long))


class Convolved(nn.Module):
    """Two convolutions, the second one possibly in groups, and a transposed one."""

    def __init__(self, normed: bool = False, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if normed else nn.Identity()
        self.grouped = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=groups)
        self.back = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(self.grouped(F.relu(self.norm(self.first(x)))))
        return F.cross_entropy(self.head(self.back(h).mean((2, 3))), y)


def flops(step: Step, phase: Phase) -> int:
    return sum(op.flops for op in step.sections[0].ops if op.phase is phase)


@pytest.mark.parametrize("make", [trace, compiled])
def test_convolutions_are_counted_as_torchs_own_counter_counts_them(make: object) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = Convolved()
    with FlopCounterMode(display=False) as counter:
        loss = model(*IMAGES)
    forward = counter.get_total_flops()
    with counter:
        loss.backward()
    step = make(model, IMAGES, dtype="float32")  # type: ignore[operator]
    assert flops(step, Phase.FORWARD) == forward
    assert flops(step, Phase.BACKWARD) == counter.get_total_flops()


def test_a_convolution_in_groups_reads_only_its_own_channels() -> None:
    whole, grouped = (trace(Convolved(groups=groups), IMAGES, dtype="float32") for groups in (1, 4))
    product = 2 * 4 * 16 * 8 * 8 * (8 * 9)  # at 8 × 8 positions of 4 images, 16 channels from 8
    assert flops(whole, Phase.FORWARD) - flops(grouped, Phase.FORWARD) == product * 3 // 4
    assert flops(whole, Phase.BACKWARD) - flops(grouped, Phase.BACKWARD) == 2 * product * 3 // 4


def net_bytes(ops: tuple[Op, ...]) -> int:
    return sum(b.bytes for op in ops for b in op.allocates) - sum(b.bytes for op in ops for b in op.frees)


@pytest.mark.parametrize("cuda", [True, False])
def test_a_buffer_that_forward_updates_is_no_output(cuda: bool) -> None:
    step = compiled(Convolved(normed=True), IMAGES, cuda=cuda, dtype="float32")
    assert net_bytes(step.sections[1].ops) == 0  # a second micro-step ends as full as it began
    assert [b.bytes for b in step.resident if b.name == "loss.scaled"] == [4]
    images = [b for op in step.sections[1].ops for b in op.allocates if b.bytes >= 4 * 4 * 8 * 16 * 16]
    assert images and not any(b.kind is Kind.LOGITS for b in images)


class Remembering(nn.Module):
    def __init__(self, inputs: int = 6, hidden: int = 5) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0]
        return out.square().mean()


def test_an_lstm_costs_a_product_for_each_gate_and_step() -> None:
    step = trace(Remembering(), (torch.zeros(3, 7, 6),), dtype="float32")
    assert flops(step, Phase.FORWARD) == 2 * 3 * 7 * 4 * 5 * (6 + 5)
    assert flops(step, Phase.BACKWARD) == 2 * flops(step, Phase.FORWARD)


@pytest.mark.parametrize("shape", [(3, 7, 6, 5), (4, 64, 64, 64), (3, 50, 48, 40), (2, 9, 200, 64)])
def test_what_onednn_keeps_of_an_lstm_is_what_it_is_planned_to(shape: tuple[int, int, int, int]) -> None:
    rows, steps, inputs, hidden = shape
    lstm = nn.LSTM(inputs, hidden, batch_first=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        lstm(torch.zeros(rows, steps, inputs))
    assert cpu_lstm_workspace_bytes(steps, rows, inputs, hidden) in kept


def test_a_cpu_trace_of_an_lstm_is_as_high_as_what_the_profiler_sees() -> None:
    def real() -> None:
        model, batch = Remembering(96, 128), torch.zeros(8, 64, 96)
        for _ in range(2):
            model(batch).backward()

    inputs = (torch.zeros(8, 64, 96),)
    step = trace(Remembering(96, 128), inputs, dtype="float32", cuda=False, accumulation=2, first=True)
    training = Step(step.resident, step.sections[2:4])
    assert find_peak(training, rounding_bytes=1).allocated_bytes == pytest.approx(peak_allocated_bytes(real), rel=0.02)


class Across(nn.Module):
    """Every token looks at every key, of which there are others."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in (self.query(x), self.key(y)))
        return F.scaled_dot_product_attention(q, k, k).square().mean()


@pytest.mark.parametrize("make", [trace, compiled])
def test_attention_without_a_mask_computes_every_score(make: object) -> None:
    step = make(Across(), (torch.zeros(2, 24, 32), torch.zeros(2, 40, 32)))  # type: ignore[operator]
    counted = [op.flops for op in step.sections[0].ops if op.kernel is Kernel.ATTENTION]
    assert counted == [4 * 2 * 4 * 24 * 40 * 8, 10 * 2 * 4 * 24 * 40 * 8]


def test_an_operator_without_a_formula_is_named() -> None:
    ops = [Op("far._cdist_forward", Phase.FORWARD), Op("far.mm", Phase.FORWARD), Op("linalg_qr", Phase.FORWARD)]
    assert uncounted(ops) == ["cdist_forward", "linalg_qr"]
