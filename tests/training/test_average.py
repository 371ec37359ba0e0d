"""The moving average of the weights: followed exactly, evaluated, saved, resumed, planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_helpers import Train, losses, weights

import oomph
from oomph.training import checkpoint
from oomph.training.sample import open_model


def average(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = checkpoint.load(checkpoint.saved(folder)[-1])["ema"]
    return found


def test_the_average_follows_the_weights(run: Train, tmp_path: Path) -> None:
    expected = None
    for steps in range(4):
        run(f"run{steps}", max_iters=steps + 1, ema=0.9, eval_interval=1000)
        now = weights(tmp_path / f"run{steps}")["transformer.ln_f.weight"]
        decay = min(0.9, (1 + steps) / (10 + steps))
        before = torch.ones_like(now) if expected is None else expected
        expected = before + (1 - decay) * (now - before)
    assert expected is not None
    torch.testing.assert_close(average(tmp_path / "run3")["transformer.ln_f.weight"], expected)


def test_an_average_changes_no_step_and_is_what_is_evaluated_and_opened(run: Train, tmp_path: Path) -> None:
    plain, averaged = run("plain", dropout=0.2), run("run", dropout=0.2, ema=0.9)
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    assert averaged.val_loss != plain.val_loss
    opened = open_model(tmp_path / "run").model.state_dict()
    assert all(torch.equal(opened[name], value) for name, value in average(tmp_path / "run").items())


@pytest.mark.parametrize("keys", [{}, {"optimizer": "muon"}, {"tie_weights": False}], ids=str)
def test_a_resumed_average_is_the_undisturbed_one_to_the_last_bit(
    run: Train, tmp_path: Path, keys: dict[str, object]
) -> None:
    whole = run("whole", max_iters=8, ema=0.9, dropout=0.2, **keys)
    run("parts", max_iters=3, ema=0.9, dropout=0.2, **keys)
    parts = run("parts", options={"resume": True}, max_iters=8, ema=0.9, dropout=0.2, **keys)
    assert parts.val_loss == whole.val_loss
    mine, theirs = average(tmp_path / "parts"), average(tmp_path / "whole")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_an_average_can_begin_in_a_resumed_run(run: Train, tmp_path: Path) -> None:
    run("run", max_iters=3)
    run("run", options={"resume": True}, max_iters=4, ema=0.5)
    assert average(tmp_path / "run").keys() == weights(tmp_path / "run").keys()


def test_the_plan_holds_one_more_copy_of_the_weights() -> None:
    keys = {"n_layer": 2, "n_head": 2, "n_embd": 64, "trainer": "oomph"}
    for compiled in (False, True):
        plain, averaged = (oomph.plan(keys | {"compile": compiled, "ema": decay}, "RTX 4070") for decay in (0.0, 0.9))
        more_mib = averaged.memory.allocated_mib - plain.memory.allocated_mib
        assert more_mib == pytest.approx(4 * averaged.model.params / 2**20, rel=0.02)
    assert oomph.plan(keys | {"trainer": "nanogpt", "ema": 0.9}, "RTX 4070").config.ema == 0
