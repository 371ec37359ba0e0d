"""A whole run: its folder, its refusals, its precision, its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from training_helpers import SMALL, Train, losses, weights

from oomph import config as configs
from oomph.cli import train as command
from oomph.cli.main import main
from oomph.training import model as model_module
from oomph.training.errors import DoesNotFitError, TrainingError
from oomph.training.ranks import sharing
from oomph.training.run import Options, train
from refusals import refused


def arguments(data: Path, out: Path, **keys: object) -> list[str]:
    fields = SMALL | {"dataset": data, "out_dir": out} | keys
    return [f"--{key}={value}" for key, value in fields.items()]


def test_the_folder_holds_what_the_design_says(run: Train, tmp_path: Path) -> None:
    run("run", eval_interval=3)
    folder = tmp_path / "run"
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.toml", "plan.json", "metrics.jsonl", "log.txt", "result.json", "checkpoints", "best.pt"}
    assert configs.load([folder / "config.toml"]).config.n_embd == SMALL["n_embd"]
    assert {"config", "device", "model", "memory", "compute", "data"} <= json.loads(
        (folder / "plan.json").read_text()
    ).keys()
    result = json.loads((folder / "result.json").read_text())
    for name in ("memory_mib", "reserved_mib", "step_ms"):
        assert result[name].keys() == {"predicted", "actual", "error"}
    assert result["steps"] == 6 and result["finished"]


def test_each_logged_step_has_its_figures(run: Train, tmp_path: Path) -> None:
    run("run", log_interval=2)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [0, 2, 4]
    assert {"tokens", "loss", "lr", "grad_norm", "step_ms", "tokens_per_s", "memory_mib"} <= steps[0].keys()
    assert steps[0]["tokens"] == 4 * 2 * 16


def test_exactly_max_iters_steps_are_done(run: Train, tmp_path: Path) -> None:
    assert run("run", max_iters=5).steps == 5
    assert [step for step, _ in losses(tmp_path / "run")] == [0, 1, 2, 3, 4]


def test_a_folder_with_a_run_is_not_written_over_unasked(run: Train) -> None:
    run("run")
    with refused("out_dir", allowed="--resume"):
        run("run")
    assert run("run", options={"overwrite": True}).finished


def test_a_device_that_is_not_there_is_refused_at_once(run: Train) -> None:
    with refused(allowed="cpu"):
        run("run", device="cuda:63")


def test_an_unset_device_is_chosen_with_its_reason(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    keys = {key: value for key, value in SMALL.items() if key != "device"}
    train(keys | {"dataset": str(data), "out_dir": str(tmp_path / "run"), "max_iters": 1}, measure=False)
    out = capsys.readouterr().out
    assert "device = cpu: torch sees no GPU here" in out
    assert "compile = False: torch.compile does not pay on a CPU" in out


def test_what_does_not_fit_is_refused_unless_forced(run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    from msgspec.structs import replace

    from oomph.training import setup as setup_module

    detect = setup_module.detect
    monkeypatch.setattr(setup_module, "detect", lambda *a: replace(detect(*a), usable_mib=0))
    with pytest.raises(DoesNotFitError, match="--force"):
        run("run")
    assert run("run", options={"force": True}).finished


def test_tokens_beyond_the_vocabulary_are_refused(run: Train) -> None:
    with refused("train.bin", found="vocab_size = ", allowed="--vocab_size=64"):
        run("run", vocab_size=40)


@pytest.mark.parametrize(
    "keys", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"dtype": "bfloat16", "autocast": False}]
)
def test_half_precision_learns_too(run: Train, tmp_path: Path, keys: dict[str, object]) -> None:
    run("run", max_iters=20, **keys)
    found = [loss for _, loss in losses(tmp_path / "run")]
    assert found[-1] < found[0] - 0.4


def test_pure_bfloat16_keeps_no_float32_weights(run: Train, tmp_path: Path) -> None:
    run("run", dtype="bfloat16", autocast=False, max_iters=2)
    assert {value.dtype for value in weights(tmp_path / "run").values()} == {torch.bfloat16}


def poison(monkeypatch: pytest.MonkeyPatch, at: int, value: float) -> None:
    """Make the loss of the at-th training batch what it should never be."""
    head, count = model_module.head_loss, [0]

    def poisoned(*arguments: object) -> torch.Tensor:
        loss = head(*arguments)  # type: ignore[arg-type]
        if not torch.is_grad_enabled():
            return loss
        count[0] += 1
        return loss * value if count[0] == at else loss

    monkeypatch.setattr(model_module, "head_loss", poisoned)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_before_the_step(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    run("good", max_iters=4, eval_interval=2)
    poison(monkeypatch, 2 * 4 + 1, value)  # two micro-steps a step
    with pytest.raises(TrainingError, match="step 4: ") as error:
        run("bad", eval_interval=2)
    last = tmp_path / "bad" / "checkpoints" / "step_00000004.pt"
    assert f"The last good checkpoint is {last}." in str(error.value)
    good, kept = weights(tmp_path / "good"), weights(tmp_path / "bad")
    assert all(torch.equal(good[name], kept[name]) for name in good)


def test_a_float16_overflow_is_skipped_and_the_run_goes_on(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = sharing.get_total_norm
    asked = [0]

    def overflow(gradients: list[torch.Tensor]) -> torch.Tensor:
        asked[0] += 1
        return torch.tensor(float("inf")) if asked[0] == 2 else clean(gradients)

    monkeypatch.setattr(sharing, "get_total_norm", overflow)
    assert run("run", dtype="float16").finished
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("event") == "scale lowered"] == [2]


def test_float16_gradients_that_no_scale_helps_end_the_run(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, count = model_module.head_loss, [0]

    def sour(*arguments: object) -> torch.Tensor:
        loss = head(*arguments)  # type: ignore[arg-type]
        if loss.requires_grad:
            count[0] += 1
            if count[0] > 2 * 4:  # two micro-steps a step
                loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss

    monkeypatch.setattr(model_module, "head_loss", sour)
    with pytest.raises(TrainingError, match=r"step 23: .*\b20 steps") as error:
        run("bad", dtype="float16", max_iters=100, eval_interval=3)
    assert "The last good checkpoint is" in str(error.value)
    log = (tmp_path / "bad" / "log.txt").read_text()
    assert "the loss scale is now 32768" in log


def test_a_missing_compiler_is_reported_with_its_cure(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def failing(*_: object) -> torch.Tensor:
        raise InvalidCxxCompiler

    monkeypatch.setattr(model_module, "head_loss", failing)
    with pytest.raises(TrainingError, match=r"torch\.compile failed: .*--compile=False"):
        run("run")
    assert "ERROR: torch.compile failed" in (tmp_path / "run" / "log.txt").read_text()


def test_a_fault_of_ours_leaves_its_trace_in_the_log(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> torch.Tensor:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(model_module, "head_loss", failing)
    with pytest.raises(ZeroDivisionError):
        run("run")
    assert "ERROR: by nothing" in (tmp_path / "run" / "log.txt").read_text()


def test_a_mistake_that_all_ranks_find_is_told_by_a_machines_first(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    fsdp = {"parallel": "fsdp"}
    for wrong in (fsdp | {"optimizer": "muon"}, fsdp | {"cpu_offload": "all"}, {"n_layer": "two"}):
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            monkeypatch.setenv("LOCAL_RANK", rank)
            assert main(["train", *arguments(data, tmp_path / "run", **wrong)]) != 0
            assert ("ERROR" in capsys.readouterr().err) == (rank == "0")


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"RANK": "3", "WORLD_SIZE": "1"}, "RANK=3 WORLD_SIZE=1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK="),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "RANK="),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK="),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_PORT=1"),
    ],
    ids=str,
)
def test_an_environment_that_is_not_torchruns_is_refused(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, str], found: str
) -> None:
    from oomph.training.ranks.group import ranks_from_environment

    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with refused("environment", found=found):
        ranks_from_environment()


def test_a_full_disk_does_not_end_the_run(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from oomph.training import checkpoint

    save = checkpoint.save

    def full(content: dict[str, object], path: Path) -> None:
        if path.name == "step_00000004.pt":
            raise TrainingError(f"{path}: cannot be written: No space left on device.")
        save(content, path)

    monkeypatch.setattr(checkpoint, "save", full)
    assert run("run", options={"quiet": False}, eval_interval=2).finished
    out = capsys.readouterr().out
    assert "No space left on device" in out and "The last good checkpoint is" in out
    assert [path.stem for path in checkpoint.saved(tmp_path / "run")] == ["step_00000002", "step_00000006"]


def test_evaluation_reads_the_same_windows_each_time(run: Train, tmp_path: Path) -> None:
    run("run", eval_interval=1, learning_rate=0.0, min_lr=0.0, max_iters=3)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len({line["val_loss"] for line in lines if "val_loss" in line}) == 1


def test_the_command_trains_and_prints_its_result(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run([*arguments(data, tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 6


def test_the_command_resumes_with_one_flag(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.run([*arguments(data, Path("out")), "--quiet"]) == 0
    assert command.run(["--resume", "--json", "--max_iters=8"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 8
    assert command.run(["--resume", "out", "--json", "--max_iters=9"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 9
    Path("more.toml").write_text("max_iters = 10\n")
    assert command.run(["more.toml", "--resume", "out", "--json"]) == 0  # a config before it, the run after it
    assert json.loads(capsys.readouterr().out)["steps"] == 10


def test_a_failed_run_exits_with_3(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, 1, float("nan"))
    assert command.run([*arguments(data, tmp_path / "run"), "--quiet"]) == 3
    assert re.search(r"step 0: .*\bnan\b", capsys.readouterr().err)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_and_exit_code_130(data: Path, tmp_path: Path, number: int) -> None:
    out = tmp_path / "run"
    program = "import sys; from oomph.cli.train import run; sys.exit(run(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments(data, out, max_iters=10**6, log_interval=1)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = out / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 5):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.05)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"stopped by {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}" in said
    done = len(losses(out))
    assert json.loads((out / "result.json").read_text())["steps"] == done
    resumed = train({"max_iters": done + 2}, resume=out, quiet=True, measure=False)
    assert resumed.steps == done + 2 and [step for step, _ in losses(out)] == list(range(done + 2))


def test_options_that_make_no_sense_are_refused(run: Train) -> None:
    with refused("--keep", allowed="at least 1"):
        run("run", options={"keep": 0})
    with refused("--overwrite"):
        train(SMALL, Options(resume=True, overwrite=True))
