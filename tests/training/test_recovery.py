"""Out of memory at every point: the step is undone and done again in smaller pieces, with the same loss curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from training_helpers import Train, losses, trainer_of, weights, write_data

from oomph.training import checkpoint
from oomph.training import model as model_module
from oomph.training import run as run_module
from oomph.training.errors import TrainingError, is_out_of_memory
from oomph.training.model import MLP
from oomph.training.trainer import restore_random_state

OOM = "CUDA out of memory. Tried to allocate 20.00 MiB. (injected)"


class Fault:
    """Raises once, at the n-th time it is asked."""

    def __init__(self, at: int, times: int = 1) -> None:
        self.at, self.times, self.count = at, times, 0

    def ask(self) -> None:
        self.count += 1
        if self.at <= self.count < self.at + self.times:
            raise torch.OutOfMemoryError(OOM)


class FaultyBackward(torch.autograd.Function):
    """Passes everything on, and asks for the fault on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: Fault) -> torch.Tensor:
        ctx.fault = fault
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.fault.ask()
        return gradients[0], None


def inject(monkeypatch: pytest.MonkeyPatch, where: str, fault: Fault) -> None:
    """Put the fault into the second half of each block (twice a forward), or into the head and loss (once)."""
    mlp, head = MLP.forward, model_module.head_loss

    def in_forward(self: MLP, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            fault.ask()
        return mlp(self, x)

    def in_backward(self: MLP, x: torch.Tensor) -> torch.Tensor:
        return mlp(self, FaultyBackward.apply(x, fault))

    def in_loss(*arguments: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            fault.ask()
        return head(*arguments)

    def in_evaluation(*arguments: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            fault.ask()
        return head(*arguments)

    monkeypatch.setattr(run_module, "_warm_up", lambda _: None)  # its tiny model is not the one to fail
    if where in ("loss", "evaluation"):
        monkeypatch.setattr(model_module, "head_loss", in_loss if where == "loss" else in_evaluation)
    else:
        monkeypatch.setattr(MLP, "forward", in_forward if where == "forward" else in_backward)


# Two micro-steps of two blocks each: four places a step; six steps.
POINTS = [(where, at) for where in ("forward", "backward") for at in (1, 2, 3, 4, 11)]
POINTS += [("loss", 1), ("loss", 2), ("loss", 5), ("evaluation", 1), ("evaluation", 2), ("evaluation", 7)]


# Muon's bfloat16 would show how gradients were added up.
RECIPES: dict[str, dict[str, str]] = {"nanogpt": {}, "modern": {"recipe": "modern", "optimizer": "adamw"}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Any], dict[str, torch.Tensor]]]:
    """Losses and weights of the run that no fault hurts, of each recipe."""
    folder = tmp_path_factory.mktemp("whole")
    train = trainer_of(write_data(folder / "tokens"), folder)
    for name, keys in RECIPES.items():
        train(name, eval_interval=3, **keys)
    return {name: (losses(folder / name), weights(folder / name)) for name in RECIPES}


MODERN_POINTS = [("forward", 2), ("backward", 3), ("loss", 2), ("evaluation", 2)]
CASES = [(*point, "nanogpt") for point in POINTS] + [(*point, "modern") for point in MODERN_POINTS]


@pytest.mark.parametrize(("where", "at", "recipe"), CASES)
def test_the_loss_curve_stays_the_same(
    run: Train, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, at: int, recipe: str
) -> None:
    undisturbed, theirs = whole[recipe]
    inject(monkeypatch, where, Fault(at))
    result = run("hurt", eval_interval=3, **RECIPES[recipe])
    assert result.shrunk == 1 and result.batch_size == 2 and result.finished
    hurt, mine = losses(tmp_path / "hurt"), weights(tmp_path / "hurt")
    assert [step for step, _ in hurt] == [step for step, _ in undisturbed]
    assert [loss for _, loss in hurt] == pytest.approx([loss for _, loss in undisturbed], abs=2e-6)
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-3, atol=1e-4)


def test_the_event_is_logged_with_the_new_sizes(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "backward", Fault(9))
    run("run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (event,) = [line for line in lines if "event" in line]
    assert event["event"] == "out of memory" and event["step"] == 2 and event["during"] == "training"
    assert (event["batch_size"], event["gradient_accumulation_steps"]) == (2, 4)
    assert OOM in event["reason"]


def test_an_odd_batch_shrinks_by_its_smallest_divisor(run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "forward", Fault(1))
    assert run("run", batch_size=9).batch_size == 3


def test_it_shrinks_again_and_again_until_it_fits(run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "forward", Fault(1, times=2))
    result = run("run")
    assert result.batch_size == 1 and result.shrunk == 2 and result.finished


def test_a_single_sequence_that_does_not_fit_ends_the_run_with_advice(
    run: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, "forward", Fault(1, times=99))
    with pytest.raises(TrainingError, match="out of memory") as error:
        run("run")
    assert "checkpoint_layers" in str(error.value)


def test_a_shrunk_run_resumes_shrunk(run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        inject(patch, "forward", Fault(1))
        run("run", max_iters=3)
    assert run("run", options={"resume": True}, max_iters=5).batch_size == 2


def test_what_is_out_of_memory_by_its_class() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("CUDA out of memory"))


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "HIP out of memory. Tried to allocate 2.00 GiB",
        "MPS backend out of memory (MPS allocated: 5.05 GB, other allocations: 2.28 GB, max allowed: 6.77 GB)",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "Triton Error [CUDA]: out of memory",
        "NCCL error: Cuda failure 2 'out of memory'",
        "could not create a primitive",
        "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes",
    ],
)
def test_wordings_of_out_of_memory(message: str) -> None:
    assert is_out_of_memory(RuntimeError(message))


@pytest.mark.parametrize(
    "message",
    [
        "shapes do not match",
        "could not create a primitive descriptor for a matmul primitive",
        "out of resource: shared memory, Required: 147456, Hardware limit: 101376",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED",
    ],
)
def test_other_errors_are_not_out_of_memory(message: str) -> None:
    assert not is_out_of_memory(RuntimeError(message))


def test_out_of_memory_in_an_unfused_optimizer_step_ends_with_the_last_good_checkpoint(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = torch.optim.SGD.step

    def starved(self: torch.optim.SGD, closure: None = None) -> None:
        step(self, closure)
        if self.param_groups[0]["lr"]:  # not the step that allocates the state
            fault.ask()

    fault = Fault(4)  # after the warm-up, which steps a tiny model, and two steps
    monkeypatch.setattr(torch.optim.SGD, "step", starved)
    with pytest.raises(TrainingError, match=r"step 2: out of memory in the optimizer's step.*step_00000002\.pt"):
        run("run", optimizer="sgd", eval_interval=2)
    assert [path.stem for path in checkpoint.saved(tmp_path / "run")] == ["step_00000002"]


def test_undo_restores_the_random_state_of_the_runs_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[tuple[torch.Tensor, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.append((state, device)))
    state = {"cpu": torch.get_rng_state(), "cuda": torch.zeros(16, dtype=torch.uint8)}
    restore_random_state(state, torch.device("cuda:1"))
    assert [device for _, device in restored] == [torch.device("cuda:1")]


def test_torchs_own_words_for_a_full_host_are_known() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(error.value)


def test_an_error_that_is_not_about_memory_is_not_swallowed(run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(MLP, "forward", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        run("run")


def test_out_of_memory_outside_a_step_is_reported(run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(run_module, "_warm_up", starved)
    with pytest.raises(TrainingError, match="MemoryError"):
        run("run")
