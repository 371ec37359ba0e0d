"""One run on several ranks, by DDP and by FSDP2: the same losses, and checkpoints that any number of ranks takes up."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import Runs

from oomph.cli.main import main
from oomph.errors import InputError
from oomph.training import checkpoint
from oomph.training.ranks import parts
from oomph.training.sample import open_model
from oomph.training.weights import read_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # many runs in one fixture
FSDP = {"parallel": "fsdp"}
MODERN = {"position_embedding_type": "rotary", "bias": False, "max_iters": 4, "sample_tokens": 4}
LIGHT = {"checkpoint_layers": 1, "bias": True, "vocab_size": 63}  # 63 rows: the last rank's part is padded


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    found = Runs(tmp_path_factory.mktemp("ranks"))
    resumed: dict[str, Any] = {"resume": True}
    found.add("one", 1)
    for ranks in (2, 4):
        found.add(f"ddp {ranks}", ranks, parallel="ddp")
        found.add(f"fsdp {ranks}", ranks, **FSDP)
    found.add("last", 2, **FSDP, grad_sync="last", reshard_after_forward="false")
    found.add("launched alone", 1, **FSDP, max_iters=2)
    # 4 → 2 → 1 → 4 ranks, each time from the checkpoint of the last, with an average beside the weights
    found.add("light", 1, ema=0.9, **LIGHT)
    for ranks, steps in ((4, 5), (2, 9), (1, 14), (4, 20)):
        more = FSDP if ranks > 1 else {}
        found.add("moved", ranks, resumed if steps > 5 else {}, max_iters=steps, ema=0.9, **LIGHT, **more)
    # the same number of ranks, with dropout: to the last bit; the second half needs no flags but the run's folder
    found.add("dropped", 2, **FSDP, dropout=0.1, max_iters=12)
    found.add("again", 2, **FSDP, dropout=0.1, max_iters=7)
    found.add("again", 2, resumed, dropout=0.1, max_iters=12)
    # from DDP's file to FSDP2's folder, and back
    found.add("mixed", 2, parallel="ddp", max_iters=7)
    found.add("mixed", 2, resumed, **FSDP, max_iters=13)
    found.add("mixed", 4, resumed, parallel="ddp", max_iters=20)
    found.add("hurt", 2, **FSDP, patch="short_of_memory")
    found.add("rotary", 2, **FSDP, **MODERN, patch="short_of_memory")
    found.add("rotary alone", 1, **MODERN)
    found.add("background", 2, {"export": True}, **FSDP, patch="in_background", eval_interval=3)
    found.add("full", 2, {"keep": 3}, **FSDP, patch="full_disk", eval_interval=2, max_iters=7)
    found.add("half", 2, **FSDP, dtype="bfloat16", max_iters=6)
    found.add("half alone", 1, dtype="bfloat16", max_iters=6)
    found.do()
    return found


@pytest.mark.parametrize("name", ["ddp 2", "ddp 4", "fsdp 2", "fsdp 4", "last", "hurt", "mixed", "background"])
def test_the_losses_are_those_of_one_process(runs: Runs, name: str) -> None:
    assert runs.losses(name) == pytest.approx(runs.losses("one"), abs=1e-5)
    assert len(runs.losses("one")) == 20


def test_a_run_goes_from_4_ranks_to_2_to_1_to_4(runs: Runs) -> None:
    assert runs.losses("moved") == pytest.approx(runs.losses("light"), abs=1e-6)
    there, here = (read_checkpoint(checkpoint.saved(runs.folder / name)[-1]) for name in ("moved", "light"))
    for entry in ("model", "ema"):
        assert there[entry].keys() == here[entry].keys()
        for name in here[entry]:
            # A bias of the keys changes no loss: its gradient is rounding alone, which AdamW makes as large as any.
            both = [each[entry][name] for each in (there, here)]
            if name.endswith("c_attn.bias"):
                both = [each.unflatten(0, (3, -1))[[0, 2]] for each in both]
            assert torch.allclose(*both, atol=1e-5), (entry, name)


def test_as_many_ranks_resume_to_the_last_bit(runs: Runs) -> None:
    assert runs.losses("again") == runs.losses("dropped")
    once, twice = (read_checkpoint(checkpoint.saved(runs.folder / name)[-1]) for name in ("dropped", "again"))
    assert all(torch.equal(once["model"][name], twice["model"][name]) for name in once["model"])
    assert json.loads((runs.folder / "again" / "plan.json").read_text())["config"]["parallel"] == "fsdp"


def test_memory_that_runs_out_on_one_rank_shrinks_all(runs: Runs) -> None:
    lines = [json.loads(line) for line in (runs.folder / "hurt" / "metrics.jsonl").read_text().splitlines()]
    shrunk = [(line["step"], line["batch_size"]) for line in lines if line.get("event") == "out of memory"]
    assert shrunk == [(1, 2)]
    assert runs.losses("hurt") == pytest.approx(runs.losses("one"), abs=1e-5)


def test_a_full_disk_on_one_rank_gives_up_older_checkpoints(runs: Runs) -> None:
    assert len(runs.losses("full")) == 7
    lines = (runs.folder / "full" / "metrics.jsonl").read_text().splitlines()
    given_up = [line["given_up"] for line in map(json.loads, lines) if line.get("event") == "disk full"]
    assert given_up == ["step_00000002.pt"]
    assert checkpoint.step_of(checkpoint.saved(runs.folder / "full")[-1]) == 7


def test_rotations_are_kept_when_the_model_is_wrapped_anew(runs: Runs) -> None:
    assert runs.losses("rotary") == pytest.approx(runs.losses("rotary alone"), abs=1e-5)


def test_half_precision_is_gathered_and_reduced_in_full(runs: Runs) -> None:
    assert runs.losses("half") == pytest.approx(runs.losses("half alone"), abs=0.05)


def test_every_rank_says_its_memory(runs: Runs) -> None:
    ranks = json.loads((runs.folder / "fsdp 4" / "result.json").read_text())["ranks_mib"]
    assert len(ranks) == 4
    assert all(each["actual"] > 0 and each["predicted"] > 0 for each in ranks)


def test_a_folder_is_sampled_evaluated_and_exported(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs.folder / "background"
    assert checkpoint.saved(folder)[-1].is_dir()
    shared = open_model(folder).model.state_dict()
    assert main(["evaluate", str(folder), str(runs.data), "--json"]) == 0
    loss = json.loads(capsys.readouterr().out)["results"][0]["loss"]
    assert loss == pytest.approx(json.loads((folder / "result.json").read_text())["val_loss"], abs=0.05)
    assert main(["evaluate", str(folder / "huggingface"), str(runs.data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["loss"] == pytest.approx(loss, abs=1e-5)
    nanogpt = torch.load(folder / "nanogpt" / "ckpt.pt", weights_only=True)
    last = read_checkpoint(checkpoint.saved(folder)[-1])
    assert all(torch.equal(nanogpt["model"][name], last["model"][name]) for name in shared)
    ours, one = (
        torch.load(path, weights_only=True)["optimizer"]
        for path in (folder / "nanogpt" / "ckpt.pt", checkpoint.saved(runs.folder / "one")[-1])
    )
    assert [group["params"] for group in ours["param_groups"]] == [group["params"] for group in one["param_groups"]]
    for number, state in one["state"].items():
        assert torch.allclose(ours["state"][number]["exp_avg"], state["exp_avg"], atol=1e-5)


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("executed",)


def test_a_damaged_folder_is_refused_and_nothing_in_it_is_executed(runs: Runs, tmp_path: Path, capsys: Any) -> None:
    whole = checkpoint.saved(runs.folder / "fsdp 2")[-1]
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "run.pt"):
        copy = tmp_path / name.strip("_.") / whole.name
        shutil.copytree(whole, copy)
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content)
        with pytest.raises(InputError):
            read_checkpoint(copy)
        (copy / name).unlink()
        with pytest.raises(InputError):
            read_checkpoint(copy)
    copy = tmp_path / "code" / whole.name
    shutil.copytree(whole, copy)
    (copy / ".metadata").write_bytes(pickle.dumps(_Code()))
    with pytest.raises(InputError, match="without executing"):
        parts.restore(copy, {})
    assert capsys.readouterr().out == ""


def test_a_folder_that_was_whole_when_its_writer_was_killed_gets_its_name(runs: Runs, tmp_path: Path) -> None:
    whole = checkpoint.saved(runs.folder / "fsdp 2")[-1]
    part = tmp_path / checkpoint.FOLDER / f".{whole.name}.part"
    shutil.copytree(whole, part)
    checkpoint.recover(tmp_path)
    assert checkpoint.saved(tmp_path) == [tmp_path / checkpoint.FOLDER / whole.name]
    shutil.rmtree(tmp_path / checkpoint.FOLDER)
    shutil.copytree(whole, part, ignore=shutil.ignore_patterns("run.pt"))
    checkpoint.recover(tmp_path)
    assert checkpoint.saved(tmp_path) == []
