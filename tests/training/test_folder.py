"""A run's folder: what is deleted and when, which run goes on where, and one trainer at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from training_helpers import Train, losses

from oomph import config as configs
from oomph.errors import InputError
from oomph.training import checkpoint
from oomph.training.folder import FolderLock
from oomph.training.run import train
from refusals import refused


def steps_kept(folder: Path) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.saved(folder)]


@pytest.mark.parametrize(
    "mistake",
    [{"dataset": "nowhere"}, {"vocab_size": 40}, {"wandb_log": True}, {"val": 0}, {"val": 20}, {"val": 2000}],
    ids=str,
)
def test_a_mistake_with_overwrite_leaves_the_old_run_whole(
    run: Train, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: dict[str, object]
) -> None:
    """`val`: bytes of a val.bin that is missing, shorter than a block, or full of tokens that are no words."""
    import shutil
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    if "val" in mistake:
        shutil.copytree(data, tmp_path / "other")
        (tmp_path / "other" / "val.bin").write_bytes(b"\x50" * int(str(mistake["val"])))
        if not mistake["val"]:
            (tmp_path / "other" / "val.bin").unlink()
        mistake = {"dataset": str(tmp_path / "other")}
    run("run", max_iters=3, eval_interval=3)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(InputError):
        run("run", options={"overwrite": True}, **mistake)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("tensorboard")
def test_overwriting_deletes_the_old_run_but_no_foreign_files(run: Train, tmp_path: Path) -> None:
    run("run", options={"tensorboard": True, "export": True}, max_iters=4, eval_interval=2)
    folder = tmp_path / "run"
    (folder / "samples").mkdir()
    for name in ("samples/seed_1.txt", "samples/mine.txt", "note.txt"):
        (folder / name).write_text("old")
    run("run", options={"overwrite": True}, max_iters=1)
    assert steps_kept(folder) == [1]
    assert not (folder / "tensorboard").exists() and not (folder / "huggingface").exists()
    assert [path.name for path in (folder / "samples").iterdir()] == ["mine.txt"] and (folder / "note.txt").exists()
    assert "step 3/" not in (folder / "log.txt").read_text()


def test_the_log_holds_the_plan(run: Train, tmp_path: Path) -> None:
    run("run", max_iters=1)
    text = (tmp_path / "run" / "log.txt").read_text()
    assert "parameters: 2 layers × 16" in text and text.index("parameters: 2 layers") < text.index("step 0/1")


def test_resuming_an_older_checkpoint_replaces_the_newer_ones(run: Train, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run("run", max_iters=8, eval_interval=4)
    assert steps_kept(folder) == [4, 8]
    run("run", options={"resume": checkpoint.path_of(folder, 4)}, max_iters=6, eval_interval=100)
    assert steps_kept(folder) == [4, 6]
    run("run", options={"resume": True}, max_iters=7, eval_interval=100)
    assert steps_kept(folder) == [6, 7]
    assert [step for step, _ in losses(folder)] == list(range(7))


def test_the_best_of_a_given_up_continuation_is_replaced(run: Train, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run("run", max_iters=8, eval_interval=2, options={"keep": 9})
    assert checkpoint.load(folder / "best.pt")["iter_num"] == 8
    still = {"learning_rate": 0.0, "min_lr": 0.0}  # nothing gets better any more
    result = run("run", options={"resume": checkpoint.path_of(folder, 2)}, max_iters=4, eval_interval=2, **still)
    best = checkpoint.load(folder / "best.pt")
    assert best["iter_num"] == 2 and result.best_val_loss == best["best_val_loss"]


def test_a_best_whose_process_died_before_it_could_say_so_is_the_best(run: Train, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run("run", max_iters=4, eval_interval=2)
    older = checkpoint.path_of(folder, 2)
    (folder / "best.pt").unlink()
    checkpoint.mark_best(folder, older)
    still = {"learning_rate": 0.0, "min_lr": 0.0}
    result = run("run", options={"resume": True}, max_iters=6, eval_interval=2, **still)
    best = checkpoint.load(folder / "best.pt")
    assert best["iter_num"] == 4 and result.best_val_loss == best["best_val_loss"]


def test_resuming_takes_a_checkpoint_saved_while_it_waited(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oomph.training import run as run_module

    run("whole", max_iters=6)
    run("run", max_iters=2)
    prepare = run_module.set_up

    def late(*arguments: Any) -> Any:
        if steps_kept(tmp_path / "run") == [2]:
            with monkeypatch.context() as patched:
                patched.setattr(run_module, "set_up", prepare)
                run("run", options={"resume": True}, max_iters=4)
        return prepare(*arguments)

    monkeypatch.setattr(run_module, "set_up", late)
    run("run", options={"resume": True}, max_iters=6)
    assert steps_kept(tmp_path / "run") == [4, 6]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_evaluating_a_run_that_is_not_done_leaves_its_files(run: Train, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run("run", options={"export": True}, max_iters=3, eval_interval=3)
    (folder / "result.json").unlink()  # as if it had been killed
    (folder / "huggingface" / "model.safetensors").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step":3,"loss":1.0}\n')

    def files() -> dict[Path, bytes]:
        own = ("metrics.jsonl", "log.txt")
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name not in own}

    before, lines = files(), (folder / "metrics.jsonl").read_text()
    result = train({"eval_only": True, "max_iters": 9}, resume=folder, quiet=True, measure=False)
    assert files() == before
    assert (folder / "metrics.jsonl").read_text().startswith(lines)
    assert result.reason == "evaluated" and not result.finished and not result.interrupted


def test_the_kept_config_says_how_to_repeat_the_run(run: Train, tmp_path: Path) -> None:
    run("first", max_iters=2)
    run("run", options={"order": "epochs", "weights": tmp_path / "first"}, max_iters=2)
    run("run", options={"resume": True}, max_iters=3)
    head = (tmp_path / "run" / "config.toml").read_text().splitlines()[0]
    assert head.endswith(f"--out_dir=ANOTHER --order=epochs --weights={tmp_path / 'first'}")
    loaded = configs.load([tmp_path / "run" / "config.toml"])
    assert loaded.config.backend == "gloo"  # nccl, the default, carries no run on a CPU
    again = configs.load([tmp_path / "run" / "config.toml"], [("out_dir", str(tmp_path / "again"), "here")])
    train(again, order="epochs", weights=tmp_path / "first", quiet=True, measure=False)
    assert losses(tmp_path / "again") == losses(tmp_path / "run")


def test_leftovers_of_best_pt_are_deleted(run: Train, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".best.pt.123").write_bytes(b"half")
    run("run", max_iters=1)
    assert not (tmp_path / "run" / ".best.pt.123").exists()


def test_resuming_by_another_path_to_the_same_folder_keeps_the_metrics(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("run", max_iters=3, out_dir="run")
    run("run", options={"resume": (tmp_path / "run").resolve()}, max_iters=5, out_dir="run")
    assert [step for step, _ in losses(tmp_path / "run")] == [0, 1, 2, 3, 4]


def test_a_moved_run_resumes_in_its_new_folder(run: Train, tmp_path: Path) -> None:
    run("run", max_iters=3)
    (tmp_path / "run").rename(tmp_path / "moved")
    result = train({"max_iters": 5}, resume=tmp_path / "moved", quiet=True, measure=False)
    assert Path(result.out_dir) == tmp_path / "moved" and not (tmp_path / "run").exists()
    assert [step for step, _ in losses(tmp_path / "moved")] == [0, 1, 2, 3, 4]


def test_a_resumed_run_does_not_write_into_another_runs_folder(run: Train, tmp_path: Path) -> None:
    run("run", max_iters=3)
    run("other", max_iters=3)
    with refused("out_dir", found="step_00000003.pt"):
        run("other", options={"resume": tmp_path / "run"}, max_iters=5)
    assert run("fresh", options={"resume": tmp_path / "run"}, max_iters=5).steps == 5
    assert [step for step, _ in losses(tmp_path / "fresh")] == [3, 4]


def test_resuming_a_finished_run_leaves_its_result(run: Train, tmp_path: Path) -> None:
    first = run("run", max_iters=4, eval_interval=2)
    before = (tmp_path / "run" / "result.json").read_text()
    again = train(resume=tmp_path / "run", quiet=True, measure=False)
    assert (tmp_path / "run" / "result.json").read_text() == before
    assert (again.loss, again.val_loss, again.step_ms) == (first.loss, first.val_loss, first.step_ms)


def test_the_config_of_a_resumed_run_repeats_it_from_the_start(run: Train, tmp_path: Path) -> None:
    run("run", max_iters=3)
    run("run", options={"resume": True}, max_iters=5)
    config = configs.load([tmp_path / "run" / "config.toml"])
    assert config.config.init_from == "scratch"
    assert checkpoint.load(checkpoint.saved(tmp_path / "run")[-1])["config"]["init_from"] == "scratch"


def test_two_trainers_do_not_share_a_folder(run: Train, tmp_path: Path) -> None:
    run("run", max_iters=2)
    lock = FolderLock(tmp_path / "run")
    try:
        with refused("out_dir", found=f"process {os.getpid()}"):
            run("run", options={"resume": True}, max_iters=4)
    finally:
        lock.release()
    assert run("run", options={"resume": True}, max_iters=4).steps == 4
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_stale_lock_file_does_not_block(run: Train, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("1")
    assert run("run", max_iters=1).finished


def test_a_resumed_run_finds_its_data_from_anywhere(
    run: Train, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("run", max_iters=2, dataset=data.name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert train({"max_iters": 3}, resume=tmp_path / "run", quiet=True, measure=False).steps == 3


def test_data_that_only_lies_about_says_nothing_of_a_resumed_runs_vocabulary(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pickle

    run("run", max_iters=2)
    folder = tmp_path / "data" / "openwebtext"  # the default data set
    folder.mkdir(parents=True)
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 99}))
    monkeypatch.chdir(tmp_path)
    assert train({"max_iters": 3}, resume=tmp_path / "run", quiet=True, measure=False).steps == 3


def test_tokens_are_those_read_when_a_step_becomes_larger(run: Train, tmp_path: Path) -> None:
    run("run", max_iters=2)
    result = run("run", options={"resume": True}, max_iters=4, gradient_accumulation_steps=8)
    tokens = [json.loads(line)["tokens"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    small, large = 4 * 2 * 16, 4 * 8 * 16
    assert result.tokens == 2 * small + 2 * large
    assert tokens[-2:] == [2 * small + 2 * large] * 2  # the last step, and the evaluation at the end


def test_a_larger_accumulation_reads_every_window(run: Train, tmp_path: Path) -> None:
    run("parts", max_iters=2, learning_rate=0.0, min_lr=0.0)
    run("parts", options={"resume": True}, max_iters=3, gradient_accumulation_steps=8)
    content = checkpoint.load(checkpoint.saved(tmp_path / "parts")[-1])
    assert content["oomph"]["micro_steps"] == 8 and content["oomph"]["data"]["position"] == 2 * 8 + 32


def test_a_resumed_run_keeps_its_reduced_batch(run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    from oomph.training import model as model_module

    head, count = model_module.head_loss, [0]

    def once(*arguments: object) -> torch.Tensor:
        count[0] += 1
        if count[0] == 9:
            raise torch.OutOfMemoryError("injected")
        return head(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(model_module, "head_loss", once)
    assert run("run", max_iters=4).batch_size == 2
    assert run("run", options={"resume": True}, max_iters=5).batch_size == 2
    assert run("run", options={"resume": True}, max_iters=6, batch_size=8).batch_size == 8
