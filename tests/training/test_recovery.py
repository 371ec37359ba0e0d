"""Out of memory at every point: the step is undone and done again in smaller pieces, with the same loss curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from training_helpers import Train, losses, weights

from oomph.training import run as run_module
from oomph.training import trainer as trainer_module
from oomph.training.errors import TrainingError, is_out_of_memory
from oomph.training.model import MLP

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
    mlp, head = MLP.forward, trainer_module.head_loss

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
        monkeypatch.setattr(trainer_module, "head_loss", in_loss if where == "loss" else in_evaluation)
    else:
        monkeypatch.setattr(MLP, "forward", in_forward if where == "forward" else in_backward)


# Two micro-steps of two blocks each: four places a step; six steps.
POINTS = [(where, at) for where in ("forward", "backward") for at in (1, 2, 3, 4, 11)]
POINTS += [("loss", 1), ("loss", 2), ("loss", 5), ("evaluation", 1), ("evaluation", 2), ("evaluation", 7)]


@pytest.mark.parametrize(("where", "at"), POINTS)
def test_the_loss_curve_stays_the_same(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, at: int
) -> None:
    run("whole", eval_interval=3)
    inject(monkeypatch, where, Fault(at))
    result = run("hurt", eval_interval=3)
    assert result.shrunk == 1 and result.batch_size == 2 and result.finished
    hurt, whole = losses(tmp_path / "hurt"), losses(tmp_path / "whole")
    assert [step for step, _ in hurt] == [step for step, _ in whole]
    assert [loss for _, loss in hurt] == pytest.approx([loss for _, loss in whole], abs=2e-6)
    mine, theirs = weights(tmp_path / "hurt"), weights(tmp_path / "whole")
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


def test_what_is_and_is_not_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


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
