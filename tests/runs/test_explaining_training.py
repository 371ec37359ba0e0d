"""What an explanation says of a run's training: its loss, its learning rate, its steps."""

from __future__ import annotations

import math

import pytest
import simulate
from explaining import explained, figures, get, number

from oomph.config import TrainConfig
from oomph.fitting import grow
from oomph.runs import Explanation


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


def test_a_nan_loss_is_an_error_with_its_step() -> None:
    found = get(explained(run_of([*FALLING, math.nan, math.nan], dtype="float16"), "nan"), "loss.not_finite")
    assert (found.severity, found.numbers) == ("error", {"step": 400, "times": 2})
    assert "GradScaler" in found.text  # the dtype is float16


def test_a_rising_loss_is_told() -> None:
    found = get(explained(run_of([*FALLING, *[6.5] * 60]), "up"), "loss.diverging")
    assert found.severity == "error"
    assert number(found, "now") == pytest.approx(6.5)
    assert 300 < number(found, "lowest_step") < 400


def test_overfitting_is_told_with_its_best_step() -> None:
    vals = {0: (11.0, 11.0), 100: (4.0, 4.1), 200: (3.5, 3.9), 300: (3.0, 4.0), 390: (2.5, 4.2)}
    found = get(explained(run_of(FALLING, vals), "over"), "loss.overfitting")
    assert found.numbers["best_step"] == 200


def test_a_learning_rate_that_never_falls_is_told() -> None:
    found = get(explained(run_of(FALLING, lr_decay_iters=600000), "flat"), "rate.undecayed")
    assert (found.numbers["lr_decay_iters"], found.numbers["max_iters"]) == (600000, 5000)
    assert number(found, "final") > 0.5 * 6e-4


@pytest.mark.parametrize(("rate", "name"), [(6e-4, "rate.usual"), (6e-3, "rate.off"), (6e-5, "rate.off")])
def test_a_learning_rate_is_held_against_the_usual_for_the_size(rate: float, name: str) -> None:
    get(explained(run_of(FALLING, learning_rate=rate), "rate"), name)


@pytest.mark.parametrize("width", [384, 768, 1536])
def test_the_usual_learning_rate_is_the_one_that_fit_proposes(width: int) -> None:
    found = explained(run_of(FALLING, n_layer=12, n_head=12, n_embd=width), "rate")
    rate = found.finding("rate.usual") or get(found, "rate.off")
    assert number(rate, "usual") == grow.learning_rate(width, grow.DepthAndWidth(12, width).block_parameters)


def test_a_small_batch_is_told() -> None:
    keys = {"batch_size": 1, "gradient_accumulation_steps": 1, "block_size": 1024}
    found = get(explained(run_of(FALLING, **keys), "small"), "batch.small")
    assert number(found, "tokens_per_step") == 1024 < number(found, "critical_tokens") / 16


def test_many_passes_over_the_data_are_a_warning() -> None:
    found = get(explained(run_of(FALLING), "passes", dataset_tokens="300M"), "data.passes")
    assert found.severity == "warning"
    assert number(found, "passes") > 4


def test_warm_up_compilation_and_evaluations_are_told_apart(b: Explanation) -> None:
    found, pace = get(b, "time.step"), b.measured.pace
    assert pace is not None
    assert number(found, "first_ms") > 28_000 > number(found, "step_ms")
    assert number(found, "evaluation_ms") > number(found, "step_ms")
    assert {round(number(found, "first_ms") / 1e3, 1), pace.warm_up_steps} <= figures(found.text)


def test_steps_that_become_slower_are_told() -> None:
    log = simulate.text(
        simulate.preamble(simulate.C, simulate.RUN),
        simulate.steps(simulate.C, 100, 9000.0),
        simulate.steps(simulate.C, 100, 12000.0, first=101),
    )
    found = get(explained(log, "hot"), "time.slowing")
    assert number(found, "now_ms") / number(found, "before_ms") == pytest.approx(4 / 3, rel=0.02)


def test_a_long_warm_up_is_told() -> None:
    found = get(explained(run_of(FALLING, warmup_iters=2000), "warm"), "rate.warm_up")
    assert found.numbers == {"warmup_iters": 2000, "steps": 5000}


def test_exploding_gradients_are_told() -> None:
    norms = [1.0] * 60 + [50.0]
    lines = [f"step {n:5d} | loss: 3.000000 | norm: {norm:.4f} | dt: 100.00ms" for n, norm in enumerate(norms)]
    found = get(explained("\n".join(lines), "wild"), "loss.gradients")
    assert found.numbers == {"median": 1.0, "last": 50.0}


def test_steps_that_wait_are_told() -> None:
    log = "".join(f"iter {n}: loss 3.0, time {300 if n % 10 == 9 else 100:.2f}ms, mfu 30.00%\n" for n in range(20, 220))
    assert number(get(explained(log, "stalls"), "time.stalls"), "share") == pytest.approx(0.1, abs=0.01)
