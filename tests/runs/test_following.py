"""Watching a log that grows, with a clock and a card of the test's own."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import simulate
from explaining import figures

from oomph.cli.explain import follow
from oomph.devices.nvml import Sample, _look, sampler
from oomph.errors import InputError
from oomph.runs.follow import Follower, Notice, WallClock
from oomph.units import MIB


class Stage:
    """Time that passes only when somebody sleeps, and what happens in it."""

    def __init__(self, log: Path, acts: Iterator[Callable[[], None]]) -> None:
        self.log = log
        self.acts = acts
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        act = next(self.acts, None)
        if act is None:
            raise KeyboardInterrupt
        act()

    def write(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(text)

    @property
    def clock(self) -> WallClock:
        return WallClock(self.now, self.sleep)


def step(number: int, loss: float, ms: float = 100.0) -> str:
    return f"iter {number}: loss {loss:.4f}, time {ms:.2f}ms, mfu 30.00%\n"


def watch(tmp_path: Path, *texts: str, samples: list[Sample] | None = None, every_s: float = 2.0) -> list[Notice]:
    """The notices while these texts are appended, one at each look."""
    log = tmp_path / "run.log"
    stage = Stage(log, iter(()))
    stage.acts = iter([lambda text=text: stage.write(text) for text in texts])  # type: ignore[misc]
    follower = Follower(log, _sampled(samples) if samples else list, stage.clock)
    notices: list[Notice] = []
    with suppress(KeyboardInterrupt):
        while follower.ended is None:
            notices += follower.look()
            stage.sleep(every_s)
    return notices


def ids(notices: list[Notice]) -> list[str]:
    return [f"{notice.severity}: {notice.id}" for notice in notices]


def _sampled(samples: list[Sample]) -> Callable[[], list[Sample]]:
    seen = iter(samples)
    return lambda: [next(seen, samples[-1])]


def test_evaluations_are_told_as_they_come(tmp_path: Path) -> None:
    said = watch(
        tmp_path,
        "step 0: train loss 10.9, val loss 10.9912\n",
        step(0, 10.9),
        "step 500: train loss 5.5, val loss 5.5194\n" + step(500, 5.5),
    )
    assert ids(said) == ["info: evaluation"] * 2
    assert figures(said[0].text) == {0, 10.9912, 59_349.6}
    assert figures(said[1].text) == {500, 5.5194, 249.5, 5.4718}  # step, loss, perplexity, below the best so far


def test_a_nan_loss_is_told_once(tmp_path: Path) -> None:
    said = watch(tmp_path, step(0, 3.0), step(1, math.nan), step(2, math.nan), step(3, math.nan))
    assert ids(said) == ["error: not_finite"]
    assert figures(said[0].text) == {1}


def test_a_loss_that_rises_is_told_and_so_is_its_return(tmp_path: Path) -> None:
    down = "".join(step(i, 8.0 * (i + 1) ** -0.2) for i in range(200))
    up = "".join(step(200 + i, 6.0) for i in range(40))
    back = "".join(step(240 + i, 2.5) for i in range(60))
    said = watch(tmp_path, down, up, back)
    assert ids(said) == ["error: diverging", "info: diverging_over"]
    assert 6.0 in figures(said[0].text)


def test_overfitting_is_told(tmp_path: Path) -> None:
    pairs = [(0, 4.0, 4.0), (100, 3.0, 3.2), (200, 2.5, 3.1), (300, 2.0, 3.4)]
    said = watch(tmp_path, *(f"step {s}: train loss {t:.4f}, val loss {v:.4f}\n" for s, t, v in pairs))
    assert ids(said)[-1] == "warning: overfitting"
    assert figures(said[-1].text) == {200}


def test_a_silent_log_is_told_and_so_is_its_going_on(tmp_path: Path) -> None:
    steps = "".join(step(i, 3.0) for i in range(30))
    said = watch(tmp_path, steps, *[""] * 60, step(30, 3.0))
    assert ids(said) == ["warning: silent", "info: silent_over"]
    assert figures(said[0].text) == {92}


def test_slower_steps_are_told(tmp_path: Path) -> None:
    said = watch(
        tmp_path, "".join(step(i, 3.0) for i in range(100)), "".join(step(100 + i, 3.0, 150.0) for i in range(40))
    )
    assert ids(said) == ["warning: slowing"]
    assert figures(said[0].text) == {100, 150}


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    line = step(7, 3.25)
    log = tmp_path / "run.log"
    follower = Follower(log)
    log.write_text(line[:20])
    follower.look()
    assert follower.run.steps.count == 0
    log.write_text(line)
    follower.look()
    assert (follower.run.steps.count, follower.run.unreadable_count) == (1, 0)
    assert follower.run.steps.totals["loss"].last == 3.25


def test_a_log_that_begins_anew_is_read_anew(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    follower = Follower(log)
    log.write_text("".join(step(i, 3.0) for i in range(10)))
    follower.look()
    log.write_text(step(0, 4.0))
    said = follower.look()
    assert ids(said) == ["warning: restarted"]
    assert figures(said[0].text) == {0}


def test_a_log_that_does_not_exist_yet_is_waited_for(tmp_path: Path) -> None:
    assert ids(watch(tmp_path, "", "step 0: train loss 4.0, val loss 4.0\n")) == ["info: evaluation"]


def test_a_run_of_oomph_train_is_watched_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("max_iters = 3\n")
    lines = [json.dumps({"step": step, "loss": 3.0, "step_ms": 100.0}) for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    follower = Follower(tmp_path)
    assert follower.look() == []
    assert follower.ended is not None
    assert figures(follower.ended) == {2, 3}


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        Follower(tmp_path).look()


def sample(used: float, use: float = 98.0, celsius: float = 60.0) -> Sample:
    return Sample(0, "NVIDIA GeForce RTX 4070", 12282.0, used, use, 180.0, celsius, ((31872, used - 500),))


def test_the_card_is_watched_beside_the_log(tmp_path: Path) -> None:
    steps = "".join(step(i, 3.0) for i in range(30))
    samples = [sample(8000), sample(8000), sample(8000), sample(9500), sample(12200, celsius=90.0), sample(8000)]
    said = watch(tmp_path, steps, "", "", "", "", samples=samples)
    assert ids(said) == [
        "warning: grown",
        "warning: full",
        "warning: hot",
        "info: full_over",
        "info: grown_over",
        "info: hot_over",
    ]
    assert [figures(notice.text) for notice in said[:3]] == [{8000, 9500}, {12_200, 12_282}, {90}]


def test_an_idle_card_is_told_after_three_looks(tmp_path: Path) -> None:
    said = watch(tmp_path, step(0, 3.0), "", "", "", samples=[sample(8000, 0.0)] * 4 + [sample(8000)])
    assert ids(said) == ["warning: idle", "info: idle_over"]


def test_the_driver_is_asked_or_there_is_none() -> None:
    assert all(isinstance(each, Sample) for each in sampler()())


class DriverError(Exception):
    """What NVML raises."""


def untold(*_: object) -> float:
    raise DriverError


def fake_nvml() -> SimpleNamespace:
    """A driver with one card, which does not tell its power."""
    told: dict[str, object] = {
        "Count": 1,
        "HandleByIndex": 0,
        "MemoryInfo": SimpleNamespace(total=12282 * MIB, used=6582 * MIB),
        "Name": b"NVIDIA GeForce RTX 4070",
        "UtilizationRates": SimpleNamespace(gpu=97),
        "Temperature": 58,
        "ComputeRunningProcesses": [
            SimpleNamespace(pid=31872, usedGpuMemory=4464 * MIB),
            SimpleNamespace(pid=1, usedGpuMemory=None),
        ],
    }
    functions = {f"nvmlDeviceGet{name}": lambda *_, value=value: value for name, value in told.items()}
    return SimpleNamespace(**functions, nvmlDeviceGetPowerUsage=untold, NVMLError=DriverError, NVML_TEMPERATURE_GPU=0)


def test_a_cards_figures_are_taken_as_far_as_the_driver_tells() -> None:
    assert _look(fake_nvml()) == [
        Sample(0, "NVIDIA GeForce RTX 4070", 12282.0, 6582.0, 97.0, None, 58.0, ((31872, 4464.0),))
    ]


def test_a_whole_run_is_introduced_watched_and_left_at_its_end(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    config = simulate.TrainConfig(max_iters=40, eval_interval=20, lr_decay_iters=40, warmup_iters=2)
    lines = simulate.text(
        simulate.preamble(config, (*simulate.RUN, "compile")), simulate.steps(config, 41, 500.0)
    ).splitlines(keepends=True)
    stage = Stage(log, iter(()))
    stage.acts = iter([lambda line=line: stage.write(line) for line in lines])  # type: ignore[misc]
    out = io.StringIO()
    follower = Follower(log, clock=stage.clock)
    follow(follower, "A100 80GB", file=out)
    said = out.getvalue()
    assert "500 ms" in said  # the step time
    assert said.rstrip().endswith("step 40 of 40")
    assert not follower.watcher.failing


def test_an_out_of_memory_error_ends_the_watch_with_its_reason(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(simulate.run_d())
    out = io.StringIO()
    follower = Follower(log)
    follow(follower, "RTX 4070", file=out)
    assert "16 × 1024 × 50304 × 4 bytes" in out.getvalue()
    assert out.getvalue().rstrip().endswith(follower.ended or "?")
    assert follower.watcher.failing


def test_a_log_that_is_not_there_yet_is_said_to_be_waited_for(tmp_path: Path) -> None:
    log, out = tmp_path / "later.log", io.StringIO()

    def appear(_: float) -> None:
        log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.54 GiB.\n")

    follow(Follower(log, clock=WallClock(lambda: 0.0, appear)), file=out)
    assert "later.log" in out.getvalue()
    assert "out of memory" in out.getvalue()
