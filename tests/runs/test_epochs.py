"""Logs that count in epochs: every loss is taken, and its place is told in the log's own words."""

from __future__ import annotations

import pytest
from explaining import explained, get

from oomph.runs import read_text
from oomph.runs.pace import step_pace

LOSSES = (3.9, 3.2, 2.8)


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("[2/20][{n}/760] Loss: {loss}\n", "3/760 of epoch 2"),
        ("04/21 10:2{n}:00 - INFO - Epoch(train) [2][{n}/90] lr: 1e-3 loss: {loss}\n", "3/90 of epoch 2"),
        ("Train Epoch: 2 [ {n}/900 (0%)] Loss: {loss} Batch (t): 0.49, 7.5/s\n", "3/900 of epoch 2"),
        ("Epoch 2: 1%|# | {n}/900 [00:1{n}<01:00, 1.00it/s, loss={loss}]\n", "3/900 of epoch 2"),
        ("epoch 2/3, step {n}/50 completed (loss: {loss}): 6%|# | {n}/50 [00:09<09:00, 10.5s/it]\n", "3/50 of epoch 2"),
    ],
)
def test_a_step_of_an_epoch_is_placed_as_the_log_says_it(line: str, place: str) -> None:
    text = "".join(line.format(n=n, loss=loss) for n, loss in enumerate(LOSSES, 1))
    found = explained(text, "text", None)
    assert found.run.steps.column("loss") == list(LOSSES)
    assert place in get(found, "loss.now").title


@pytest.mark.parametrize(
    "line",
    ["Epoch 1 complete [{n}0%] Loss: {loss}\n", "Epoch 1 - Batch loss: {loss}\n", "90/90 [====] - 1s - loss: {loss}\n"],
)
def test_losses_of_one_epoch_are_not_copies(line: str) -> None:
    run = read_text("".join(line.format(n=n, loss=loss) for n, loss in enumerate(LOSSES)))
    assert run.steps.column("loss") == list(LOSSES)


def test_a_summary_of_an_epoch_is_no_step() -> None:
    epoch = "".join(f"INFO - Step {n}, Loss: 0.{n}\n" for n in (610, 620)) + "INFO - Epoch {0}/5 - Train Loss: 0.05\n"
    run = read_text(epoch.format(3) + epoch.replace("6", "7").format(4))
    assert run.steps.column("step") == [610.0, 620.0, 710.0, 720.0]


def test_epochs_are_counted_on_where_many_lines_are_read_at_once() -> None:
    lines = [f"Epoch {e} Batch {n}/225 - Loss: {4 - e}.{n}\n" for e in range(3) for n in range(10, 160, 10)]
    assert read_text("".join(lines)).last_step == 2 * 225 + 150


def test_an_evaluation_without_a_step_comes_after_one() -> None:
    text = "".join(f"| epoch 010 {n} / 8223 loss=1.{n}, lr=0.1, gnorm=2.1\n" for n in (7000, 8000))
    found = explained(f"{text}| epoch 010 | valid on 'valid' subset | valid loss 1.94\n", "text", None)
    assert "after 8,000/8,223 of epoch 10" in get(found, "loss.now").title


def test_of_a_few_bars_the_last_tells_the_speed() -> None:
    bar = "Epoch 0: 1%|# | {0}/18 [00:1{0}<01:00, {1}s/it, loss=3.{0}]\n"
    pace = step_pace(read_text("".join(bar.format(n, rate) for n, rate in enumerate((8.5, 5.5, 4.5, 4.25), 1))))
    assert pace is not None
    assert pace.step_ms == pytest.approx(4250)


def test_nan_in_a_bar_is_seen() -> None:
    bar = "steps:   1%|#   | {0}/3280 [00:50<1:06:54,  1.24s/it, avr_loss=nan]\n"
    assert get(explained("".join(bar.format(n) for n in (41, 82)), "text", None), "loss.not_finite").severity == "error"


def test_an_evaluation_that_never_moves_is_said() -> None:
    line = '{{"step": {0}, "loss": 1.4{0}, "lr": 1e-4}}\n{{"step": {0}, "eval_loss": {1}}}\n'
    still = "".join(line.format(n, f"1.38629{n % 3}") for n in range(1, 25))
    moves = "".join(line.format(n, 1.4 - n / 100) for n in range(1, 25))
    assert get(explained(still, "text", None), "loss.constant").severity == "warning"
    assert explained(moves, "text", None).finding("loss.constant") is None


def test_evaluations_that_stay_above_the_lowest_are_overfitting() -> None:
    vals = (0.30, 0.26, 0.232, 0.25, 0.27, 0.25, 0.26, 0.28)
    text = "".join(
        f'{{"step": {n}, "loss": {5 / n:.4f}, "lr": 1e-4}}\n'
        + (f'{{"step": {n}, "eval_loss": {vals[n // 100 - 1]}}}\n' if n % 100 == 0 else "")
        for n in range(10, 801, 10)
    )
    assert get(explained(text, "text", None), "loss.overfitting").numbers["best_step"] == 300


def test_a_coarse_clock_is_no_slowing() -> None:
    ticks = (78.1, 93.8, 78.1, 93.8, 109.4, 93.8, 78.1)
    text = "".join(f"iter {n}: loss 3.{n}, time {ticks[n * 5 % 7]}ms\n" for n in range(70))
    assert explained(text, "text", None).finding("time.slowing") is None


def test_a_cancelled_job_did_not_end_well() -> None:
    text = "slurmstepd: error: *** JOB 77 ON node-1 CANCELLED AT 2026-01-02T03:04:05 ***\n"
    assert get(explained(text, "text", None), "log.crash").severity == "error"


def test_python_on_several_cards_of_a_screen_is_no_run() -> None:
    row = "|    {0}   N/A  N/A      90{0}      C   python3                          900MiB |\n"
    found = explained("".join(row.format(n) for n in range(4)), "text", None)
    assert found.finding("card.several") is None


def test_another_programs_parameters_contradict_nothing() -> None:
    assert explained("Number of parameters: 394,532\n", "text", None).finding("log.contradiction") is None


def test_a_card_whose_memory_is_not_told_is_seen() -> None:
    text = (
        "|   0  Quadro RTX 5000    WDDM  | 00000000:1A:00.0 Off |                  Off |\n"
        "| 36%   62C    P2    95W / 230W |    Not Supported     |     50%      Default |\n"
    )
    readings = read_text(text).gpus[0].readings.totals
    assert [readings[name].last for name in ("utilization_percent", "celsius", "watts")] == [50.0, 62.0, 95.0]
