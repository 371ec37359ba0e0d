"""The learning rate: nanoGPT's rules, at every step."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from oomph.config import TrainConfig
from oomph.training.optimizer import learning_rate


def nanogpts(it: int, top: float, least: float, warm_up: int, end: int) -> float:
    if it < warm_up:
        return top * (it + 1) / (warm_up + 1)
    if it > end:
        return least
    ratio = (it - warm_up) / (end - warm_up)
    return least + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (top - least)


@given(step=st.integers(0, 300), warm_up=st.integers(0, 100), length=st.integers(1, 150))
def test_it_is_nanogpts(step: int, warm_up: int, length: int) -> None:
    end = warm_up + length
    config = TrainConfig(learning_rate=1e-3, min_lr=1e-4, warmup_iters=warm_up, lr_decay_iters=end)
    assert math.isclose(learning_rate(step, config), nanogpts(step, 1e-3, 1e-4, warm_up, end), rel_tol=1e-12)


def test_a_schedule_that_ends_with_its_warm_up_divides_by_nothing() -> None:
    config = TrainConfig(warmup_iters=10, lr_decay_iters=10, min_lr=1e-5)
    assert learning_rate(10, config) == 1e-5


def test_without_decay_the_rate_stays() -> None:
    config = TrainConfig(decay_lr=False, learning_rate=3e-4, warmup_iters=10)
    assert {learning_rate(step, config) for step in (0, 5, 10**6)} == {3e-4}


@given(step=st.integers(0, 400), warm_up=st.integers(0, 50), end=st.integers(100, 300), share=st.floats(0.01, 1.0))
def test_a_level_schedule_falls_in_a_straight_line_to_its_end(step: int, warm_up: int, end: int, share: float) -> None:
    keys = {"learning_rate": 1e-3, "min_lr": 1e-4, "warmup_iters": warm_up, "lr_decay_iters": end}
    config = TrainConfig(**keys, lr_scheduler_type="warmup_stable_decay", warmdown_ratio=share)  # type: ignore[arg-type]
    rate = learning_rate(step, config)
    if step < warm_up:
        assert rate == 1e-3 * (step + 1) / (warm_up + 1)
    elif step >= end:
        assert rate == 1e-4
    else:
        falling = (end - step) / (share * end)
        assert math.isclose(rate, 1e-4 + 9e-4 * min(1.0, falling), rel_tol=1e-12)
