"""metrics.jsonl, TensorBoard's files, and the lines people read."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace
from training_helpers import Train, losses

from oomph import devices, plan, runs
from oomph.errors import InputError
from oomph.training import result as result_module
from oomph.training.log import Log, Metrics, step_line
from oomph.training.memory import MemoryMeter
from oomph.training.result import PredictedVsActual, Result, StepTimes, compare_memory, lines


def test_a_figure_that_is_not_finite_is_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, [])
    metrics.write(3, loss=float("nan"), lr=None)
    metrics.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3, "loss": None}


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_gets_every_logged_step(run: Train, tmp_path: Path) -> None:
    run("run", options={"tensorboard": True})
    (file,) = (tmp_path / "run" / "tensorboard").iterdir()
    scalars = [json.loads(line) for line in file.read_text().splitlines()]
    assert [step for tag, _, step in scalars if tag == "grad_norm"] == [0, 1, 2, 3, 4, 5]
    assert [(step, value) for tag, value, step in scalars if tag == "loss"] == losses(tmp_path / "run")


def test_tensorboard_itself_reads_the_events(run: Train, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run("run", options={"tensorboard": True})
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("grad_norm")] == [0, 1, 2, 3, 4, 5]


def test_missing_tensorboard_is_named_with_its_extra(run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(InputError, match=r"pip install 'oomph\[track\]'"):
        run("run", options={"tensorboard": True})


def test_missing_safetensors_is_named_before_the_run(
    run: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(InputError, match=r"pip install 'oomph\[train\]'"):
        run("run", options={"export": True})
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_wandb_without_wandb_says_what_to_install(run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="pip install wandb"):
        run("run", wandb_log=True)


def test_wandb_gets_the_settings_and_the_figures(run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    logged: list[dict[str, float]] = []
    begun: list[dict[str, object]] = []
    tracked = SimpleNamespace(log=logged.append, finish=lambda: logged.append({"finished": 1}))

    def init(**settings: object) -> SimpleNamespace:
        begun.append(settings)
        return tracked

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    run("run", wandb_log=True, wandb_project="mine", max_iters=2)
    assert begun[0]["project"] == "mine"
    assert [line["iter"] for line in logged if "loss" in line] == [0, 1]
    assert logged[-1] == {"finished": 1}


def test_a_runs_folder_is_read_by_the_runs_room(run: Train, tmp_path: Path) -> None:
    run("run", eval_interval=3)
    found = runs.read(tmp_path / "run")
    assert found.steps.count == 6


def test_gpu_memory_is_compared_with_allocated_and_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 100 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 120 * 2**20)
    on_card = plan("gpt2", "RTX 4070")
    allocated, reserved = compare_memory(on_card, MemoryMeter(torch.device("cuda")))
    assert allocated == PredictedVsActual(on_card.memory.allocated_mib, 100)
    assert reserved == PredictedVsActual(on_card.memory.reserved_mib, 120)


def test_cpu_memory_is_compared_with_the_plans_total() -> None:
    on_cpu = plan({"n_layer": 1, "n_head": 1, "n_embd": 64}, replace(devices.find("RTX 4070"), kind="cpu"))
    meter = MemoryMeter(torch.device("cpu"))
    known, nothing = compare_memory(on_cpu, meter)
    assert known.predicted == on_cpu.memory.total_mib and nothing == PredictedVsActual(None, None)
    assert known.actual is not None and known.actual >= meter.began_mib > 50
    own = meter.with_own_share(replace(on_cpu.device, context_mib=7, optimizer_mib=9))
    assert (own.context_mib, own.optimizer_mib) == (round(meter.began_mib), 0)


@pytest.mark.parametrize(("waited", "actual_ms"), [(0.0, 20.0), (0.4, 8.0)])
def test_a_step_on_a_busy_cpu_is_compared_in_processor_time(
    monkeypatch: pytest.MonkeyPatch, waited: float, actual_ms: float
) -> None:
    times = StepTimes(torch.device("cpu"))
    monkeypatch.setattr(result_module, "waited_s", lambda _: waited * 0.09)
    for clock_s in (0.01, 0.02, 0.06):
        times.add(clock_s, 0.4 * clock_s)
    assert times.usual_ms() == pytest.approx((actual_ms, waited))


def test_how_long_a_step_waited_is_said_beside_its_time() -> None:
    both, none = PredictedVsActual(10.0, 20.0), PredictedVsActual(None, None)
    result = Result(
        out_dir="out", steps=1, finished=True, reason="all steps done", loss=1.0, val_loss=None, best_val_loss=None,
        tokens=1, seconds=1.0, memory_mib=both, step_ms=both, shrunk=0, batch_size=1, interrupted=False,
        reserved_mib=none, waited=0.4, again=False, ranks_mib=(both, both),
    )  # fmt: skip
    told = lines(result, on_cpu=True)
    place = next(place for place, line in enumerate(told) if "40 %" in line)
    assert told[place - 1].startswith("a step:")


def test_a_line_cut_short_by_a_kill_does_not_spoil_the_next(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step":0,"loss":4.1}\n{"step":1,"lo')
    metrics = Metrics(tmp_path, [], kept_bytes=sys.maxsize)
    metrics.write(2, loss=3.0)
    metrics.close()
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_terminal_the_live_line_is_drawn_over(tmp_path: Path) -> None:
    out = Terminal()
    log = Log(tmp_path, out)
    log.step("step 1")
    log.line("evaluated")
    log.close()
    assert out.getvalue().count("\n") == 1 and "\r\x1b[Kevaluated\n" in out.getvalue()
    assert (tmp_path / "log.txt").read_text() == "step 1\nevaluated\n"


def test_elsewhere_lines_are_plain(tmp_path: Path) -> None:
    out = io.StringIO()
    log = Log(tmp_path, out)
    log.step("step 1")
    log.line("evaluated")
    log.close()
    assert out.getvalue() == "step 1\nevaluated\n"


def test_a_steps_line_says_pace_and_plan() -> None:
    line = step_line(7, 100, 3.2, 250.0, 4096.0, 0.5, 1200.0, 60.0, 240.0)
    assert line == (
        "step 7/100, loss 3.2000, 250 ms, 4,096 tokens/s, mfu 50.0 %, 1,200 MiB, 60 s to go (planned: 240 ms a step)"
    )


def test_the_end_of_a_run_is_one_screen_and_says_what_the_percentages_are_of() -> None:
    off = PredictedVsActual(90.0, 100.0)
    result = Result(
        "out/a run", 600, True, "all steps done", 1.0, 1.1, 1.1, 600, 60.0, off, off, 0, 12,
        reserved_mib=off, ranks_mib=(off, off), waited=0.5,
    )  # fmt: skip
    told = lines(result, on_cpu=True)
    assert len(told) <= 25
    assert max(map(len, told)) <= 100
    assert sum("10 % too low" in line for line in told) == 3
    assert sum("processor time" in line for line in told) == 1
    assert "oomph sample 'out/a run'" in told[-1]
    assert not any("processor time" in line for line in lines(msgspec.structs.replace(result, waited=0.0), on_cpu=True))
