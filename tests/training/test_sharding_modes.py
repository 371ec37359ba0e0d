"""One run on two ranks by FSDP2: compiled, in float16, of the modern shape, and where the plan chooses it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from rank_jobs import Runs

from oomph.training import checkpoint
from oomph.training.weights import read_checkpoint, read_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # many runs in one fixture
FSDP = {"parallel": "fsdp"}
MODERN = {"recipe": "modern", "optimizer": "adamw"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    found = Runs(tmp_path_factory.mktemp("modes"), {"max_iters": 6, "eval_interval": 3})
    found.add("one", 1)
    found.add("auto", 2, parallel="auto", patch="one_small_device")
    found.add("overflow", 2, **FSDP, dtype="float16", patch="overflowing")
    found.add("modern", 2, {"export": True}, **FSDP, **MODERN)
    found.add("modern alone", 1, **MODERN)
    found.add("compiled", 2, **FSDP, compile=True, patch="short_of_memory_later")
    found.do()
    return found


@pytest.mark.parametrize(("name", "like"), [("compiled", "one"), ("auto", "one"), ("modern", "modern alone")])
def test_the_losses_are_those_of_one_process(runs: Runs, name: str, like: str) -> None:
    assert runs.losses(name) == pytest.approx(runs.losses(like), abs=1e-5)
    assert len(runs.losses(name)) == 6


def events(runs: Runs, name: str, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (runs.folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == event]


def test_memory_that_runs_out_on_one_rank_shrinks_all_that_compile(runs: Runs) -> None:
    assert [(each["step"], each["batch_size"]) for each in events(runs, "compiled", "out of memory")] == [(3, 2)]


def test_all_ranks_shard_the_model_if_one_must(runs: Runs) -> None:
    assert checkpoint.saved(runs.folder / "auto")[-1].is_dir()


def test_an_overflow_in_one_ranks_part_lowers_the_scale_on_all(runs: Runs) -> None:
    assert len(runs.losses("overflow")) == 6
    lowered = [(each["step"], each["scale"]) for each in events(runs, "overflow", "scale lowered")]
    assert lowered == [(2, 2.0**15)]


def test_the_modern_shape_is_exported_from_its_parts(runs: Runs) -> None:
    exported = read_weights(runs.folder / "modern" / "huggingface")
    last = read_checkpoint(checkpoint.saved(runs.folder / "modern")[-1])["model"]
    assert exported.keys() == last.keys()
    assert all(torch.equal(exported[name], last[name]) for name in last)
