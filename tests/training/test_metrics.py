"""metrics.jsonl, TensorBoard's files, and the lines people read."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from training_helpers import Train

from oomph import devices, plan, runs
from oomph.errors import InputError
from oomph.training.memory import MemoryMeter
from oomph.training.metrics import Metrics
from oomph.training.progress import Log, step_line
from oomph.training.result import Held, hold_memory
from oomph.training.tensorboard import crc32c, event


def test_a_figure_that_is_not_finite_is_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, [])
    metrics.write(3, loss=float("nan"), lr=None)
    metrics.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3, "loss": None}


def test_the_checksum_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, appendix B.4


def read_events(content: bytes) -> list[bytes]:
    """The messages of a TFRecord file."""
    messages, at = [], 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        messages.append(content[at + 12 : at + 12 + length])
        at += 16 + length
    return messages


def test_tensorboard_gets_every_logged_step(run: Train, tmp_path: Path) -> None:
    run("run", options={"tensorboard": True})
    (file,) = (tmp_path / "run" / "tensorboard").iterdir()
    messages = read_events(file.read_bytes())
    assert b"brain.Event:2" in messages[0]
    assert sum(b"grad_norm" in message for message in messages) == 6


def test_an_event_is_the_protobuf_that_tensorboard_expects() -> None:
    # field 1 double, field 2 varint, field 5 { field 1 { field 1 "a", field 2 float } }
    expected = b"\x09" + struct.pack("<d", 1.0) + b"\x10\xac\x02" + b"\x2a\x0a" + b"\x0a\x08" + b"\x0a\x01a" + b"\x15"
    assert event(300, {"a": 2.0}, 1.0) == expected + struct.pack("<f", 2.0)


def test_wandb_without_wandb_says_what_to_install(run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="pip install wandb"):
        run("run", wandb_log=True)


def test_wandb_gets_the_settings_and_the_figures(run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
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


def test_memory_is_held_against_the_figure_of_its_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 100 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 120 * 2**20)
    on_card = plan("gpt2", "RTX 4070")
    allocated, reserved = hold_memory(on_card, MemoryMeter(torch.device("cuda")))
    assert allocated == Held(on_card.memory.allocated_mib, 100)
    assert reserved == Held(on_card.memory.reserved_mib, 120)


def test_on_a_cpu_the_whole_process_is_held_against_the_plans_total() -> None:
    on_cpu = plan({"n_layer": 1, "n_head": 1, "n_embd": 64}, replace(devices.find("RTX 4070"), kind="cpu"))
    unmeasured = replace(on_cpu, memory=replace(on_cpu.memory, total_mib=50.0, context_mib=0.0))
    meter = MemoryMeter(torch.device("cpu"))
    known, nothing = hold_memory(on_cpu, meter)
    assert known.predicted == on_cpu.memory.total_mib and nothing == Held(None, None)
    assert known.actual is not None and known.actual >= meter.began_mib > 50
    assert hold_memory(unmeasured, meter)[0].predicted == 50 + meter.began_mib


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
        "step 7/100, loss 3.2000, 250 ms, 4,096 tokens/s, mfu 50.0 %, 1,200 MiB, 60 s left (plan 240 ms a step)"
    )
