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

from oomph.errors import InputError
from oomph.report.explain_follow import follow
from oomph.runs.follow import Clock, Follower
from oomph.runs.nvml import Sample, _look, sampler
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
    def clock(self) -> Clock:
        return Clock(self.now, self.sleep)


def step(number: int, loss: float, ms: float = 100.0) -> str:
    return f"iter {number}: loss {loss:.4f}, time {ms:.2f}ms, mfu 30.00%\n"


def watch(tmp_path: Path, *texts: str, samples: list[Sample] | None = None, every_s: float = 2.0) -> list[str]:
    """The lines said while these texts are appended, one at each look."""
    log = tmp_path / "run.log"
    stage = Stage(log, iter(()))
    stage.acts = iter([lambda text=text: stage.write(text) for text in texts])  # type: ignore[misc]
    follower = Follower(log, _sampled(samples) if samples else list, stage.clock)
    said: list[str] = []
    with suppress(KeyboardInterrupt):
        said.extend(f"{turn.severity}: {turn.text}" for turn in follower.turns(every_s))
    return said


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
    assert said == [
        "info: step 0: validation loss 10.9912, perplexity 59,349.6",
        "info: step 500: validation loss 5.5194, perplexity 249.5, 5.4718 below the best before",
    ]


def test_a_loss_that_is_no_number_is_told_once(tmp_path: Path) -> None:
    said = watch(tmp_path, step(0, 3.0), step(1, math.nan), step(2, math.nan), step(3, math.nan))
    assert said == ["error: the loss is no number since step 1: stop the run, its weights are lost"]


def test_a_loss_that_rises_is_told_and_so_is_its_return(tmp_path: Path) -> None:
    down = "".join(step(i, 8.0 * (i + 1) ** -0.2) for i in range(200))
    up = "".join(step(200 + i, 6.0) for i in range(40))
    back = "".join(step(240 + i, 2.5) for i in range(60))
    said = watch(tmp_path, down, up, back)
    assert len(said) == 2
    assert said[0].startswith("error: the training loss rises: 2.")
    assert said[1] == "info: the training loss is back where it was"


def test_overfitting_is_told(tmp_path: Path) -> None:
    pairs = [(0, 4.0, 4.0), (100, 3.0, 3.2), (200, 2.5, 3.1), (300, 2.0, 3.4)]
    said = watch(tmp_path, *(f"step {s}: train loss {t:.4f}, val loss {v:.4f}\n" for s, t, v in pairs))
    assert said[-1] == "warning: the validation loss rises since step 200 while the training loss falls: it overfits"


def test_a_silent_log_is_told_and_so_is_its_going_on(tmp_path: Path) -> None:
    steps = "".join(step(i, 3.0) for i in range(30))
    said = watch(tmp_path, steps, *[""] * 60, step(30, 3.0))
    assert said == [
        "warning: nothing new in the log for 92 s: it hangs, has ended, or is in a long evaluation",
        "info: the log goes on",
    ]


def test_slower_steps_are_told(tmp_path: Path) -> None:
    said = watch(
        tmp_path, "".join(step(i, 3.0) for i in range(100)), "".join(step(100 + i, 3.0, 150.0) for i in range(40))
    )
    assert said == ["warning: steps have become slower: 100 ms before, 150 ms now"]


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
    said = [turn.text for turn in follower.look()]
    assert said == ["the step count went back to 0: started again"]


def test_a_log_that_does_not_exist_yet_is_waited_for(tmp_path: Path) -> None:
    assert watch(tmp_path, "", "step 0: train loss 4.0, val loss 4.0\n")[0].startswith("info: step 0")


def test_a_run_of_oomph_train_is_watched_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("max_iters = 3\n")
    lines = [json.dumps({"step": step, "loss": 3.0, "step_ms": 100.0}) for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    follower = Follower(tmp_path)
    assert list(follower.turns()) == []
    assert follower.ended == "the run is finished: step 2 of 3"


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
    assert said == [
        "warning: memory in use grew from 8,000 to 9,500 MiB since the run settled",
        "warning: the card's memory is full: 12,200 of 12,282 MiB",
        "warning: the card is at 90 °C: it will lower its clock",
        "info: the card has memory left again",
        "info: memory in use is back",
        "info: the card has cooled down",
    ]


def test_an_idle_card_is_told_after_three_looks(tmp_path: Path) -> None:
    said = watch(tmp_path, step(0, 3.0), "", "", "", samples=[sample(8000, 0.0)] * 4 + [sample(8000)])
    assert [line.split(":")[0] for line in said] == ["warning", "info"]
    assert "idles" in said[0]


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
    assert "A step takes 500 ms" in said
    assert said.rstrip().endswith("the run is finished: step 40 of 40")
    assert not follower.watch.failing


def test_an_out_of_memory_error_ends_the_watch_with_its_reason(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(simulate.run_d())
    out = io.StringIO()
    follower = Follower(log)
    follow(follower, "RTX 4070", file=out)
    assert "16 × 1024 × 50304 × 4 bytes" in out.getvalue()
    assert out.getvalue().rstrip().endswith("the run ended: out of memory")
    assert follower.watch.failing


def test_a_log_that_is_not_there_yet_is_said_to_be_waited_for(tmp_path: Path) -> None:
    log, out = tmp_path / "later.log", io.StringIO()

    def appear(_: float) -> None:
        log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.54 GiB.\n")

    follow(Follower(log, clock=Clock(lambda: 0.0, appear)), file=out)
    assert "later.log does not exist yet: waiting for it" in out.getvalue()
    assert "out of memory" in out.getvalue()
