"""What may go wrong around a run: full disks, closed pipes, numbers that are none, and being asked to stop."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training_helpers import Train, losses, weights

from oomph.cli import train as command
from oomph.training import checkpoint, saving
from oomph.training import model as model_module
from oomph.training import run as run_module
from oomph.training import trainer as trainer_module
from oomph.training.errors import DiskFullError, LostRankError, TrainingError
from oomph.training.log import Log, Metrics, TensorBoardTracker
from oomph.training.ranks.group import Ranks


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_RETRY_PAUSES_S", (0.0,))


def fail_to_save(monkeypatch: pytest.MonkeyPatch, when: list[str], times: int = 10**6) -> None:
    save, count = checkpoint.save, [0]

    def full(content: dict[str, object], path: Path) -> None:
        if path.stem in when and count[0] < times:
            count[0] += 1
            raise TrainingError(f"{path}: cannot be written: No space left on device.")
        save(content, path)

    monkeypatch.setattr(checkpoint, "save", full)


@contextmanager
def no_room_beyond(size: int) -> Iterator[None]:
    """Every write past that many bytes of a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_last_checkpoint_that_cannot_be_written_is_a_failure(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_save(monkeypatch, ["step_00000006"])
    with pytest.raises(TrainingError, match=r"all steps done\b.*\bstep 6\b") as error:
        run("run", eval_interval=3)
    assert "step_00000003.pt" in str(error.value)
    assert not (tmp_path / "run" / "result.json").exists()
    assert "ERROR: all steps done" in (tmp_path / "run" / "log.txt").read_text()


def test_a_last_checkpoint_is_tried_again(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_save(monkeypatch, ["step_00000006"], times=2)
    assert run("run", eval_interval=3).finished
    assert checkpoint.saved(tmp_path / "run")[-1].stem == "step_00000006"


class SmallDisk:
    """Holds so many checkpoints, best.pt included, and is full then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.save, self.room = checkpoint.save, room
        monkeypatch.setattr(checkpoint, "save", self)

    def __call__(self, content: dict[str, object], path: Path) -> None:
        run = checkpoint.run_of(path)
        held = {file.stat().st_ino for file in (*checkpoint.saved(run), run / "best.pt") if file.is_file()}
        if len(held) >= self.room:
            raise DiskFullError(f"{path}: cannot be written: No space left on device.")
        self.save(content, path)


def evaluations(monkeypatch: pytest.MonkeyPatch, losses_of: list[float]) -> None:
    """Evaluations that find these losses, one after another."""
    found = iter(loss for loss in losses_of for _ in ("train", "val"))
    monkeypatch.setattr(trainer_module.Trainer, "evaluate", lambda *_: next(found))


def test_a_disk_with_room_for_two_checkpoints_keeps_the_newest(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SmallDisk(monkeypatch, room=2)
    evaluations(monkeypatch, [4.0, 3.0, 3.5, 3.6, 3.7, 3.8, 3.9])
    assert run("run", eval_interval=1, options={"keep": 3}).finished
    assert checkpoint.saved(tmp_path / "run")[-1].stem == "step_00000006"
    assert "best.pt was deleted to make room" in (tmp_path / "run" / "log.txt").read_text()


def test_older_checkpoints_go_before_the_best(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SmallDisk(monkeypatch, room=3)
    evaluations(monkeypatch, [4.0, 3.0, 3.5, 3.6, 3.7, 3.8, 3.9])
    assert run("run", eval_interval=1, options={"keep": 3}).best_val_loss == 3.0
    assert checkpoint.load(tmp_path / "run" / "best.pt")["iter_num"] == 1


def test_a_disk_with_room_for_one_checkpoint_keeps_it(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SmallDisk(monkeypatch, room=1)
    with pytest.raises(TrainingError, match="step_00000003"):
        run("run", eval_interval=3)
    assert [path.stem for path in checkpoint.saved(tmp_path / "run")] == ["step_00000003"]


def test_a_disk_too_small_for_all_checkpoints_is_told_at_the_start(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**16))
    run("run", max_iters=1)
    assert "2 checkpoints, the best and the next take 4 ×" in (tmp_path / "run" / "log.txt").read_text()


def test_a_lost_rank_leaves_the_state_before_the_step_in_a_checkpoint(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("whole", max_iters=6)
    total = Ranks.sum

    def lost(self: Ranks, tensors: list[torch.Tensor], in_step: bool = False) -> None:
        if len(tensors) > 1 and fault.pop(0):
            raise LostRankError("rank 0 lost contact")
        total(self, tensors, in_step)

    fault = [False, False, False, True]
    with monkeypatch.context() as patch:
        patch.setattr(Ranks, "sum", lost)
        with pytest.raises(LostRankError, match="step 3 is saved"):
            run("run", max_iters=6)
    run("run", options={"resume": True}, max_iters=6)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_stop_without_a_checkpoint_does_not_claim_one(run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_save(monkeypatch, [f"step_{step:08d}" for step in range(9)])
    interrupt_at(monkeypatch, 5, signal.SIGTERM)
    with pytest.raises(TrainingError, match=r"SIGTERM\b.*\bstep 2\b"):
        run("run")


@pytest.mark.parametrize(("times", "best_step"), [(1, 6), (10, 4)])
def test_the_best_is_the_best_that_was_written(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, best_step: int
) -> None:
    fail_to_save(monkeypatch, ["step_00000006"], times)
    with nullcontext() if times == 1 else pytest.raises(TrainingError):
        assert (
            run("run", eval_interval=2).best_val_loss == checkpoint.load(tmp_path / "run" / "best.pt")["best_val_loss"]
        )
    assert checkpoint.load(tmp_path / "run" / "best.pt")["iter_num"] == best_step


def test_a_full_disk_is_warned_of_once(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_save(monkeypatch, ["step_00000006"])
    with pytest.raises(TrainingError):
        run("run", eval_interval=3)
    assert (tmp_path / "run" / "log.txt").read_text().count("WARNING") == 1


@pytest.mark.usefixtures("tensorboard")
def test_a_full_disk_under_every_file_does_not_end_the_run(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = trainer_module.Trainer.train_step
    room: list[object] = []

    def full_from_step_2(self: trainer_module.Trainer) -> trainer_module.StepResult:
        if self.step == 2:
            context = no_room_beyond(64)
            context.__enter__()
            room.append(context)
        if self.step == 5:
            room.pop().__exit__(None, None, None)  # type: ignore[attr-defined]
        return step(self)

    monkeypatch.setattr(trainer_module.Trainer, "train_step", full_from_step_2)
    assert run("run", options={"tensorboard": True, "quiet": False}, eval_interval=2).finished
    out = capsys.readouterr().out
    for name in ("metrics.jsonl", "log.txt", "TensorBoardTracker", "step_00000004.pt"):
        assert f"{name} cannot be written" in out or f"{name}: cannot be written" in out, name
    assert [step for step, _ in losses(tmp_path / "run")] == [0, 1, 2, 3, 4, 5]  # lines waited for room
    assert checkpoint.load(checkpoint.saved(tmp_path / "run")[-1])["iter_num"] == 6


@pytest.mark.usefixtures("tensorboard")
def test_metrics_stay_whole_lines_on_a_full_disk(tmp_path: Path) -> None:
    told: list[str] = []
    metrics = Metrics(tmp_path, [TensorBoardTracker(tmp_path / "board")], warn=told.append)
    metrics.write(0, loss=1.0)
    with no_room_beyond(30):
        metrics.write(1, loss=1.0)
        metrics.write(2, loss=1.0)
        assert (tmp_path / "metrics.jsonl").read_text() == '{"step":0,"loss":1.0}\n'
    metrics.write(3, loss=1.0)
    metrics.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]
    assert len(told) == 2 and all("the run goes on" in line for line in told)


def test_a_failure_to_write_best_pt_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint.path_of(tmp_path, 1)
    checkpoint.save({"model": {}, "iter_num": 1}, path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(TrainingError, match="No space left"):
        checkpoint.mark_best(tmp_path, path)
    assert not (tmp_path / "best.pt").exists() and not list(tmp_path.glob(".best*"))


def test_an_evaluation_that_is_not_finite_stops_before_it_is_saved(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("good", max_iters=2, eval_interval=2)
    step = trainer_module.Trainer.train_step

    def poison(self: trainer_module.Trainer) -> trainer_module.StepResult:
        result = step(self)
        if self.step == 4:
            with torch.no_grad():
                self.parameters[0][0, 0] = float("nan")
        return result

    monkeypatch.setattr(trainer_module.Trainer, "train_step", poison)
    with pytest.raises(TrainingError, match=r"step 4: .*\bnan\b") as error:
        run("bad", eval_interval=2)
    assert "step_00000002.pt" in str(error.value)
    good, kept = weights(tmp_path / "good"), weights(tmp_path / "bad")
    assert all(torch.equal(good[name], kept[name]) for name in good)


def test_weights_that_are_not_finite_are_never_saved(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = trainer_module.Trainer.train_step

    def poison(self: trainer_module.Trainer) -> trainer_module.StepResult:
        result = step(self)
        with torch.no_grad():
            self.parameters[0][0, 0] = float("inf")
        os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(trainer_module.Trainer, "train_step", poison)
    with pytest.raises(TrainingError, match="step 1: "):
        run("run")
    assert checkpoint.saved(tmp_path / "run") == []


def interrupt_at(monkeypatch: pytest.MonkeyPatch, batch: int, number: int, grad: bool = True) -> None:
    """Send the signal from inside the loss of that batch, in training or in evaluation."""
    head, count = model_module.head_loss, [0]

    def signalling(*arguments: object) -> torch.Tensor:
        if torch.is_grad_enabled() == grad:
            count[0] += 1
            if count[0] == batch:
                os.kill(os.getpid(), number)
        return head(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(model_module, "head_loss", signalling)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(("batch", "grad"), [(7, True), (5, False)])
def test_a_stop_in_the_middle_is_undone_and_resumes_to_the_last_bit(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, batch: int, grad: bool
) -> None:
    keys = {"dropout": 0.2, "eval_interval": 3, "gradient_accumulation_steps": 4}
    run("whole", **keys)
    with monkeypatch.context() as patched:
        interrupt_at(patched, batch, number, grad)
        result = run("parts", **keys)
    assert result.interrupted and result.steps == (1 if grad else 3)
    last = json.loads((tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()[-1])
    assert "loss" in last and last["step"] == result.steps - 1  # nothing of what was broken off
    run("parts", options={"resume": True}, **keys)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_nohup_keeps_its_word() -> None:
    from oomph.training.loop import StopSignal

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.by is None
    finally:
        signal.signal(signal.SIGHUP, before)


class Gone(io.StringIO):
    """A pipe whose reader has left."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def test_a_reader_who_has_gone_costs_nothing_but_his_lines(tmp_path: Path) -> None:
    log = Log(tmp_path, Gone())
    log.line("one")
    log.step("two")
    log.close()
    assert (tmp_path / "log.txt").read_text() == "one\ntwo\n"


def test_without_always_save_checkpoint_only_a_better_evaluation_saves(run: Train, tmp_path: Path) -> None:
    keys = {"learning_rate": 0.0, "min_lr": 0.0, "eval_interval": 1, "max_iters": 4}  # no evaluation is better
    run("always", options={"keep": 9}, **keys)
    run("better", options={"keep": 9}, always_save_checkpoint=False, **keys)
    steps = {name: [checkpoint.step_of(p) for p in checkpoint.saved(tmp_path / name)] for name in ("always", "better")}
    assert steps == {"always": [1, 2, 3, 4], "better": [1, 4]}  # the first one, and the end


def test_an_evaluation_alone_says_its_loss(run: Train, tmp_path: Path) -> None:
    result = run("run", eval_only=True)
    assert result.val_loss is not None and result.best_val_loss is None
    assert "validation loss" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize("keys", [{}, {"optimizer_loop": "foreach"}], ids=str)
def test_pure_bfloat16_is_clipped_too(run: Train, tmp_path: Path, keys: dict[str, object]) -> None:
    run("run", dtype="bfloat16", autocast=False, grad_clip=0.01, **keys)
    assert len(losses(tmp_path / "run")) == 6


def test_the_command_refuses_a_fraction_of_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    from oomph.cli.main import main

    assert main(["train", "--keep", "1.5"]) == 2
    assert "whole number" in capsys.readouterr().err
    assert command.whole("3") == 3
