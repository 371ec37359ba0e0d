"""Jobs that torchrun or Slurm start again, and signals that ask for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from training_helpers import SMALL, Train, losses

from oomph.cli import train as command
from oomph.errors import InputError
from oomph.training import checkpoint
from oomph.training import trainer as trainer_module


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of Slurm's; the file has what its scontrol was told."""
    told = tmp_path / "told"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {told}\n')
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    return told


def flags(data: Path, out: Path, **keys: object) -> list[str]:
    return [
        *(f"--{key}={value}" for key, value in (SMALL | {"dataset": data, "out_dir": out} | keys).items()),
        "--quiet",
    ]


def signalled(monkeypatch: pytest.MonkeyPatch, number: signal.Signals, at: int) -> None:
    """Send this process a signal in that step."""
    step = trainer_module.Trainer.train_step

    def send(self: trainer_module.Trainer) -> trainer_module.StepResult:
        if self.step == at:
            os.kill(os.getpid(), number)
        return step(self)

    monkeypatch.setattr(trainer_module.Trainer, "train_step", send)


@pytest.mark.parametrize(("number", "requeues"), [(signal.SIGUSR1, ["requeue 17"]), (signal.SIGTERM, [])])
def test_a_requeued_job_goes_on_by_itself(
    run: Train, data: Path, tmp_path: Path, slurm: Path, number: signal.Signals, requeues: list[str]
) -> None:
    run("whole")
    with pytest.MonkeyPatch.context() as patch:
        signalled(patch, number, 3)
        assert command.run(flags(data, tmp_path / "job", dropout=0.0)) == command.AGAIN == 75
    assert (slurm.read_text().splitlines() if slurm.exists() else []) == requeues
    assert checkpoint.step_of(checkpoint.saved(tmp_path / "job")[-1]) in (3, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_RESTART_COUNT", "1")
        assert command.run([*flags(data, tmp_path / "job", dropout=0.0), "--overwrite"]) == 0
    assert losses(tmp_path / "job") == losses(tmp_path / "whole")


def test_without_slurm_a_stop_by_sigterm_is_an_interruption(data: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SLURM_JOB_ID", raising=False)
        signalled(patch, signal.SIGTERM, 1)
        assert command.run(flags(data, tmp_path / "run")) == 130


def test_another_jobs_run_is_not_taken_up(
    run: Train, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    run("run", max_iters=2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(InputError, match="already holds a run"):
        command.run(flags(data, tmp_path / "run"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    assert run("run", max_iters=4).steps == 4
    assert [step for step, _ in losses(tmp_path / "run")] == [0, 1, 2, 3]


def test_a_job_that_had_saved_nothing_begins_anew(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    run("run", max_iters=2)
    checkpoint.remove(checkpoint.saved(tmp_path / "run"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run("run", max_iters=3).steps == 3
    assert [step for step, _ in losses(tmp_path / "run")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"parallel": "fsdp"}, "torchrun"),
        ({"parallel": "hsdp"}, "DDP or FSDP2"),
        ({"parallel": "zero1"}, "DDP or FSDP2"),
    ],
)
def test_a_way_to_share_that_cannot_be_is_refused(run: Train, keys: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        run("run", **keys)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"parallel": "none"}, "2 processes were started"),
        ({"parallel": "fsdp", "optimizer": "muon"}, "a part of a parameter"),
        ({"parallel": "fsdp", "reshard_after_forward": "3"}, "a divisor of 2"),
        ({"gradient_accumulation_steps": 3}, "not a multiple of world_size"),
        ({"backend": "nccl"}, "does not work on cpu"),
    ],
)
def test_several_processes_are_refused_before_they_meet(
    run: Train, monkeypatch: pytest.MonkeyPatch, keys: dict[str, object], said: str
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=said):
        run("run", **keys)
