"""The learning-rate finder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training_helpers import SMALL

from oomph.cli.main import main
from oomph.training.find_lr import FEWEST, find_lr
from oomph.training.start import Options


@pytest.mark.parametrize("keys", [{}, {"recipe": "modern"}], ids=str)
def test_rates_rise_until_the_loss_does_and_a_lower_one_is_proposed(data: Path, keys: dict[str, Any]) -> None:
    found = find_lr(SMALL | {"dataset": str(data)} | keys, Options(measure=False), seconds=0.0)
    assert len(found.rates) <= FEWEST and found.rates == sorted(found.rates)
    lowest = found.rates[found.losses.index(min(found.losses))]
    assert found.keys["learning_rate"] == pytest.approx(lowest / 10, rel=0.06)
    assert ("matrix_lr" in found.keys) == ("recipe" in keys)


def test_the_command_proposes_a_rate_and_writes_nothing(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oomph.training.find_lr.SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    keys = SMALL | {"dataset": str(data), "out_dir": str(tmp_path / "run")}
    assert main(["train", "--find_lr", *(f"--{key}={value}" for key, value in keys.items())]) == 0
    assert "→ --learning_rate=" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
