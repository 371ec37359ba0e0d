"""Tracing any module: what the op list says of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from trace_gpt import movements, traced

from oomph.config.schema import TrainConfig
from oomph.errors import InputError
from oomph.predict.memory import find_peak
from oomph.step import loop
from oomph.step.kernels import RANDOM_STATE_BYTES
from oomph.step.ops import Kernel, Kind, Phase
from oomph.step.trace.eager.program import trace


class Perceptron(nn.Module):
    """Two layers and a mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x).relu())
        return (y - x).square().mean()


def gpt2(**keys: object) -> TrainConfig:
    settled: dict[str, object] = {
        "compile": False, "dtype": "bfloat16", "return_logits": True, "loss_chunk": 0, "optimizer_loop": "fused",
        "batch_size": 16,
    }  # fmt: skip
    return TrainConfig(**{**settled, **keys})  # type: ignore[arg-type]


def test_any_module_can_be_traced() -> None:
    step = trace(Perceptron(), [torch.zeros(32, 64)], dtype="float32", cuda=False)
    names = [section.name for section in step.sections]
    assert names == [
        "micro-step 1", "micro-step 2", "micro-step 3", "optimizer",
        "evaluation, first batch", "evaluation, later batches",
    ]  # fmt: skip
    assert sum(buffer.bytes for buffer in step.resident if buffer.kind is Kind.PARAMETERS) == 4 * (2 * 64 * 256 + 320)
    products = [op.shape for op in step.sections[0].ops if op.kernel is Kernel.GEMM]
    assert products[:2] == [(1, 32, 256, 64), (1, 32, 64, 256)]


def test_operations_are_named_by_their_module_in_forward_and_backward() -> None:
    step = trace(Perceptron, [torch.zeros(32, 64)], dtype="float32")
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        products = {op.name for op in step.sections[0].ops if op.phase is phase and op.kernel is Kernel.GEMM}
        assert {name.partition(".")[0] for name in products} == {"first", "second"}


def test_a_loss_function_of_ones_own_is_taken() -> None:
    model = nn.Linear(16, 4)
    step = trace(model, [torch.zeros(8, 16)], loss=lambda result, _: result.pow(2).sum(), dtype="float32")
    assert any(op.name.endswith("pow") for op in step.sections[0].ops)


def test_inputs_may_have_names() -> None:
    step = trace(Perceptron, {"x": torch.zeros(32, 64)})
    assert any(op.kernel is Kernel.GEMM for op in step.sections[0].ops)


def test_a_function_may_build_its_model_in_half_precision() -> None:
    step = trace(lambda: nn.Linear(4, 4).bfloat16(), (torch.zeros(2, 4, dtype=torch.bfloat16),), autocast=False)
    assert sorted(b.bytes for b in step.resident if b.kind is Kind.PARAMETERS) == [2 * 4, 2 * 16]


def test_random_states_that_checkpoints_keep_are_a_cpus_to_hold() -> None:
    class Kept(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            again: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return again.square().mean()

    def states(cuda: bool) -> list[int]:
        step = trace(Kept(4, 4), (torch.ones(2, 4),), dtype="float32", cuda=cuda)
        made = [b for op in step.sections[0].ops for b in op.allocates if b.name == "random_state"]
        return [b.bytes for b in made]

    assert states(cuda=False) == [RANDOM_STATE_BYTES] * 2  # the block's, and the loop's while the block runs again
    assert states(cuda=True) == []
    assert torch.get_rng_state().nbytes == RANDOM_STATE_BYTES


def test_what_a_trace_frees_was_allocated_and_lives() -> None:
    step = trace(Perceptron, [torch.zeros(32, 64)], dtype="float16", optimizer_loop="forloop")
    live = set(step.resident)
    for op in (op for section in step.sections for op in section.ops):
        live.update(op.allocates)
        assert live.issuperset(op.frees), op.name
        live.difference_update(op.frees)


def test_an_optimizer_that_cannot_be_traced_is_named() -> None:
    with pytest.raises(InputError, match=r"adafactor.*try: adamw, sgd, muon"):
        trace(Perceptron, [torch.zeros(32, 64)], optimizer="adafactor")


def test_a_loop_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oomph.step.trace.eager.record.MOST_CALLS", 20)
    with pytest.raises(InputError, match=r"a loop over its tokens.*block_size"):
        trace(Perceptron, [torch.zeros(32, 64)])


def test_the_model_handed_in_stays_as_it_was() -> None:
    model = Perceptron()
    before = [parameter.clone() for parameter in model.parameters()]
    trace(model, [torch.zeros(32, 64)])
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_autocast_follows_the_cpu_again_after_a_trace() -> None:
    x = torch.randn(4, 8, dtype=torch.bfloat16)

    def softmax_dtype() -> torch.dtype:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.nn.functional.layer_norm(x, (8,)).dtype

    before = softmax_dtype()
    trace(Perceptron, [torch.zeros(32, 64)])
    assert softmax_dtype() is before


def test_a_recorded_real_run_is_the_fake_one() -> None:
    config = gpt2(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=512, batch_size=2, dtype="float32")
    fake, real = (traced(config, cuda=False, fake=fake) for fake in (True, False))
    for ours, theirs in zip(fake.sections, real.sections, strict=True):
        assert movements(ours, 1) == movements(theirs, 1), ours.name


def test_a_gpt2_trace_has_the_peak_of_the_arithmetic_and_its_owners() -> None:
    config = gpt2(gradient_accumulation_steps=2)
    seen, predicted = find_peak(traced(config)), find_peak(loop.build(config))
    assert seen.allocated_bytes == predicted.allocated_bytes
    theirs, ours = seen.by_kind(), predicted.by_kind()
    for kind in (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER, Kind.HALF_WEIGHTS, Kind.LOGITS):
        assert theirs[kind.value] == pytest.approx(ours[kind.value], rel=1e-3), kind
