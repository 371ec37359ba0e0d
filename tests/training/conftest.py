"""Small real runs: a few thousand tokens on disk, a model of a few thousand weights, one thread."""

from __future__ import annotations

import json
import pickle
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from training_helpers import LETTERS, VOCAB, Train, trainer_of, write_data

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No torchrun around the tests."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "tokens")


@pytest.fixture
def letters(data: Path) -> Path:
    """nanoGPT's table of characters beside the data."""
    tables = {"stoi": {c: i for i, c in enumerate(LETTERS)}, "itos": dict(enumerate(LETTERS)), "vocab_size": VOCAB}
    (data / "meta.pkl").write_bytes(pickle.dumps(tables))
    return data


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Train:
    """`run(name, max_iters=…, …)` trains the small model into tmp_path/name; `options` go to `Options`."""
    return trainer_of(data, tmp_path)


class SummaryWriter:
    """Stands in for torch.utils.tensorboard's, which needs the package tensorboard: one JSON line per scalar."""

    def __init__(self, log_dir: str) -> None:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        self.file = (Path(log_dir) / f"events.out.tfevents.{time.time_ns()}").open("ab", buffering=0)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.file.write(json.dumps([tag, scalar_value, global_step]).encode() + b"\n")

    def flush(self) -> None: ...

    def close(self) -> None:
        self.file.close()


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `--tensorboard` work without the package."""
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    module: Any = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
