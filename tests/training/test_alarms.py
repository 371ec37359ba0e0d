"""Spikes of loss and gradient norm are told, once, as in an uninterrupted run; runs end by time and by loss."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from training_helpers import Train, losses

from oomph.training import loop as loop_module
from oomph.training.alarms import Alarms, Level


def noisy(count: int, seed: int = 0) -> list[float]:
    return (3.0 + 0.1 * np.random.default_rng(seed).standard_normal(count)).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_a_falling_loss_are_no_spikes(seed: int) -> None:
    level = Level()
    falling = [8.0 / (1 + step / 50) + noise - 3 for step, noise in enumerate(noisy(1000, seed))]
    assert not any(level.is_spike(value) for value in falling)


def test_a_spike_is_told_once() -> None:
    level = Level()
    told = [step for step, value in enumerate([*noisy(200), 9.0, 9.0, *noisy(50), 9.0]) if level.is_spike(value)]
    assert told == [200]


def test_a_flat_loss_needs_a_tenth_more_to_alarm() -> None:
    level = Level()
    assert not any(level.is_spike(3.0) for _ in range(200))
    assert not level.is_spike(3.2)
    assert level.is_spike(3.4)


def test_the_state_goes_through_a_checkpoint() -> None:
    one = Alarms({})
    for value in noisy(150):
        one.check(value, value)
    two = Alarms(json.loads(json.dumps(one.state())))
    assert one.check(3.0, 99.0) == two.check(3.0, 99.0) != []
    assert one.state() == two.state()


def test_a_spike_is_in_the_log_and_the_metrics(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module.Alarms, "check", lambda *_: ["the loss is 9, far above its usual 3"])
    run("run", max_iters=1)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["reason"] for line in lines if line.get("event") == "spike"] == [
        "the loss is 9, far above its usual 3"
    ]
    assert "WARNING: step 0: the loss is 9" in (tmp_path / "run" / "log.txt").read_text()


def test_a_run_ends_at_its_time_limit_and_goes_on_exactly(run: Train, tmp_path: Path) -> None:
    result = run("run", max_iters=10**6, time_limit=0.005)
    assert not result.finished and not result.interrupted and "time_limit" in result.reason and result.steps > 0
    run("run", options={"resume": True}, max_iters=result.steps + 2, time_limit=9.0)
    run("whole", max_iters=result.steps + 2)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_run_ends_at_the_loss_that_was_wanted(run: Train) -> None:
    result = run("run", max_iters=10**6, eval_interval=5, until_loss=4.0)
    assert result.finished and result.val_loss is not None and result.val_loss <= 4.0 and result.steps % 5 == 0
    assert "reached, 4 wanted" in result.reason


def test_trackio_gets_the_figures(run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, float]] = []
    tracked = SimpleNamespace(log=logged.append, finish=lambda: logged.append({}))
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lambda **_: tracked))
    run("run", max_iters=2, options={"trackio": True})
    assert logged[-1] == {} and [entry["iter"] for entry in logged if "loss" in entry] == [0, 1]
