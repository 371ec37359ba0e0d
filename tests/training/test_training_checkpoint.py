"""Checkpoints: whole or not there; what is damaged or harmful is refused with its reason, and nothing in it is run."""

from __future__ import annotations

import errno
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oomph import config as configs
from oomph.errors import InputError
from oomph.training import checkpoint
from oomph.training.errors import TrainingError
from refusals import refused

CONTENT: dict[str, Any] = {"model": {"w": torch.arange(300.0)}, "iter_num": 3}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = checkpoint.path_of(tmp_path, 3)
    checkpoint.save(CONTENT, path)
    return path


def test_what_was_saved_is_loaded(saved: Path) -> None:
    content = checkpoint.load(saved)
    assert content["iter_num"] == 3 and torch.equal(content["model"]["w"], CONTENT["model"]["w"])


def test_torch_and_zip_tools_read_it_as_any_other(saved: Path) -> None:
    assert torch.equal(torch.load(saved, weights_only=True)["model"]["w"], CONTENT["model"]["w"])
    assert zipfile.ZipFile(saved).testzip() is None


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_is_noticed(saved: Path, data: st.DataObject) -> None:
    content = bytearray(saved.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    damaged = saved.with_name("step_00000004.pt")
    damaged.write_bytes(content)
    with pytest.raises(InputError):
        checkpoint.load(damaged)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_cut_is_noticed(saved: Path, data: st.DataObject) -> None:
    content = saved.read_bytes()
    cut = saved.with_name("step_00000004.pt")
    cut.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with refused(cut.name):
        checkpoint.load(cut)


class Evil:
    """A pickle that would make a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    path, trace = tmp_path / "ckpt.pt", tmp_path / "it_ran"
    torch.save({"model": Evil(trace)}, path)
    with refused(str(path), allowed="nanoGPT"):
        checkpoint.load(path)
    assert not trace.exists()


def test_a_torch_file_without_a_model_is_refused(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "ckpt.pt")
    with refused("ckpt.pt"):
        checkpoint.load(tmp_path / "ckpt.pt")


def test_a_full_disk_keeps_the_last_good_one(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint._Hashed, "write", full)
    with pytest.raises(TrainingError, match="No space left on device"):
        checkpoint.save(CONTENT | {"iter_num": 4}, saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_only_the_newest_are_kept_and_leftovers_go(tmp_path: Path) -> None:
    for step in range(5):
        checkpoint.save(CONTENT, checkpoint.path_of(tmp_path, step))
    (tmp_path / "checkpoints" / ".step_00000009.pt.123.part").write_bytes(b"half")
    checkpoint.keep_last(tmp_path, 2)
    assert [path.name for path in checkpoint.saved(tmp_path)] == ["step_00000003.pt", "step_00000004.pt"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_best_pt_survives_deleting_its_checkpoint(saved: Path, tmp_path: Path) -> None:
    checkpoint.mark_best(tmp_path, saved)
    saved.unlink()
    assert checkpoint.load(tmp_path / "best.pt")["iter_num"] == 3


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step in (100_000_000, 5, 40):
        checkpoint.save(CONTENT, checkpoint.path_of(tmp_path, step))
    assert [path.stem for path in checkpoint.saved(tmp_path)] == ["step_00000005", "step_00000040", "step_100000000"]


def test_the_planner_reads_a_runs_config_out_of_it(tmp_path: Path) -> None:
    config = {"n_layer": 2, "batch_size": 7, "dtype": "float32"}
    checkpoint.save(CONTENT | {"config": config, "model_args": {"n_embd": 96}}, tmp_path / "best.pt")
    loaded = configs.load([tmp_path / "best.pt"]).config
    assert (loaded.n_layer, loaded.batch_size, loaded.n_embd) == (2, 7, 96)
