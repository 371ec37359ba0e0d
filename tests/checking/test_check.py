"""`oomph check`: steps that really run, held against the plan; and every way in which they may not."""

from __future__ import annotations

import json
import os
import signal

import pytest

import oomph
from oomph import config as configs
from oomph.checking.check import check
from oomph.checking.launch import Job, JobFailed, PowerWatch, StepDone, run_job
from oomph.cli.main import main
from oomph.config import TrainConfig
from oomph.devices import ratios
from oomph.devices.nvml import Sample
from oomph.errors import InputError

pytestmark = pytest.mark.usefixtures("own_folder")
TINY = {
    "device": "cpu", "compile": False, "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_size": 2,
    "vocab_size": 512, "gradient_accumulation_steps": 3,
}  # fmt: skip
FLAGS = [f"--{key}={value}" for key, value in TINY.items()]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["nanogpt", "oomph"])
def test_allocated_memory_is_what_was_planned(trainer: str) -> None:
    found = oomph.check(TINY | {"trainer": trainer}, steps=2)
    assert found.failure is None
    assert found.error.allocated_mib == pytest.approx(0, abs=0.03)
    assert found.measured.process_mib is not None
    assert found.measured.process_mib > (found.measured.allocated_mib or 0)
    assert len(found.steps_ms) == 2
    assert all(step_ms > 0 for step_ms in found.steps_ms)
    assert found.micro_steps == 2
    assert any("2 of 3 micro-steps" in note for note in found.notes)


def test_the_command_prints_the_contract_and_keeps_the_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["check", *FLAGS, "--trainer=oomph", "--steps=1", "--json", "--save"])
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert code == 0
    assert result["outcome"] == "measured"
    for side in ("predicted", "measured", "error"):
        assert {"allocated_mib", "process_mib"} <= set(result[side]["memory"])
    assert result["error"]["memory"]["allocated_mib"] == pytest.approx(0, abs=0.03)
    assert result["measured"]["time"]["step_ms"] > 0
    assert "random tokens" in result["data"]
    if "ratios" in result:  # a busy machine's are not kept
        assert ratios.ratios_file().exists()
        assert str(ratios.ratios_file()) in err


def test_a_damaged_file_of_ratios_is_found_out_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    ratios.ratios_file().parent.mkdir(parents=True)
    ratios.ratios_file().write_text("{")
    assert main(["check", *FLAGS, "--save"]) == 2
    assert str(ratios.ratios_file()) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--eval_only=True"], "eval_only"),
        (["--world_size=2", "--gradient_accumulation_steps=4"], "world_size"),
        (["--steps=0"], "--steps"),
        (["--device=cuda"], "device"),
    ],
)
def test_what_cannot_be_checked_is_refused_with_its_reason(
    flags: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = [flag for flag in FLAGS if flag.partition("=")[0] not in {each.partition("=")[0] for each in flags}]
    assert main(["check", *rest, *flags]) == 2
    assert word in capsys.readouterr().err


def test_what_does_not_fit_is_not_tried_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [flag for flag in FLAGS if not flag.startswith(("--n_embd", "--n_head"))]
    assert main(["check", *flags, "--n_embd=500000", "--n_head=1"]) == 1
    assert "--force" in capsys.readouterr().err


@pytest.mark.slow
def test_running_out_of_memory_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [flag for flag in FLAGS if not flag.startswith(("--n_embd", "--n_head"))]
    assert main(["check", *flags, "--n_embd=500000", "--n_head=1", "--force"]) == 1
    assert "\n✗ " in capsys.readouterr().out


def job(**keys: object) -> Job:
    settled = {"dtype": "float32", "return_logits": True, "loss_chunk": 0, "optimizer_loop": "forloop"}
    config = TrainConfig(**{**TINY, **settled, **keys})  # type: ignore[arg-type]
    return Job(config, "cpu", 1, 2, allocations=False, data=None)


def test_a_process_that_the_system_kills_has_run_out_of_memory() -> None:
    ended = run_job(job(), lambda _: None, lambda process: os.kill(process, signal.SIGKILL))
    assert isinstance(ended, JobFailed)
    assert ended.out_of_memory


def test_a_program_that_fails_tells_why_and_ctrl_c_leaves_no_process_behind() -> None:
    ended = run_job(job(n_head=0), lambda _: None, lambda _: None)
    assert isinstance(ended, JobFailed)
    assert not ended.out_of_memory
    assert "Error" in ended.reason
    children: list[int] = []

    def interrupt(_: StepDone) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(job(), interrupt, children.append)
    with pytest.raises(ProcessLookupError):
        os.kill(children[0], 0)


def test_power_is_the_median_after_the_first_step() -> None:
    draws = iter([20.0] + [150.0, 170.0, 160.0] * 100)

    def look() -> list[Sample]:
        return [Sample(0, "a card", 12282, 4000, watts=next(draws), processes=((77, 4000.0),))]

    with PowerWatch(look, sample_s=0.001) as power:
        power.follow(77)
        while len(power.seen) < 1:
            pass
        power.restart()
        while len(power.seen) < 30:
            pass
    assert power.watts() == pytest.approx(160, abs=10)


def test_a_check_of_python_callers_refuses_what_the_command_refuses() -> None:
    with pytest.raises(oomph.InputError, match="too few"):
        oomph.check(TINY, steps=0)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_by_hand_is_checked_as_it_is_planned(dropout: float) -> None:
    keys = {"attention": "math", "block_size": 128, "batch_size": 1, "dropout": dropout}
    found = oomph.check(TINY | keys, steps=1)
    assert found.failure is None
    assert found.error.allocated_mib == pytest.approx(0, abs=0.001)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"trainer": "oomph", "return_logits": True}, "oomph train never returns logits"),
        ({"attention": "efficient"}, "no memory-efficient attention on a CPU"),
        ({"trainer": "oomph", "dtype": "float16", "autocast": False}, "float16 weights cannot be trained"),
    ],
)
def test_what_cannot_run_is_refused_by_a_check_and_noted_by_a_plan(keys: dict[str, object], said: str) -> None:
    with pytest.raises(oomph.InputError, match=said):
        oomph.check(TINY | keys)
    assert any(said in note and "cannot run" in note for note in oomph.plan(TINY | keys).notes)
    assert not any("cannot run" in note for note in oomph.plan(TINY).notes)


def test_all_that_is_wrong_with_a_command_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--foo=3", "--n_embd=65", "--batch_size=0"]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in ("foo", "n_embd", "batch_size"))


@pytest.mark.slow
def test_half_precision_on_a_cpu_is_planned_as_it_runs() -> None:
    found = oomph.check(TINY | {"trainer": "oomph", "dtype": "bfloat16"}, steps=1)
    assert found.failure is None
    assert found.error.allocated_mib == pytest.approx(0, abs=0.001)


def test_a_program_that_a_check_cannot_run_is_refused() -> None:
    with pytest.raises(InputError) as refused:
        check(configs.load("nanochat-d4", [("device", "cpu", "--device")]))
    (problem,) = refused.value.problems
    assert problem.found == "nanochat"
    assert problem.allowed == "nanogpt, oomph, hf, trl, torch"
