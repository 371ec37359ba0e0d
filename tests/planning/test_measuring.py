"""This CPU is measured only once nothing can be wrong: measuring takes seconds, an error should not."""

from __future__ import annotations

from pathlib import Path

import pytest

import oomph
from oomph.cli.main import main
from oomph.devices import cpu_rates

RATES = cpu_rates.CpuRates(
    tflops_fp32=0.1,
    tflops_bf16=0.02,
    copy_gbs=10.0,
    cached_gbs=50.0,
    math_gbs=9.0,
    page_s_per_byte=5e-10,
    dispatch_s=2e-6,
    score_s=2e-9,
    long_score_s=1e-9,
    random_s=7e-9,
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
    """Grows by one with each measurement; nothing is kept from before."""
    calls: list[bool] = []

    def measure() -> cpu_rates.CpuRates:
        calls.append(True)
        return RATES

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("OOMPH_MEASURE", raising=False)
    monkeypatch.setattr(cpu_rates, "_measure", measure)
    return calls


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "gpt2", "--device=cpu", "--step_ms=nan"],
        ["plan", "gpt2", "--device=cpu", "--n_embd=770"],
        ["plan", "gpt2", "--device=cpu", "--currency=EUR"],
        ["plan", "gpt2", "--device=cpu", "--model", "nowhere.py:build"],
        ["fit", "gpt2", "--device=cpu", "--hours=nan"],
        ["fit", "gpt2", "--device=cpu", "--option=1"],
    ],
)
def test_an_input_error_comes_before_measuring(argv: list[str], measured: list[bool]) -> None:
    assert main(argv) == 2
    assert not measured


def test_a_plan_measures_the_cpu_once_for_both_trainers(
    measured: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", "gpt2", "--device=cpu", "--n_layer=1", "--n_embd=64", "--n_head=2", "--batch_size=1"])
    assert len(measured) == 1
    assert "tokens" in capsys.readouterr().out


def test_the_python_plan_measures_after_its_checks(measured: list[bool]) -> None:
    with pytest.raises(oomph.InputError):
        oomph.plan({"device": "cpu"}, step_ms=0.0)
    assert not measured
    assert oomph.plan({"device": "cpu", "n_layer": 1}).time is not None
    assert len(measured) == 1
