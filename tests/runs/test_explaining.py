"""What an explanation says of errors, of what it worked out, and of what it was given."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import simulate
from explaining import CARD, explained, figures, get, number
from hypothesis import given, settings
from hypothesis import strategies as st

from oomph.config import TrainConfig, load, to_toml
from oomph.planning.plan import plan
from oomph.predict.allocator.replay import record
from oomph.runs import Explanation, explain, findings
from oomph.runs.figures import Evidence
from oomph.step.snapshot import read as snapshot

# --- out of memory -----------------------------------------------------------------------------------


def test_1_54_gib_in_an_evaluation_are_named() -> None:
    log = simulate.text(simulate.preamble(simulate.C, simulate.RUN)) + simulate.EVALUATION_TRACEBACK
    found = get(explained(log + simulate.OOM_MESSAGES["2.5"] + "\n", "eval"), "memory.oom")
    assert found.severity == "error"
    assert found.numbers["phase"] == "evaluation"
    assert found.numbers["formula"] == "8 × 1024 × 50304 × 4"
    assert "logits" in str(found.numbers["tensor"])
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
    found = get(explained(message, "pieces"), "memory.fragmented")
    assert number(found, "unused_mib") == pytest.approx(3.5 * 1024)
    assert "expandable_segments" in found.text  # the setting that helps


def test_a_traceback_alone_is_explained_as_far_as_it_tells() -> None:
    found = explained(simulate.BACKWARD_TRACEBACK + simulate.OOM_MESSAGES["2.5"], "pasted")
    assert found.plan is None
    assert "tensor" not in get(found, "memory.oom").numbers  # a size alone fits too many tensors by chance
    assert get(found, "log.incomplete").severity == "info"


def test_a_memory_snapshot_is_held_against_the_prediction(tmp_path: Path) -> None:
    config = TrainConfig(n_layer=2, n_head=2, n_embd=128, batch_size=4, block_size=128, gradient_accumulation_steps=2)
    planned = plan(config, CARD)
    snapshot.write(record(planned.steps), tmp_path / "memory.pickle")
    (tmp_path / "run.toml").write_text(to_toml(config))
    found = explain([tmp_path / "memory.pickle", tmp_path / "run.toml"], CARD, with_fixes=False)
    peak = number(get(found, "memory.snapshot"), "peak_mib")
    assert peak == pytest.approx(
        planned.memory.allocated_mib, rel=0.03
    )  # torch counts tails of blocks it does not split
    assert number(get(found, "memory.predicted"), "observed_mib") == peak


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
    assert 312 in figures(get(found, "time.mfu").text)


def test_a_resumed_nanogpt_run_reads_its_first_batches_again() -> None:
    found = explained("Resuming training from out\n" + simulate.run_b(), "again")
    assert get(found, "data.resumed").severity == "warning"


def test_the_json_has_the_documented_parts(d: Explanation) -> None:
    plain = json.loads(json.dumps(d.to_dict()))
    assert {"run", "plan", "findings", "fixes", "general_fixes"} == plain.keys()
    assert {"config", "gpu", "steps", "evals", "ooms"} <= plain["run"].keys()
    assert plain["run"]["config"]["batch_size"] == {"value": 16, "how": "read", "where": "D:7"}
    assert {"id", "severity", "title", "text", "numbers", "basis"} == plain["findings"][0].keys()
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
    assert "n_layer = 7" in contradiction.text
    assert {7, 12} <= figures(contradiction.text)


def test_a_batch_that_is_given_against_the_printed_tokens_is_said() -> None:
    text = get(explained(simulate.run_b(), "B", batch_size="8"), "log.contradiction").text
    assert {262_144, 524_288} <= figures(text)


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
    assert {40.56, 85.00} <= figures(get(found, "log.contradiction").text)
    assert found.measured.inference.missing == []
    assert found.plan is not None
    assert found.plan.config.n_embd == 384


def test_an_error_without_its_log_does_not_say_when() -> None:
    alone = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.54 GiB."
    assert figures(get(explained(alone, "E"), "memory.oom").title) == {1.54}
    after = explained(f"iter 0: loss 10.9, time 5.00ms, mfu -100.00%\n{alone}", "E")
    assert figures(get(after, "memory.oom").title) == {0, 1.54}  # after step 0
    assert "before the first step" in get(explained(simulate.run_d(), "D"), "memory.oom").title


def test_a_given_card_that_the_error_contradicts_is_doubted() -> None:
    text = simulate.run_d()
    assert explained(text, "D", "RTX 4070").finding("card.contradiction") is None
    doubt = get(explained(text, "D", "RTX 3090"), "card.contradiction")
    assert doubt.severity == "warning"
    assert 12 in figures(doubt.text)  # GB


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
    time = d.plan.time
    assert number(left, "hours") + number(left, "evaluation_hours") == pytest.approx(time.train_hours + time.eval_hours)
    assert number(left, "hours_left") == pytest.approx(d.plan.time.hours, rel=0.002)


def test_a_loss_and_a_time_of_nothing_are_warned_of() -> None:
    found = get(explained("iter 0: loss 0.0000, time 0.00ms, mfu -100.00%\n", "Z"), "loss.impossible")
    assert found.severity == "warning"
    assert found.numbers == {"training loss": 0, "step time": 0}


def test_an_error_and_a_config_file_are_enough_for_a_plan(tmp_path: Path) -> None:
    (tmp_path / "error.txt").write_text("CUDA out of memory. Tried to allocate 1.54 GiB.")
    (tmp_path / "run.py").write_text("batch_size = 16\ngradient_accumulation_steps = 32\n")
    found = explain([tmp_path / "error.txt", tmp_path / "run.py"], CARD, with_fixes=False)
    assert found.plan is not None
    assert (found.plan.config.batch_size, found.plan.config.n_layer) == (16, 12)


def test_a_config_that_does_not_fit_is_told_before_it_runs(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text("batch_size = 64\n")
    found = explain(tmp_path / "run.py", CARD, with_fixes=False)
    assert found.plan is not None
    assert round(found.plan.memory.total_mib) in figures(get(found, "memory.fits").title)


def test_a_restart_and_unreadable_lines_are_told_with_their_counts() -> None:
    found = explained("iter 5: loss 3.0, time 5.00ms\niter 3: loss 3.0, time 5.00ms\niter 4: loss\n", "cut")
    assert get(found, "log.restarted").numbers == {"times": 1}
    assert get(found, "log.unreadable").numbers == {"lines": 1}


def test_the_ids_of_findings_do_not_change() -> None:
    """Scripts rely on them: add to this list, never rename."""
    folder = Path(findings.__file__).parent
    texts = [path.read_text() for path in folder.glob("*.py")]
    assert {name for text in texts for name in re.findall(r'Finding\(\s*"([a-z_.]+)"', text)} == {
        *("batch.enough", "batch.small"),
        *("card.contradiction", "card.full", "card.hot", "card.idle", "card.known", "card.larger", "card.power"),
        *("card.screen", "card.several", "card.slowed", "card.unknown"),
        *("data.passes", "data.resumed", "data.tokens"),
        *("log.contradiction", "log.crash", "log.incomplete", "log.inferred", "log.restarted", "log.stalled"),
        *("log.settings", "log.summary", "log.unknown", "log.unreadable"),
        *("loss.constant", "loss.diverging", "loss.expected", "loss.forecast", "loss.gradients", "loss.impossible"),
        *("loss.not_finite", "loss.now", "loss.overfitting", "loss.skipped"),
        *(
            "memory.adapters",
            "memory.cause",
            "memory.compile",
            "memory.fits",
            "memory.fragmented",
            "memory.headroom",
            "memory.logged",
            "memory.logits",
            "memory.no_help",
        ),
        *("memory.oom", "memory.others", "memory.peak", "memory.per_parameter", "memory.predicted", "memory.snapshot"),
        *("model.size",),
        *("rate.off", "rate.undecayed", "rate.usual", "rate.warm_up"),
        *("time.bound", "time.flops", "time.left", "time.mfu", "time.micro_batch", "time.slowing", "time.stalls"),
        *("time.step", "time.width"),
    }


# --- models of other programs ------------------------------------------------------------------------


def _failed_in_the_loss(folder: Path) -> Path:
    """A run of Qwen3-0.6B at 4 x 2048 that asks for its logits in float32."""
    log = folder / "qwen.log"
    log.write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB. GPU 0 has a total capacity of 11.56 "
        "GiB of which 1.20 GiB is free. Including non-PyTorch memory, this process has 10.30 GiB memory in use. Of the "
        "allocated memory 9.90 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated.\n"
    )
    return log


BATCH = [("batch_size", "4", "--batch_size=4"), ("block_size", "2048", "--block_size=2048")]


def test_a_model_by_name_is_a_config_of_the_run(tmp_path: Path) -> None:
    log = _failed_in_the_loss(tmp_path)
    found = explain([log, "Qwen/Qwen3-0.6B"], CARD, overrides=BATCH, with_fixes=False)
    assert found.plan is not None
    assert found.plan.memory == plan(load("Qwen/Qwen3-0.6B", BATCH), CARD).memory
    assert get(found, "memory.oom").numbers["formula"] == "4 × 2048 × 151936 × 4"
    assert number(get(found, "model.size"), "params") == 596_049_920
    assert found.finding("time.width") is None  # half its width is no model of this family


def test_a_models_folder_is_a_config_of_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shape = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(shape | {"intermediate_size": 128, "vocab_size": 1000}))
    found = explain([_failed_in_the_loss(tmp_path), folder], CARD, overrides=BATCH, with_fixes=False)
    assert found.plan is not None
    assert (found.plan.config.trainer, found.plan.config.model_type, found.plan.config.n_layer) == ("hf", "llama", 2)


def test_the_batch_of_a_model_is_never_assumed(tmp_path: Path) -> None:
    found = explain([_failed_in_the_loss(tmp_path), "Qwen/Qwen3-0.6B"], CARD, with_fixes=False)
    assert found.plan is None
    assert found.measured.inference.missing == ["batch_size", "block_size"]


def test_fixes_have_the_memory_that_the_log_measured() -> None:
    """The setting that ran took a tenth more than planned: so do the others. Half of it is another run's."""
    plan = explained(simulate.run_b(), "b").plan
    assert plan is not None
    ratios = []
    for share in (1.1, 0.5):
        screen = simulate.nvidia_smi(process=round(share * plan.memory.total_mib))
        ratios.append(Evidence(explained(simulate.run_b() + screen, "b").measured, plan).memory_ratio)
    assert ratios == [pytest.approx(1.1, abs=1e-3), 1.0]
