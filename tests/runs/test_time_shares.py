"""The shares of a step's time add up to the clock's own prediction."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomph.config import TrainConfig
from oomph.planning.plan import plan
from oomph.runs.findings.time import HOST, step_shares


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 6),
    st.sampled_from([128, 384, 768]),
    st.sampled_from([1, 4, 16]),
    st.booleans(),
    st.sampled_from(["RTX 4070", "A100 80GB", "T4"]),
)
def test_shares_add_up_to_the_step(layers: int, width: int, batch: int, compiled: bool, card: str) -> None:
    config = TrainConfig(n_layer=layers, n_embd=width, n_head=4, batch_size=batch, block_size=256, compile=compiled)
    found = plan(config, card)
    assert found.time is not None
    assert sum(step_shares(found).values()) * 1e3 == pytest.approx(found.time.step_ms, rel=1e-9)


def test_a_tiny_eager_model_waits_for_the_host() -> None:
    config = TrainConfig(n_layer=2, n_embd=64, n_head=2, batch_size=1, block_size=64, vocab_size=128, compile=False)
    seconds = step_shares(plan(config, "A100 80GB"))
    assert seconds[HOST] > 0.5 * sum(seconds.values())
