"""Two runs side by side: the figures of the measured runs B and C, and who wins at what."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import simulate
from explaining import figures
from hypothesis import given
from hypothesis import strategies as st

from oomph.config import TrainConfig, to_toml
from oomph.errors import InputError
from oomph.runs import Comparison, LoggedRun, compare, read_text
from oomph.runs.compare import Caveat
from oomph.runs.curves import interpolate, scale
from oomph.runs.figures import measure
from oomph.runs.verdicts import GoalVerdict


@pytest.fixture(scope="module")
def found() -> Comparison:
    runs = [read_text(simulate.run_b(), "B"), read_text(simulate.run_c(), "C")]
    return compare(runs, "RTX 4070")


def verdict(comparison: Comparison, goal: str) -> GoalVerdict:
    return next(each for each in comparison.verdicts if each.goal == goal)


def ids(caveats: list[Caveat]) -> list[str]:
    return [caveat.id for caveat in caveats]


def test_settings_that_differ_are_shown_and_no_others(found: Comparison) -> None:
    assert found.differences == {
        "n_embd": [384, 768],
        "batch_size": [16, 8],
        "gradient_accumulation_steps": [32, 64],
        "learning_rate": [1e-3, 3e-4],
    }


def test_tokens_a_second_are_134_and_56_thousand(found: Comparison) -> None:
    assert found.metrics["tokens_per_step"].values == [524288, 524288]
    assert found.metrics["tokens_per_s"].values == pytest.approx([134_089, 56_134], rel=1e-3)
    assert found.metrics["params"].values == pytest.approx([40.56e6, 123.59e6], rel=1e-3)


def test_mfu_is_12_9_and_15_4_by_nanogpt_and_69_and_82_by_the_cards_own_peak(found: Comparison) -> None:
    assert found.metrics["tflops"].values == pytest.approx([40.2, 48.0], abs=0.06)
    assert found.metrics["mfu_nanogpt"].values == pytest.approx([0.129, 0.154], abs=0.0005)
    assert found.metrics["mfu"].values == pytest.approx([0.69, 0.82], abs=0.005)


def test_the_smaller_model_is_faster_and_the_wider_uses_the_card_better(found: Comparison) -> None:
    assert verdict(found, "raw speed").winner == "B"
    use = verdict(found, "hardware use")
    assert use.winner == "C"
    assert use.margin == pytest.approx(0.19, abs=0.005)
    assert {768, 384, 39, 27} <= figures(use.reason)  # widths, and the vocabulary's share of the work in %


def test_losses_at_the_same_tokens_favour_c_and_at_the_same_hours_b(found: Comparison) -> None:
    at_step = next(each for each in found.losses if each.at == "step")
    assert [(point.x, point.values, point.how) for point in at_step.points] == [(500, [5.5328, 5.5194], "read")]
    assert verdict(found, "quality per token").winner == "C"
    hours = verdict(found, "quality per hour")
    assert hours.winner == "B"
    assert 1.10 in figures(hours.reason)
    assert next(each for each in found.losses if each.at == "hours").kind == "train"  # the evaluations do not overlap
    assert verdict(found, "quality per FLOP").winner == "B"


def test_unfinished_runs_have_no_winner_at_the_end(found: Comparison) -> None:
    final = verdict(found, "final loss")
    assert (final.winner, final.margin) == (None, None)
    assert {1010, 810, 20_000} <= figures(final.reason)  # steps done of those planned


def test_a_final_evaluation_comes_after_the_last_step_and_is_none() -> None:
    logged = "".join(f'{{"step": {step}, "loss": 2.0}}\n' for step in range(0, 300, 10))
    run = read_text(logged + '{"step": 300, "val_loss": 1.9}\n')
    assert (run.last_step, run.steps_done) == (300, 300)


def test_more_accumulation_is_not_fewer_optimizer_steps(found: Comparison) -> None:
    assert "accumulation" in ids(found.notes)


def test_the_json_has_the_documented_parts(found: Comparison) -> None:
    plain = json.loads(json.dumps(found.to_dict()))
    assert {"runs", "differences", "metrics", "losses", "verdicts", "not_comparable"} <= plain.keys()
    assert plain["runs"] == ["B", "C"]
    assert {"goal", "winner", "margin", "reason"} <= plain["verdicts"][0].keys()
    assert plain["metrics"]["step_ms"]["unit"] == "ms"


def log(config: TrainConfig, vals: dict[int, float], count: int = 2001) -> str:
    keys = (*simulate.RUN, "eval_iters")
    return simulate.text(simulate.preamble(config, keys), simulate.steps(config, count, 100.0, vals=vals))


def test_a_difference_within_the_noise_is_a_draw() -> None:
    config = TrainConfig(max_iters=2000, eval_iters=20, batch_size=1, block_size=256, eval_interval=1000)
    runs = [read_text(log(config, {0: 11, 1000: 4.0, 2000: last}), name) for name, last in (("x", 3.51), ("y", 3.50))]
    draw = verdict(compare(runs), "quality per token")
    assert draw.winner is None
    assert draw.margin == pytest.approx(0.01)


def test_a_difference_beyond_the_noise_is_a_win() -> None:
    config = TrainConfig(max_iters=2000, eval_interval=1000)
    runs = [read_text(log(config, {0: 11, 1000: 4.0, 2000: last}), name) for name, last in (("x", 3.51), ("y", 3.50))]
    assert verdict(compare(runs), "quality per token").winner == "y"
    assert verdict(compare(runs), "final loss").winner == "y"


def test_what_cannot_be_compared_is_said() -> None:
    one = TrainConfig(max_iters=100, dataset="fineweb", eval_interval=50)
    other = TrainConfig(max_iters=200, dataset="shakespeare_char", vocab_size=65, block_size=256, eval_interval=50)
    found = compare([read_text(log(one, {}, 101), "x"), read_text(log(other, {}, 101), "y")])
    assert {"vocab_size", "dataset", "block_size", "max_iters", "tokens_per_step"} <= set(ids(found.not_comparable))


def test_a_run_that_ran_out_of_memory_can_stand_beside_another() -> None:
    found = compare([read_text(simulate.run_c(), "C"), read_text(simulate.run_d(), "D")])
    assert {"oom", "no_step_time"} <= set(ids(found.not_comparable))
    assert verdict(found, "raw speed").winner is None


def test_names_are_told_apart() -> None:
    assert compare([read_text(simulate.run_c(), "C"), read_text(simulate.run_d(), "C")]).runs == ["C", "C 2"]


def test_one_run_is_too_few() -> None:
    with pytest.raises(InputError, match="at least two"):
        compare([read_text("")])


@given(
    st.dictionaries(st.integers(1, 10**6), st.floats(0, 12), min_size=1, max_size=20),
    st.floats(1, 10**6),
)
def test_interpolation_stays_between_the_points(points: dict[int, float], x: float) -> None:
    ordered = sorted((float(key), value) for key, value in points.items())
    value = interpolate(ordered, x)
    assert min(points.values()) - 1e-9 <= value <= max(points.values()) + 1e-9
    for key, known in ordered:
        assert math.isclose(interpolate(ordered, key), known, rel_tol=1e-9, abs_tol=1e-9)


def test_steps_with_an_evaluation_or_a_warm_up_do_not_move_the_step_time() -> None:
    found = measure(read_text(simulate.run_b(), "B")).pace
    assert found is not None
    assert 3900 <= found.step_ms <= 3920
    assert found.high_ms < 3925
    assert found.evaluation_ms == pytest.approx(15 * 3910, rel=0.01)
    assert found.first_ms is not None
    assert found.first_ms > 28_000
    assert found.stalled == 0


def test_memory_is_the_processs_where_nvidia_smi_shows_it() -> None:
    first = measure(read_text(simulate.run_a(), "A")).memory()[0]
    assert (first.mib, first.of) == (4464, "process")


def test_memory_seen_and_predicted_are_of_the_same_thing(tmp_path: Path) -> None:
    """On a CPU oomph train logs the whole process, which the plan does not predict without knowing Python's share."""
    config = TrainConfig(n_layer=2, n_head=2, n_embd=64, block_size=64, batch_size=4, vocab_size=512, device="cpu")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(to_toml(config))
        rows = [{"step": n, "loss": 5.0, "step_ms": 50.0, "memory_mib": 332.0} for n in range(20)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = compare([tmp_path / "a", tmp_path / "b"])
    for plan, seen in zip(runs.plans, runs.metrics["memory_mib"].values, strict=True):
        assert plan is not None
        assert seen == 332
    predicted = runs.metrics.get("predicted_memory_mib")
    assert predicted is None or all(value is None or value > 100 for value in predicted.values)


def test_tensors_seen_are_compared_with_tensors_predicted() -> None:
    log = simulate.run_c() + "Peak memory usage: 6000.00MiB\n"
    both = compare([read_text(log, "x"), read_text(log, "y")], "RTX 4070")
    assert both.metrics["memory_mib"].values == [6000, 6000]
    assert both.plans[0] is not None
    assert both.metrics["predicted_memory_mib"].values[0] == both.plans[0].memory.allocated_mib


def test_a_run_without_a_reading_is_predicted_as_the_other_was_read() -> None:
    log = simulate.run_c()
    both = compare([read_text(log, "x"), read_text(log + "Peak memory usage: 6000.00MiB\n", "y")], "RTX 4070")
    assert both.metrics["memory_mib"].values == [None, 6000]
    assert both.metrics["predicted_memory_mib"].values == [
        plan.memory.allocated_mib for plan in both.plans if plan is not None
    ]


def test_losses_at_the_same_hours_and_flops_are_of_the_same_place(found: Comparison) -> None:
    for goal, at in (("quality per hour", "hours"), ("quality per FLOP", "flops")):
        same = next(each for each in found.losses if each.at == at)
        last = same.points[-1]
        verdict_ = next(each for each in found.verdicts if each.goal == goal)
        assert same.kind == "train"
        assert verdict_.margin == pytest.approx(last.values[1] - last.values[0])
        for run, value in zip(found.measured, last.values, strict=True):
            step = last.x / (scale(run, same.at) or 1.0)
            near = [y for x, y in run.run.steps.curve("loss") if abs(x - step) <= 12]
            assert min(near) <= value <= max(near)


def test_runs_without_losses_at_a_common_place_have_no_margin() -> None:
    def log(name: str, ms: float, vals: tuple[float, float]) -> LoggedRun:
        lines = ["tokens per iteration will be: 1,024"]
        for step, val in zip((500, 1000), vals, strict=True):
            lines.append(f"step {step}: train loss 9.0000, val loss {val:.4f}")
            lines.append(f"iter {step}: loss 9.0000, time {ms:.2f}ms, mfu 5.00%")
        return read_text("\n".join(lines), name)

    runs = compare([log("quick", 10, (8.5, 8.0)), log("slow", 90, (8.9, 8.9))])
    hours = next(each for each in runs.verdicts if each.goal == "quality per hour")
    assert (hours.winner, hours.margin) == ("quick", None)


def test_steps_so_far_are_counted_as_explain_counts_them(found: Comparison) -> None:
    assert found.metrics["steps"].values == [1010, 810]


def test_other_learning_rates_and_missing_forecasts_are_noted(found: Comparison) -> None:
    assert "learning_rate" in ids(found.notes)
    assert not found.forecasts
    reasons = [figures(note.text) for note in found.notes if note.id == "no_forecast"]
    assert reasons == [{1, 500, 6}, {0, 500, 6}]  # losses after the steps of warm-up, of those needed


def test_a_log_that_begins_in_a_later_epoch_begins_later() -> None:
    bar = "Epoch {0}/20: 100%|####| {1}/900 [01:10<00:00, 13.24it/s, loss={2}]\n"
    run = read_text("".join(bar.format(epoch, step, 5.0) for epoch in (5, 6) for step in (450, 900)), "late")
    assert run.steps.column("step") == [4 * 900 + 450, 5 * 900, 5 * 900 + 450, 6 * 900]


def test_a_process_without_a_figure_is_not_one_of_0_mib() -> None:
    rows = (
        "|   0  NVIDIA H100 80GB HBM3          On  |   00000000:18:00.0 Off |                    0 |\n"
        "| N/A   27C    P0             69W /  700W |    5824MiB /  81559MiB |      0%      Default |\n"
        "|    0   N/A  N/A      1234      C   /usr/bin/python3                                0MiB |\n"
    )
    assert read_text(rows).process is None
