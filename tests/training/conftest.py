"""Small real runs: a few thousand tokens on disk, a model of a few thousand weights, one thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training_helpers import SMALL, Train, write_data

from oomph.training.result import Result
from oomph.training.run import Options, train

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No torchrun around the tests, and no measuring of this CPU."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OOMPH_MEASURE", "0")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "tokens")


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Train:
    """`run(name, max_iters=…, …)` trains the small model into tmp_path/name; `options` go to `Options`."""

    def go(name: str = "run", options: dict[str, Any] | None = None, **keys: Any) -> Result:
        config = SMALL | {"dataset": str(data), "out_dir": str(tmp_path / name)} | keys
        return train(config, Options(**({"quiet": True, "measure": False} | (options or {}))))

    return go
