"""The plan: published figures to the printed digit, the JSON contract, and what must hold for any config."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oomph
from oomph.config import TrainConfig
from oomph.config.programs import MODEL_TYPES
from oomph.planning.plan import NOT_IN_A_STEP, _steps
from oomph.report.plan import summarise
from oomph.step import build as steps

# Three real runs on an RTX 4070: nanoGPT, vocabulary 50304, no biases, compiled.
RUN_A = {
    "n_layer": 6,
    "n_head": 6,
    "n_embd": 384,
    "block_size": 512,
    "batch_size": 16,
    "gradient_accumulation_steps": 4,
    "dtype": "float16",
}
RUN_B = {
    "n_layer": 12, "n_head": 12, "n_embd": 384, "block_size": 1024, "batch_size": 16, "gradient_accumulation_steps": 32,
    "max_iters": 20000, "dataset_tokens": 3_680_000_000,
}  # fmt: skip
RUN_C = RUN_B | {"n_embd": 768, "batch_size": 8, "gradient_accumulation_steps": 64}
CONTRACT = {
    "config": {"batch_size", "n_layer", "dtype", "trainer", "torch_version", "world_size", "sources"},
    "device": {"name", "source", "memory_mib", "usable_mib"},
    "model": {"params", "params_nanogpt", "decay_params", "no_decay_params"},
    "memory": {
        "total_mib", "allocated_mib", "reserved_mib", "context_mib", "capacity_mib", "fits", "headroom_mib", "peak_at",
        "breakdown", "low_mib", "high_mib", "p_fits",
    },
    "time": {"step_ms", "micro_step_ms", "tokens_per_s", "tflops", "mfu", "mfu_nanogpt", "hours", "low_ms", "high_ms"},
    "compute": {"flops_per_token", "flops_per_token_causal", "flops_per_step", "total_flops"},
    "data": {"tokens_per_step", "total_tokens", "dataset_tokens", "epochs", "tokens_per_param"},
    "energy": {"watts", "kwh", "cost", "currency"},
}  # fmt: skip


def test_run_a_has_the_parameters_its_log_prints() -> None:
    model = oomph.plan(RUN_A, "RTX 4070").model
    assert f"{model.params_nanogpt / 1e6:.2f}" == "29.94"
    assert (model.decay_tensors, model.decay_params) == (26, 30_130_176)


def test_run_b_has_the_tokens_passes_and_flops_its_log_implies() -> None:
    plan = oomph.plan(RUN_B, "RTX 4070")
    assert f"{plan.model.params_nanogpt / 1e6:.2f}" == "40.56"
    assert plan.data.tokens_per_step == 524_288
    assert f"{plan.data.total_tokens / 1e9:.3f}" == "10.486"
    assert plan.data.epochs is not None
    assert f"{plan.data.epochs:.2f}" == "2.85"
    assert f"{plan.compute.total_flops:.2e}" == "3.15e+18"


@pytest.mark.parametrize(
    ("config", "step_ms", "printed", "tflops", "true"),
    [(RUN_B, 3905.0, "12.9", "40.3", "69"), (RUN_C, 9340.0, "15.4", "48.0", "82")],
)
def test_a_measured_step_time_gives_nanogpts_mfu_and_the_true_one(
    config: dict[str, int], step_ms: float, printed: str, tflops: str, true: str
) -> None:
    time = oomph.plan(config, "RTX 4070", step_ms=step_ms).time
    assert time is not None
    assert time.mfu is not None
    assert f"{100 * time.mfu_nanogpt:.1f}" == printed
    assert f"{time.tflops:.1f}" == tflops
    assert f"{100 * time.mfu:.0f}" == true


def test_run_b_at_its_measured_step_time_takes_21_7_hours_and_3_9_kwh() -> None:
    plan = oomph.plan(RUN_B, "RTX 4070", step_ms=3905.0)
    assert plan.time is not None
    assert plan.energy is not None
    assert f"{plan.time.train_hours:.1f}" == "21.7"
    assert plan.energy.watts == pytest.approx(180)
    assert f"{plan.energy.watts * plan.time.train_hours / 1000:.1f}" == "3.9"


def test_the_json_has_every_key_of_the_contract() -> None:
    result = oomph.plan(RUN_B, "RTX 4070").to_dict()
    assert set(result) == {*CONTRACT, "notes", "source"}
    for section, keys in CONTRACT.items():
        assert keys <= set(result[section]), section
    msgspec.json.encode(result)


def test_a_figure_that_cannot_be_predicted_is_absent() -> None:
    from oomph import devices

    card = devices.custom("mystery card", mib=12000, tflops=None, gbs=None, watts=None)
    result = oomph.plan("gpt2", card).to_dict()
    assert "time" not in result
    assert "energy" not in result
    assert result["memory"]["fits"] in (True, False)


def test_each_value_remembers_where_it_came_from() -> None:
    sources = oomph.plan({"n_layer": 6}, "RTX 4070").to_dict()["config"]["sources"]
    assert sources["n_embd"] == "default"
    assert sources["n_layer"] != "default"
    assert "RTX 4070" in sources["dtype"]


def test_reserving_memory_for_the_desktop_shrinks_the_capacity_by_as_much() -> None:
    whole, desktop = oomph.plan("gpt2", "RTX 4070"), oomph.plan("gpt2", "RTX 4070", reserve_mib=800)
    assert whole.memory.capacity_mib is not None
    assert desktop.memory.capacity_mib == whole.memory.capacity_mib - 800


@pytest.mark.parametrize(
    "number", [{"step_ms": 5e-324}, {"step_ms": 0.0}, {"watts": float("nan")}, {"price_hour": -1.0}]
)
def test_a_number_that_cannot_be_is_refused_with_what_can(number: dict[str, Any]) -> None:
    with pytest.raises(oomph.InputError, match="try: a number from"):
        oomph.plan("gpt2", "RTX 4070", **number)


def test_a_batch_that_does_not_fit_says_so_and_a_smaller_one_fits() -> None:
    large, small = (oomph.plan(RUN_C | {"batch_size": batch}, "RTX 4070") for batch in (64, 2))
    assert large.memory.fits is False
    assert small.memory.fits is True


@st.composite
def configs(draw: st.DrawFn) -> dict[str, object]:
    heads = draw(st.integers(1, 6))
    return {
        "n_layer": draw(st.integers(1, 6)),
        "n_head": heads,
        "n_embd": heads * draw(st.sampled_from([8, 32, 42, 64])),
        "block_size": draw(st.sampled_from([1, 7, 64, 256])),
        "batch_size": draw(st.integers(1, 9)),
        "gradient_accumulation_steps": draw(st.integers(1, 5)),
        "vocab_size": draw(st.sampled_from([1, 65, 256, 50257, 50304])),
        "bias": draw(st.booleans()),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
        "compile": draw(st.booleans()),
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        "trainer": draw(st.sampled_from(["nanogpt", "oomph"])),
    }


@given(configs(), st.sampled_from(["RTX 4070", "A100 SXM4 80GB", "Tesla T4"]))
@settings(max_examples=60, deadline=None)
def test_any_plan_is_consistent_with_itself(config: dict[str, object], card: str) -> None:
    plan = oomph.plan(config, card)
    memory, time = plan.memory, plan.time
    assert math.isclose(sum(part.mib for part in memory.breakdown), memory.allocated_mib)
    assert memory.allocated_mib <= memory.reserved_mib
    assert math.isclose(memory.total_mib, memory.context_mib + memory.reserved_mib)
    assert memory.low_mib <= memory.total_mib <= memory.high_mib
    assert memory.capacity_mib is not None
    assert memory.fits == (memory.total_mib <= memory.capacity_mib)
    assert time is not None
    assert 0 < time.low_ms <= time.step_ms <= time.high_ms
    assert plan.model.params == plan.model.decay_params + plan.model.no_decay_params == sum(plan.model.groups.values())
    summarise([plan])


def test_a_plan_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import sys, oomph; oomph.plan('gpt2', 'RTX 4070'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


OTHER_VALUES = {
    "num_train_epochs": 2.0, "num_samples": 10,
    "out_dir": "elsewhere", "eval_interval": 7, "log_interval": 7, "always_save_checkpoint": False, "wandb_log": True,
    "wandb_project": "x", "wandb_run_name": "x", "dataset": "other", "learning_rate": 1.0, "max_iters": 7,
    "decay_lr": False, "warmup_iters": 7, "lr_decay_iters": 7, "min_lr": 0.5, "dataset_tokens": 7, "seed": 7,
    "expandable_segments": True, "link": "pcie4", "network": "ib400",
    "sample_tokens": 7, "time_limit": 7.0, "until_loss": 7.0,
}  # fmt: skip


@pytest.mark.parametrize("compiled", [True, False])
def test_what_steps_are_told_apart_without_changes_none_of_them(compiled: bool) -> None:
    def operations(config: TrainConfig) -> list[object]:
        return [msgspec.to_builtins(steps.build(config, True, first)) for first in (True, False)]

    assert set(OTHER_VALUES) == set(NOT_IN_A_STEP)
    keys = {"n_layer": 2, "n_head": 2, "n_embd": 64, "compile": compiled, "dtype": "bfloat16", "attention": "flash"}
    settled = oomph.plan(keys, "RTX 4070").config
    expected = operations(settled)
    for key, value in OTHER_VALUES.items():
        assert getattr(settled, key) != value
        assert operations(msgspec.structs.replace(settled, **{key: value})) == expected, key


def test_a_plan_after_others_of_the_same_steps_is_the_plan_made_first() -> None:
    keys = {"n_layer": 2, "n_head": 2, "n_embd": 64, "batch_size": 64}
    for card in ("RTX 4070", "A100 SXM4 80GB"):
        later = oomph.plan(keys | {"max_iters": 5}, card).to_dict()
        _steps.cache_clear()
        assert oomph.plan(keys | {"max_iters": 5}, card).to_dict() == later
        oomph.plan(keys, "T4")


def test_a_plan_without_a_time_says_why() -> None:
    plan = oomph.plan({"dtype": "float16"}, "GTX 1660")
    assert plan.time is None
    assert any("GeForce GTX 1660" in note and "time" in note for note in plan.notes)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", [name for name in MODEL_TYPES if name not in ("nanochat", "qwen")])
def test_one_token_of_one_sequence_is_planned(family: str, compiled: bool) -> None:
    keys = {"trainer": "hf", "model_type": family, "n_layer": 2, "batch_size": 1, "block_size": 1, "compile": compiled}
    assert oomph.plan(keys, "A100 80GB").data.tokens_per_step == 1


@pytest.mark.parametrize(("spec", "extra"), [("file.py:build", "oomph[train]"), ("config.json", "oomph[hf]")])
def test_a_model_that_cannot_be_traced_here_names_the_extra(
    spec: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')
    monkeypatch.setattr("oomph.step.trace.cache.find_spec", lambda _: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(oomph.InputError) as refused:
        oomph.plan(None, "RTX 4070", model=str(tmp_path / spec))
    assert extra in str(refused.value.problems[0])
