"""Equal chunks of the loss are written three times at most, and every figure is as if each were."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_gpt import unfolded

from oomph import devices
from oomph.config.schema import TrainConfig
from oomph.predict.allocator.replay import reserve
from oomph.predict.clock import predict_times
from oomph.predict.memory import find_peak
from oomph.step import build as steps
from oomph.step.ops import Step
from oomph.step.tensor.loss import chunks


@st.composite
def chunked_configs(draw: st.DrawFn) -> TrainConfig:
    heads = draw(st.integers(1, 3))
    return TrainConfig(
        compile=draw(st.booleans()),
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        return_logits=False,
        optimizer_loop="fused",
        trainer="oomph",
        n_layer=draw(st.integers(1, 2)),
        n_head=heads,
        n_embd=heads * draw(st.sampled_from([8, 64, 100])),
        block_size=draw(st.sampled_from([33, 64, 512])),
        batch_size=draw(st.integers(1, 12)),
        vocab_size=draw(st.sampled_from([65, 1000, 50304])),
        gradient_accumulation_steps=draw(st.integers(1, 4)),
        loss_chunk=draw(st.sampled_from([16, 37, 100, 256])),
        expandable_segments=draw(st.booleans()),
    )


def flops(step: Step) -> int:
    return sum(section.times * op.times * op.flops for section in step.sections for op in section.ops)


@given(st.integers(1, 500), st.integers(1, 600))
def test_chunks_cover_every_row_once(rows: int, chunk: int) -> None:
    runs = chunks(rows, chunk)
    assert sum(size * times for size, times in runs) == rows
    assert len(runs) <= 4
    assert all(size == chunk for size, _ in runs[:-1])


@settings(max_examples=40)
@given(chunked_configs())
def test_a_folded_list_says_what_the_list_of_all_chunks_says(config: TrainConfig) -> None:
    folded = [steps.build(config, first=first) for first in (True, False)]
    whole = [unfolded(step) for step in folded]
    for short, long in zip(folded, whole, strict=True):
        assert find_peak(short).allocated_bytes == find_peak(long).allocated_bytes
        assert flops(short) == flops(long)
    roomy = reserve(folded, None, config.expandable_segments)
    assert _figures(roomy) == _figures(reserve(whole, None, config.expandable_segments))
    tight_bytes = int(
        1.02 * roomy.peak_allocated_bytes
    )  # less than is reserved on a roomy card: the cache is given back
    short, long = (reserve(steps, tight_bytes, config.expandable_segments) for steps in (folded, whole))
    assert (short.fits, *_figures(short)) == (long.fits, *_figures(long))


@settings(max_examples=20)
@given(chunked_configs())
def test_every_chunk_takes_its_time(config: TrainConfig) -> None:
    step, card = steps.build(config), devices.find("RTX 4070")
    short, long = predict_times(step, config, card), predict_times(unfolded(step), config, card)
    assert short is not None
    assert long is not None
    assert short.likely.step_s == pytest.approx(long.likely.step_s, rel=1e-9)
    assert short.likely.eval_batch_s == pytest.approx(long.likely.eval_batch_s, rel=1e-9)


def test_a_micro_batch_of_a_hundred_thousand_sequences_is_a_short_list() -> None:
    config = TrainConfig(
        compile=False, dtype="bfloat16", return_logits=False, optimizer_loop="fused", loss_chunk=1024,
        batch_size=100_000, n_layer=1, n_head=1, n_embd=64,
    )  # fmt: skip
    assert sum(len(section.ops) for section in steps.build(config).sections) < 500


def _figures(found: object) -> list[int]:
    names = ("peak_reserved_bytes", "peak_allocated_bytes", "reserved_bytes", "allocated_bytes", "retries")
    return [getattr(found, name) for name in names]
