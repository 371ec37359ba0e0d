"""What the report says about runs that were guessed about: who holds the peak, in which share, what would remove it."""

from __future__ import annotations

import re

import pytest

import oomph
from oomph.planning import peak
from oomph.planning.plan import without_returned_logits
from oomph.report.plan import summarise
from oomph.report.terminal import segments
from oomph.report.timeline import sparkline
from oomph.step.ops import Kind
from oomph.units import MIB

SHAPE_A = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 512}
RUN_A = SHAPE_A | {"batch_size": 16, "gradient_accumulation_steps": 4}
RUN_D = {"batch_size": 16, "gradient_accumulation_steps": 32}


def share_of_logits(plan: oomph.Plan) -> float:
    parts = {part.name: part.mib for part in plan.memory.breakdown}
    return parts[Kind.LOGITS.value] / plan.memory.allocated_mib


def test_run_d_compiled_holds_three_logits_and_needs_but_one_to_fit() -> None:
    plan = oomph.plan(RUN_D, "RTX 4070")
    one_mib = 16 * 1024 * 50304 * 2 / MIB
    held = [b for b in plan.memory.peak.live if b.kind is Kind.LOGITS and b.bytes / MIB > 0.9 * one_mib]
    lean = without_returned_logits(plan)
    assert plan.memory.fits is False
    assert len(held) == 3
    assert 0.35 < share_of_logits(plan) < 0.42
    assert lean is not None
    assert lean.memory.fits


def test_the_report_says_what_a_step_that_returns_only_the_loss_would_need() -> None:
    plan = oomph.plan(RUN_D, "RTX 4070")
    lean = without_returned_logits(plan)
    assert lean is not None
    told = [text for name, text in summarise([plan], lean, brief=True).facts if name == plan.program]
    without = [text for name, text in summarise([plan], brief=True).facts if name == plan.program]
    assert f"{lean.memory.total_mib:,.0f} MiB" in told[-1]
    assert told[:-1] == without


def test_run_ds_layers_keep_about_five_and_a_half_gib_not_nine() -> None:
    plan = oomph.plan(RUN_D, "RTX 4070")
    kinds = (Kind.ACTIVATIONS, Kind.ATTENTION)
    held_gib = sum(b.bytes for b in plan.memory.peak.live if b.kind in kinds) / 2**30
    assert 5.0 < held_gib < 5.7


def test_run_d_eager_peaks_in_the_losss_backward_and_more_than_half_is_logits() -> None:
    plan = oomph.plan(RUN_D | {"compile": False}, "RTX 4070")
    assert "backward: loss" in plan.memory.peak_at
    assert 16 < plan.memory.allocated_mib / 1024 < 17
    assert share_of_logits(plan) > 0.5


def test_run_as_missing_gibibytes_are_its_logits() -> None:
    plan = oomph.plan(RUN_A | {"dtype": "float16"}, "RTX 4070")
    assert share_of_logits(plan) > 0.5
    assert plan.memory.total_mib == pytest.approx(4464, rel=0.08)  # what nvidia-smi showed for the process


def test_compiling_saves_memory_rather_than_costing_any() -> None:
    compiled, eager = (oomph.plan(RUN_D | {"compile": value}, "RTX 4070").memory for value in (True, False))
    assert compiled.allocated_mib < 0.75 * eager.allocated_mib


def test_tf32_saves_no_memory() -> None:
    plans = [oomph.plan(RUN_A | {"dtype": "float32", "allow_tf32": value}, "RTX 4070") for value in (True, False)]
    assert plans[0].memory.total_mib == plans[1].memory.total_mib


def test_the_bars_cells_add_up_to_its_length() -> None:
    parts = (("parameters", 33.3), ("gradients", 33.3), ("activations", 33.4))
    assert sum(width for _, width in segments(parts, 100.0, 40)) == 40
    assert sum(width for _, width in segments(parts, 200.0, 40)) == 20


def test_the_line_over_a_step_is_as_wide_as_asked_and_full_at_the_peak() -> None:
    line, names = sparkline(oomph.plan(RUN_A, "RTX 4070"), 60)
    assert len(line) == 60
    assert "█" in line
    assert "micro-step 1" in names


def test_the_summary_of_a_measured_step_has_one_pace() -> None:
    summary = summarise([oomph.plan(RUN_D, "RTX 4070", step_ms=9340.0)])
    assert [pace.case for pace in summary.paces] == ["as given"]
    assert summary.paces[0].step == "9.34 s"


@pytest.mark.parametrize(
    ("keys", "fused"),
    [
        ({}, True),
        ({"attention": "math"}, False),
        ({"trainer": "hf", "model_type": "qwen3", "num_key_value_heads": 8}, True),
        ({"trainer": "hf", "model_type": "qwen3", "dtype": "float32", "num_key_value_heads": 8}, False),
        ({"trainer": "hf", "model_type": "gemma2", "num_key_value_heads": 4}, False),
    ],
)
def test_scores_are_said_to_be_left_out_only_where_one_kernel_computes_attention(
    keys: dict[str, object], fused: bool
) -> None:
    small = {"n_layer": 2, "n_embd": 256, "n_head": 16, "vocab_size": 512, "block_size": 64, "compile": False}
    sentences = peak.peak_sentences(oomph.plan({**small, **keys}, "RTX 4070"))
    assert any("T × T" in sentence for sentence in sentences) == fused


def test_mfu_as_nanogpt_prints_it_is_said_of_nanogpt_alone() -> None:
    for trainer in ("nanogpt", "oomph", "hf", "torch", "nanochat"):
        facts = summarise([oomph.plan({"trainer": trainer, "n_layer": 1}, "RTX 4070")]).facts
        assert any("mfu" in sentence for _, sentence in facts) == (trainer == "nanogpt")


def test_tokens_a_parameter_are_never_printed_as_none() -> None:
    facts = dict(summarise([oomph.plan({"n_layer": 1, "max_iters": 1}, "RTX 4070")]).facts)
    assert re.search(r", 0\.0\d+ a parameter", facts["data"])


def test_one_of_a_thing_is_singular() -> None:
    one = ("n_layer", "n_head", "block_size", "batch_size", "gradient_accumulation_steps", "max_iters")
    found = summarise([oomph.plan({**dict.fromkeys(one, 1), "compile": False}, "RTX 4070")])
    text = " ".join([found.title, found.setting, *(sentence for _, sentence in found.facts)])
    assert not re.search(r"(?<![\d.,])1 (?!steps that)\w+s\b(?<!s a)", text), text


@pytest.mark.parametrize(("trainer", "params"), [("nanogpt", 123_653_376), ("hf", 124_439_808)])
def test_each_program_counts_gpt2s_parameters_its_own_way(trainer: str, params: int) -> None:
    keys = {"trainer": trainer, "vocab_size": 50257, "bias": True}
    assert oomph.plan(keys, "RTX 4070").model.params_nanogpt == params
