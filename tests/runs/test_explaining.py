"""The reports of the measured runs A to D answer the claims that people were told about them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from oomph.config import TrainConfig, to_toml
from oomph.planner import plan
from oomph.predict.allocator_timeline import trace
from oomph.runs import Explanation, Finding, compare, explain, read_text
from oomph.runs.builder import Builder
from oomph.runs.reader import give
from oomph.step import snapshot

CARD = "RTX 4070"


def explained(text: str, name: str, gpu: str | None = CARD, with_fixes: bool = False, **given_keys: str) -> Explanation:
    builder = Builder(name)
    builder.run = read_text(text, name)
    give(builder, [(key, value, f"--{key}={value}") for key, value in given_keys.items()])
    return explain(builder.run, gpu, with_fixes=with_fixes)


@pytest.fixture(scope="module")
def a() -> Explanation:
    return explained(simulate.run_a(), "A", None)


@pytest.fixture(scope="module")
def b() -> Explanation:
    return explained(simulate.run_b(), "B", dataset_tokens="3.68B")


@pytest.fixture(scope="module")
def c() -> Explanation:
    return explained(simulate.run_c(), "C")


@pytest.fixture(scope="module")
def d() -> Explanation:
    return explained(simulate.run_d(), "D", with_fixes=True)


def get(explanation: Explanation, name: str) -> Finding:
    found = explanation.finding(name)
    assert found is not None, [finding.id for finding in explanation.findings]
    return found


def number(finding: Finding, name: str) -> float:
    value = finding.numbers[name]
    assert isinstance(value, int | float)
    return float(value)


# --- the thirteen claims -----------------------------------------------------------------------------


def test_1_run_d_fails_for_its_logits_and_its_layers_keep_about_5_gib(d: Explanation) -> None:
    peak = get(d, "memory.peak")
    assert 5.0 * 1024 < number(peak, "activations") + number(peak, "attention") < 5.6 * 1024
    assert number(peak, "logits and loss") == pytest.approx(3 * 1572, rel=0.01)
    assert number(peak, "allocated_mib") == pytest.approx(12.0 * 1024, rel=0.08)
    logits = get(d, "memory.logits")
    assert (number(logits, "half_mib"), number(logits, "float32_mib")) == (1572, 3144)
    assert d.plan is not None
    assert number(logits, "patched_total_mib") < d.plan.memory.capacity_mib  # without the other two it fits
    assert "the run would fit" in peak.text
    eager = get(d, "memory.compile").text
    assert "backward: loss" in eager
    assert "56 % of them logits and loss" in eager


def test_2_run_a_needs_no_multiplier_its_logits_are_more_than_half(a: Explanation) -> None:
    found = get(a, "memory.predicted")
    assert number(found, "observed_mib") == 4464
    assert number(found, "predicted_mib") == pytest.approx(4464, rel=0.05)
    assert number(found, "logits and loss") > 0.5 * number(get(a, "memory.peak"), "allocated_mib")
    assert "no multiplier is needed" in found.text
    assert found.severity == "info"


def test_3_not_returning_the_logits_beats_halving_the_micro_batch(d: Explanation) -> None:
    text = get(d, "memory.logits").text
    assert "changes nothing in the mathematics" in text
    assert "the step that returns no logits is" in text
    assert "faster than that" in text
    assert d.fit is not None
    patched = next(option for option in d.fit.options if option.patched and option.fits)
    halved = next(option for option in d.fit.options if option.plan.config.batch_size == 8 and option.fits)
    assert (patched.tokens_per_s or 0) > (halved.tokens_per_s or 0)


def test_4_mfu_is_69_and_82_percent_of_the_cards_own_peak(b: Explanation, c: Explanation) -> None:
    for explanation, printed, tflops, true in ((b, "12.9", 40.3, 0.69), (c, "15.4", 48.0, 0.82)):
        found = get(explanation, "time.mfu")
        assert number(found, "tflops") == pytest.approx(tflops, abs=0.15)
        assert number(found, "mfu") == pytest.approx(true, abs=0.006)
        assert number(found, "peak_tflops") == 58.3
        assert f"the log prints {printed} %, because nanoGPT divides by 312" in found.text.replace("The log", "the log")


def test_5_run_b_is_2_55e18_flops_and_3_15e18_with_attention(b: Explanation) -> None:
    found = get(b, "time.flops")
    assert number(found, "six_n_d") == pytest.approx(2.55e18, rel=0.002)
    assert number(found, "total_flops") == pytest.approx(3.15e18, rel=0.002)
    assert "2.55 × 10¹⁸" in found.text
    assert "PFLOP" in found.text


def test_6_a_parameter_takes_16_bytes_and_500_mb_are_float32(c: Explanation) -> None:
    found = get(c, "memory.per_parameter")
    assert number(found, "bytes_per_parameter") == 16
    assert number(found, "weights_mib") * 2**20 == pytest.approx(497e6, rel=0.01)
    assert "keeps weights and gradients in float32" in found.text
    assert "half-precision copy" in found.text


def test_7_cards_with_more_memory_are_named_by_the_catalogue(d: Explanation) -> None:
    text = get(d, "card.larger").text
    of_24, of_48 = (text.split(f"{size} GB: ")[1].split(";")[0] for size in (24, 48))
    assert "RTX 3090" in of_24
    assert "RTX 4090" in of_24
    assert "RTX A6000" in of_48
    assert "RTX 3060 12GB" in text.split("Enough")[0]


def test_8_the_rest_of_the_card_is_other_programs_not_the_context(a: Explanation) -> None:
    found = get(a, "memory.others")
    assert number(found, "others_mib") == 6582 - 4464
    assert "already holds its CUDA context" in found.text
    assert "it is the desktop and other programs" in found.text


def test_9_tokens_a_step_are_the_same_and_56_thousand_a_second_are_right(b: Explanation, c: Explanation) -> None:
    for explanation, rate in ((b, 134_000), (c, 56_100)):
        found = get(explanation, "time.step")
        assert found.numbers["tokens_per_step"] == 524_288
        assert number(found, "tokens_per_s") == pytest.approx(rate, rel=0.01)
        assert "as many optimizer steps" in found.text


def test_10_mfu_rises_with_the_width_not_with_a_smaller_micro_batch(c: Explanation) -> None:
    found = get(c, "time.width")
    assert number(found, "mfu_half_width") < number(found, "mfu") - 0.05
    assert number(found, "mfu_half_batch") < number(found, "mfu")
    both = compare([read_text(simulate.run_b(), "B"), read_text(simulate.run_c(), "C")], CARD)
    reason = next(each.reason for each in both.verdicts if each.goal == "hardware use")
    assert "wider (768 against 384): larger matrices" in reason
    assert any("its smaller micro-batch does not raise it" in note for note in both.notes)


def test_11_a_loss_of_22_is_a_perplexity(b: Explanation) -> None:
    found = get(b, "loss.now")
    assert "a figure like 22 is a perplexity, that of a loss of 3.1" in found.text
    assert number(found, "perplexity") == pytest.approx(math.exp(4.4593))


def test_12_the_cost_of_half_the_micro_batch_is_predicted(d: Explanation) -> None:
    found = get(d, "time.micro_batch")
    assert 0 < number(found, "half") < 0.10
    assert "the tokens are the same" in found.text.lower()
    assert "Python costs nothing" in get(d, "time.bound").text


def test_13_compile_saves_memory_tf32_and_scores_do_not_and_hours_are_21_7(b: Explanation, d: Explanation) -> None:
    assert 0.3 < number(get(d, "memory.compile"), "saved") < 0.5
    nothing = get(d, "memory.no_help")
    assert nothing.numbers["tf32_mib"] == 0
    assert "stores none of the T × T scores" in nothing.text
    assert get(b, "model.size").title == "The model has 40.56 M parameters"
    assert "Adam keeps its moments for all 75 tensors" in get(b, "memory.per_parameter").text
    assert "20,000 steps at 3.91 s are 21.7 h" in get(b, "time.left").text
    assert get(b, "data.passes").title == "The run goes 2.85 times over the data"


# --- out of memory -----------------------------------------------------------------------------------


def test_1_54_gib_in_an_evaluation_are_named() -> None:
    log = simulate.text(simulate.preamble(simulate.C, simulate.RUN)) + simulate.EVALUATION_TRACEBACK
    found = get(explained(log + simulate.OOM_MESSAGES["2.5"] + "\n", "eval"), "memory.oom")
    assert found.severity == "error"
    assert "in an evaluation" in found.title
    assert "1.54 GiB = 8 × 1024 × 50304 × 4 bytes: the logits" in found.text
    assert found.numbers["tensor_bytes"] == 8 * 1024 * 50304 * 4


def test_fixes_leave_room_for_the_desktop(d: Explanation) -> None:
    assert d.fit is not None
    others = number(get(d, "memory.others"), "others_mib")
    capacity = d.fit.now.memory.capacity_mib
    assert d.plan is not None
    assert capacity == pytest.approx((d.plan.memory.capacity_mib or 0) - others)
    assert all(option.plan.memory.total_mib <= (capacity or 0) for option in d.fit.options if option.fits)


def test_memory_in_pieces_is_told() -> None:
    message = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.54 GiB. GPU 0 has a total capacity of 11.62 "
        "GiB "
        "of which 1.06 GiB is free. Including non-PyTorch memory, this process has 10.25 GiB memory in use. Of the "
        "allocated memory 6.25 GiB is allocated by PyTorch, and 3.50 GiB is reserved by PyTorch but unallocated."
    )
    assert "expandable_segments" in get(explained(message, "pieces"), "memory.fragmented").text


def test_a_traceback_alone_is_explained_as_far_as_it_tells() -> None:
    found = explained(simulate.BACKWARD_TRACEBACK + simulate.OOM_MESSAGES["2.5"], "pasted")
    assert found.plan is None
    assert "logits of GPT-2" in get(found, "memory.oom").text
    assert get(found, "log.incomplete").severity == "warning"


def test_a_memory_snapshot_is_held_against_the_prediction(tmp_path: Path) -> None:
    config = TrainConfig(n_layer=2, n_head=2, n_embd=128, batch_size=4, block_size=128, gradient_accumulation_steps=2)
    planned = plan(config, CARD)
    snapshot.write(trace(planned.steps), tmp_path / "memory.pickle")
    (tmp_path / "run.toml").write_text(to_toml(config))
    found = explain([tmp_path / "memory.pickle", tmp_path / "run.toml"], CARD, with_fixes=False)
    peak = number(get(found, "memory.snapshot"), "peak_mib")
    assert peak == pytest.approx(
        planned.memory.allocated_mib, rel=0.03
    )  # torch counts tails of blocks it does not split
    assert number(get(found, "memory.predicted"), "observed_mib") == peak


# --- the training ------------------------------------------------------------------------------------


def run_of(losses: list[float], vals: dict[int, tuple[float, float]] | None = None, **keys: object) -> str:
    """A nanoGPT log with these losses and (training, validation) pairs."""
    config = TrainConfig(**{"max_iters": 5000, "lr_decay_iters": 5000, "warmup_iters": 100, **keys})  # type: ignore[arg-type]
    said = (*simulate.SHAPE, "max_iters", "lr_decay_iters", "warmup_iters", *keys)
    lines = list(simulate.preamble(config, tuple(dict.fromkeys(said))))
    for step, loss in enumerate(losses):
        if vals and step in vals:
            lines.append(f"step {step}: train loss {vals[step][0]:.4f}, val loss {vals[step][1]:.4f}")
        lines.append(f"iter {step}: loss {loss:.4f}, time 100.00ms, mfu 30.00%")
    return simulate.text(lines)


FALLING = [11.0 * (step + 1) ** -0.2 for step in range(400)]


def test_a_healthy_run_has_nothing_wrong() -> None:
    found = explained(run_of(FALLING), "well", "A100 80GB")
    assert not [
        finding for finding in found.findings if finding.topic in ("loss", "rate") and finding.severity != "info"
    ]


def test_a_loss_that_is_no_number_is_an_error_with_its_step() -> None:
    found = get(explained(run_of([*FALLING, math.nan, math.nan], dtype="float16"), "nan"), "loss.not_finite")
    assert (found.severity, found.numbers["step"]) == ("error", 400)
    assert "GradScaler" in found.text


def test_a_rising_loss_is_told() -> None:
    found = get(explained(run_of([*FALLING, *[6.5] * 60]), "up"), "loss.diverging")
    assert found.severity == "error"
    assert "learning rate too high" in found.text


def test_overfitting_is_told_with_its_best_step() -> None:
    vals = {0: (11.0, 11.0), 100: (4.0, 4.1), 200: (3.5, 3.9), 300: (3.0, 4.0), 390: (2.5, 4.2)}
    found = get(explained(run_of(FALLING, vals), "over"), "loss.overfitting")
    assert found.numbers["best_step"] == 200


def test_a_learning_rate_that_never_falls_is_told() -> None:
    found = get(explained(run_of(FALLING, lr_decay_iters=600000), "flat"), "rate.undecayed")
    assert "Set lr_decay_iters = max_iters" in found.text


@pytest.mark.parametrize(("rate", "name"), [(6e-4, "rate.usual"), (6e-3, "rate.off"), (6e-5, "rate.off")])
def test_a_learning_rate_is_held_against_the_usual_for_the_size(rate: float, name: str) -> None:
    get(explained(run_of(FALLING, learning_rate=rate), "rate"), name)


def test_a_small_batch_is_told() -> None:
    keys = {"batch_size": 1, "gradient_accumulation_steps": 1, "block_size": 1024}
    assert "noisy" in get(explained(run_of(FALLING, **keys), "small"), "batch.small").text


def test_many_passes_over_the_data_are_a_warning() -> None:
    found = get(explained(run_of(FALLING), "passes", dataset_tokens="300M"), "data.passes")
    assert found.severity == "warning"
    assert number(found, "passes") > 4


def test_warm_up_compilation_and_evaluations_are_told_apart(b: Explanation) -> None:
    text = get(b, "time.step").text
    assert "the first step, which compiles" in text
    assert "steps of warm-up" in text
    assert "steps with an evaluation" in text


def test_steps_that_become_slower_are_told() -> None:
    log = simulate.text(
        simulate.preamble(simulate.C, simulate.RUN),
        simulate.steps(simulate.C, 100, 9000.0),
        simulate.steps(simulate.C, 100, 12000.0, first=101),
    )
    found = get(explained(log, "hot"), "time.slowing")
    assert number(found, "now_ms") / number(found, "before_ms") == pytest.approx(4 / 3, rel=0.02)


def test_a_forecast_is_given_from_the_runs_own_curve() -> None:
    vals = {step: 3.0 + 8.0 * max(step, 1) ** -0.35 for step in range(0, 3001, 250)}
    log = simulate.text(
        simulate.preamble(simulate.B, simulate.RUN), simulate.steps(simulate.B, 3001, 3910.0, vals=vals)
    )
    found = get(explained(log, "forecast"), "loss.forecast")
    assert number(found, "step") == 6000  # twice the data, never past it
    assert number(found, "low") < 3.0 + 8.0 * 6000**-0.35 < number(found, "high")


# --- what was read -----------------------------------------------------------------------------------


def test_what_was_worked_out_is_said_to_be() -> None:
    text = simulate.text(simulate.counts(simulate.A), ["tokens per iteration will be: 32,768"]) + simulate.nvidia_smi()
    found = explained(text, "counts", None, batch_size="16")
    assert "n_embd = 384 (inferred" in get(found, "log.inferred").text
    assert number(get(found, "memory.predicted"), "predicted_mib") == pytest.approx(4464, rel=0.1)


def test_an_unknown_card_is_asked_for() -> None:
    found = explained(simulate.run_b(), "B", None)
    assert found.plan is None
    assert "--gpu" in get(found, "card.unknown").text
    assert "nanoGPT divides by 312" in get(found, "time.mfu").text


def test_a_resumed_nanogpt_run_reads_its_first_batches_again() -> None:
    found = explained("Resuming training from out\n" + simulate.run_b(), "again")
    assert "same ones again" in get(found, "data.resumed").text


def test_the_json_has_the_documented_parts(d: Explanation) -> None:
    plain = json.loads(json.dumps(d.to_dict()))
    assert {"run", "plan", "findings", "fixes"} == plain.keys()
    assert {"config", "gpu", "steps", "evals", "ooms"} <= plain["run"].keys()
    assert plain["run"]["config"]["batch_size"] == {"value": 16, "how": "read", "where": "D:7"}
    assert {"id", "severity", "title", "text", "numbers"} == plain["findings"][0].keys()
    assert {"changes", "kind", "fits", "total_mib", "effect"} <= plain["fixes"][0].keys()


def test_findings_are_sorted_and_named_once(b: Explanation, d: Explanation) -> None:
    for explanation in (b, d):
        names = [finding.id for finding in explanation.findings]
        assert len(names) == len(set(names))
        worst = ["error", "warning", "info"]
        ranks = [worst.index(finding.severity) for finding in explanation.findings]
        assert ranks == sorted(ranks)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_no_cut_or_mixed_log_makes_it_fail(data: st.DataObject) -> None:
    texts = [
        simulate.run_a(),
        simulate.run_b()[:4000],
        simulate.run_d(),
        simulate.nvidia_smi(),
        "iter 3: loss nan, ti\n",
    ]
    lines = "".join(data.draw(st.permutations(texts))).splitlines(keepends=True)
    start = data.draw(st.integers(0, len(lines)))
    kept = "".join(lines[start:])
    explained(kept[: data.draw(st.integers(0, len(kept)))], "mixed", data.draw(st.sampled_from([None, CARD])))


# --- what is given, what is not known, and what contradicts ---------------------------------------------


def test_a_key_that_is_given_overrules_what_the_counts_say_and_that_is_said() -> None:
    found = explained(simulate.run_d(), "D", n_layer="7")
    setting = found.measured.inference.settings["n_layer"]
    assert (setting.value, setting.how) == (7, "given")
    assert found.plan is not None
    assert found.plan.config.n_layer == 7
    contradiction = get(found, "log.contradiction")
    assert "n_layer = 7 is taken as given" in contradiction.text
    assert "those of 12" in contradiction.text
    assert "log contradicts itself" not in contradiction.title


def test_a_batch_that_is_given_against_the_printed_tokens_is_said() -> None:
    text = get(explained(simulate.run_b(), "B", batch_size="8"), "log.contradiction").text
    assert "262,144 tokens a step, but the log prints 524,288" in text


def test_the_length_of_a_run_whose_config_was_cut_off_is_not_made_up() -> None:
    text = simulate.run_b()
    cut = text[text.index("tokens per iteration") :]
    for given_keys in ({}, {"batch_size": "16", "gradient_accumulation_steps": "32"}):
        found = explained(cut, "B", **given_keys)
        assert "max_iters" not in found.measured.inference.settings
        assert not {"time.left", "time.flops", "data.tokens", "loss.expected"} & {each.id for each in found.findings}
        assert not any("600,000" in each.title + each.text for each in found.findings)


def test_a_count_that_no_model_has_is_told_beside_the_configs_and_the_config_is_planned() -> None:
    found = explained(simulate.run_b().replace("40.56M", "85.00M"), "B")
    text = get(found, "log.contradiction").text
    assert "The config gives 40.56 M parameters, the log prints 85.00 M" in text
    assert found.measured.inference.missing == []
    assert found.plan is not None
    assert found.plan.config.n_embd == 384


def test_an_error_without_its_log_does_not_say_when() -> None:
    alone = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.54 GiB."
    assert get(explained(alone, "E"), "memory.oom").title == "The card ran out of memory: 1.54 GiB asked for"
    after = explained(f"iter 0: loss 10.9, time 5.00ms, mfu -100.00%\n{alone}", "E")
    assert "after step 0" in get(after, "memory.oom").title
    assert "before the first step" in get(explained(simulate.run_d(), "D"), "memory.oom").title


def test_a_given_card_that_the_error_contradicts_is_doubted() -> None:
    text = simulate.run_d()
    assert explained(text, "D", "RTX 4070").finding("card.contradiction") is None
    doubt = get(explained(text, "D", "RTX 3090"), "card.contradiction")
    assert doubt.severity == "warning"
    assert "12 GB" in doubt.text


@pytest.mark.parametrize("total_gib", ["11.72", "11.62", "11.56"])
def test_a_card_is_among_the_candidates_whatever_its_driver_leaves(total_gib: str) -> None:
    text = (
        f"CUDA out of memory. Tried to allocate 1.54 GiB (GPU 0; {total_gib} GiB total capacity; 8.20 GiB already "
        "allocated; 1.10 GiB free; 9.00 GiB reserved in total by PyTorch)"
    )
    candidates = explained(text, "E", None).measured.inference.card.candidates
    assert {"GeForce RTX 4070", "GeForce RTX 3060 12GB", "GeForce RTX 4070 SUPER"} <= set(candidates)


def test_hours_left_are_the_plans_where_no_step_was_timed(d: Explanation) -> None:
    assert d.plan is not None
    assert d.plan.time is not None
    left = get(d, "time.left")
    assert number(left, "hours") + number(left, "evaluation_hours") == pytest.approx(d.plan.time.hours)
    assert number(left, "hours_left") == pytest.approx(d.plan.time.hours, rel=0.002)


def test_a_loss_and_a_time_of_nothing_are_warned_of() -> None:
    found = get(explained("iter 0: loss 0.0000, time 0.00ms, mfu -100.00%\n", "Z"), "loss.impossible")
    assert found.severity == "warning"
    assert "training loss and step time" in found.title


def test_an_error_and_a_config_file_are_enough_for_a_plan(tmp_path: Path) -> None:
    (tmp_path / "error.txt").write_text("CUDA out of memory. Tried to allocate 1.54 GiB.")
    (tmp_path / "run.py").write_text("batch_size = 16\ngradient_accumulation_steps = 32\n")
    found = explain([tmp_path / "error.txt", tmp_path / "run.py"], CARD, with_fixes=False)
    assert found.plan is not None
    assert (found.plan.config.batch_size, found.plan.config.n_layer) == (16, 12)
