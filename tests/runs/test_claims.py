"""The reports of the measured runs A to D answer the claims that people were told about them."""

from __future__ import annotations

import math

import pytest
import simulate
from explaining import CARD, figures, get, number

from oomph.runs import Explanation, compare, read_text
from oomph.runs.findings.time import HOST
from oomph.step.ops import Kind


def test_1_run_d_fails_for_its_logits_and_its_layers_keep_about_5_gib(d: Explanation) -> None:
    peak = get(d, "memory.peak")
    assert 5.0 * 1024 < number(peak, "activations") + number(peak, "attention") < 5.6 * 1024
    assert number(peak, "logits and loss") == pytest.approx(3 * 1572, rel=0.01)
    assert number(peak, "allocated_mib") == pytest.approx(12.0 * 1024, rel=0.08)
    logits = get(d, "memory.logits")
    assert (number(logits, "half_mib"), number(logits, "float32_mib")) == (1572, 3144)
    assert d.plan is not None
    assert number(logits, "patched_total_mib") < d.plan.memory.capacity_mib  # without the other two it fits
    assert round(number(logits, "patched_total_mib")) in figures(peak.text)
    eager = get(d, "memory.compile")
    assert "backward: loss" in eager.text  # the operation where it peaks
    assert {round(number(eager, "eager_mib")), 56} <= figures(eager.text)  # 56 % of it logits and loss


def test_2_run_a_needs_no_multiplier_its_logits_are_more_than_half(a: Explanation) -> None:
    found = get(a, "memory.predicted")
    assert number(found, "observed_mib") == 4464
    assert number(found, "predicted_mib") == pytest.approx(4464, rel=0.05)
    assert number(found, "logits and loss") > 0.5 * number(get(a, "memory.peak"), "allocated_mib")
    share = number(found, "logits and loss") / number(get(a, "memory.peak"), "allocated_mib")
    assert {round(number(found, "logits and loss")), round(100 * share)} <= figures(found.text)
    assert found.severity == "info"


def test_3_not_returning_the_logits_beats_halving_the_micro_batch(d: Explanation) -> None:
    logits = get(d, "memory.logits")
    assert {round(number(logits, "saved_mib")), round(number(logits, "patched_total_mib"))} <= figures(logits.text)
    assert "8 × 64" in logits.text
    assert d.fit is not None
    patched = next(option for option in d.fit.options if option.patched and option.fits)
    halved = next(option for option in d.fit.options if option.plan.config.batch_size == 8 and option.fits)
    assert (patched.tokens_per_s or 0) > (halved.tokens_per_s or 0)


def test_4_mfu_is_69_and_82_percent_of_the_cards_own_peak(b: Explanation, c: Explanation) -> None:
    for explanation, printed, tflops, true in ((b, 12.9, 40.3, 0.69), (c, 15.4, 48.0, 0.82)):
        found = get(explanation, "time.mfu")
        assert number(found, "tflops") == pytest.approx(tflops, abs=0.15)
        assert number(found, "mfu") == pytest.approx(true, abs=0.006)
        assert number(found, "peak_tflops") == 58.3
        assert {printed, 312} <= figures(found.text)


def test_5_run_b_is_2_55e18_flops_and_3_15e18_with_attention(b: Explanation) -> None:
    found = get(b, "time.flops")
    assert number(found, "six_n_d") == pytest.approx(2.55e18, rel=0.002)
    assert number(found, "total_flops") == pytest.approx(3.15e18, rel=0.002)
    assert "2.55 × 10¹⁸" in found.text
    assert round(number(found, "six_n_d") / 1e15) in figures(found.text)  # PFLOP


def test_6_a_parameter_takes_16_bytes_and_500_mb_are_float32(c: Explanation) -> None:
    found = get(c, "memory.per_parameter")
    assert number(found, "bytes_per_parameter") == 16
    assert number(found, "weights_mib") * 2**20 == pytest.approx(497e6, rel=0.01)
    assert c.plan is not None
    copies = next(part.mib for part in c.plan.memory.breakdown if part.name == Kind.HALF_WEIGHTS.value)
    assert round(copies) in figures(found.text)


def test_7_cards_with_more_memory_are_named_by_the_catalogue(d: Explanation) -> None:
    text = get(d, "card.larger").text
    of_24, of_48 = (text.split(f"{size} GB: ")[1].split(";")[0] for size in (24, 48))
    assert "RTX 3090" in of_24
    assert "RTX 4090" in of_24
    assert "RTX A6000" in of_48
    assert "RTX 3060 12GB" in text.split("16 GB: ")[0]


def test_8_the_rest_of_the_card_is_other_programs_not_the_context(a: Explanation) -> None:
    found = get(a, "memory.others")
    assert number(found, "others_mib") == 6582 - 4464
    assert a.plan is not None
    assert round(a.plan.device.context_mib) in figures(found.text)


def test_9_tokens_a_step_are_the_same_and_56_thousand_a_second_are_right(b: Explanation, c: Explanation) -> None:
    for explanation, rate, split in ((b, 134_000, {16, 32}), (c, 56_100, {8, 64})):
        found = get(explanation, "time.step")
        assert found.numbers["tokens_per_step"] == 524_288
        assert number(found, "tokens_per_s") == pytest.approx(rate, rel=0.01)
        assert split <= figures(found.text)


def test_10_mfu_rises_with_the_width_not_with_a_smaller_micro_batch(c: Explanation) -> None:
    found = get(c, "time.width")
    assert number(found, "mfu_half_width") < number(found, "mfu") - 0.05
    assert number(found, "mfu_half_batch") < number(found, "mfu")
    both = compare([read_text(simulate.run_b(), "B"), read_text(simulate.run_c(), "C")], CARD)
    reason = next(each.reason for each in both.verdicts if each.goal == "hardware use")
    assert {768, 384} <= figures(reason)
    assert "smaller_micro_batch" in [note.id for note in both.notes]


def test_11_a_loss_of_22_is_a_perplexity(b: Explanation) -> None:
    found = get(b, "loss.now")
    assert {22, 3.1} <= figures(found.text)
    assert number(found, "perplexity") == pytest.approx(math.exp(4.4593))


def test_12_the_cost_of_half_the_micro_batch_is_predicted(d: Explanation) -> None:
    found = get(d, "time.micro_batch")
    assert 0 < number(found, "half") < 0.10
    assert {8, 64, 32, 16} <= figures(found.text)
    assert number(get(d, "time.bound"), HOST) == 0  # Python costs nothing


def test_13_compile_saves_memory_tf32_and_scores_do_not_and_hours_are_21_7(b: Explanation, d: Explanation) -> None:
    assert 0.3 < number(get(d, "memory.compile"), "saved") < 0.5
    nothing = get(d, "memory.no_help")
    assert nothing.numbers["tf32_mib"] == 0
    assert round(number(nothing, "scores_per_layer_mib")) in figures(nothing.text)
    assert number(get(b, "model.size"), "params_nanogpt") == pytest.approx(40.56e6, rel=1e-4)
    assert 75 in figures(get(b, "memory.per_parameter").text)  # tensors with Adam moments
    assert number(get(b, "time.left"), "hours") == pytest.approx(21.7, abs=0.05)
    assert number(get(b, "data.passes"), "passes") == pytest.approx(2.85, abs=0.005)
