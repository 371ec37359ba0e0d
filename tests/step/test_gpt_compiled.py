"""The compiled step by arithmetic: what it holds, and why."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomph.config.schema import TrainConfig
from oomph.predict.allocator.replay import reserve
from oomph.predict.memory import find_peak
from oomph.step.build import build
from oomph.step.compile import programs
from oomph.step.ops import Buffer, Kind, Phase, Step

MIB = 2**20
LOGIT_MIB = 16 * 1024 * 50304 * 2 / MIB  # GPT-2's half logits for 16 sequences: 1572 MiB


def settled(**keys: Any) -> TrainConfig:
    given: dict[str, Any] = {"dtype": "bfloat16", "return_logits": True, "loss_chunk": 0, "optimizer_loop": "fused"}
    return TrainConfig(**(given | keys))


def peak_mib(**keys: Any) -> float:
    return find_peak(programs.build(settled(**keys))).allocated_bytes / MIB


def _drawn(heads: int, size: int, **keys: Any) -> TrainConfig:
    """oomph, and a loss in chunks, return no logits, and no more blocks are checkpointed than there are."""
    keys["return_logits"] = keys["return_logits"] and not keys["loss_chunk"] and keys["trainer"] == "nanogpt"
    keys["checkpoint_layers"] = min(keys["checkpoint_layers"], keys["n_layer"])
    return settled(n_head=heads, n_embd=heads * size, **keys)


configs = st.builds(
    _drawn,
    heads=st.integers(1, 4),
    size=st.sampled_from([8, 32, 42, 64]),
    n_layer=st.integers(1, 5),
    batch_size=st.integers(1, 6),
    checkpoint_layers=st.integers(0, 3),
    loss_chunk=st.sampled_from([0, 0, 64]),
    block_size=st.integers(1, 300),
    vocab_size=st.integers(2, 60000),
    dropout=st.sampled_from([0.0, 0.1]),
    bias=st.booleans(),
    tie_weights=st.booleans(),
    return_logits=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    autocast=st.booleans(),
    gradient_accumulation_steps=st.integers(1, 5),
    torch_version=st.sampled_from(["2.3", "2.5", "2.6", "2.13"]),
    optimizer=st.sampled_from(["adamw", "sgd", "muon"]),
    attention=st.sampled_from(["flash", "efficient", "math"]),
    trainer=st.sampled_from(["nanogpt", "oomph"]),
)


def played(step: Step) -> list[Buffer]:
    """Runs a step, and fails where a buffer is allocated twice or freed without being there; what is left."""
    alive = dict.fromkeys(step.resident)
    for section in step.sections:
        for op in section.ops:
            for buffer in op.allocates:
                assert buffer not in alive, f"{op.name} allocates {buffer.name} twice"
                alive[buffer] = None
            for buffer in op.frees:
                assert buffer in alive, f"{op.name} frees {buffer.name}, which is not there"
                del alive[buffer]
    return list(alive)


@settings(max_examples=80, deadline=None)
@given(configs, st.booleans(), st.booleans())
def test_every_buffer_is_allocated_once_and_freed_once(config: TrainConfig, first: bool, cuda: bool) -> None:
    played(programs.build(config, cuda=cuda, first=first))


@settings(max_examples=40, deadline=None)
@given(configs)
def test_a_step_leaves_what_the_next_one_finds(config: TrainConfig) -> None:
    step = programs.build(config)
    left = sorted((b.name, b.bytes) for b in played(step))
    assert left == sorted((b.name, b.bytes) for b in step.resident)


@settings(max_examples=40, deadline=None)
@given(configs)
def test_the_first_step_leaves_what_a_later_one_finds(config: TrainConfig) -> None:
    left = sorted((b.name, b.bytes) for b in played(programs.build(config, first=True)))
    assert left == sorted((b.name, b.bytes) for b in programs.build(config).resident)


def test_returned_logits_cost_two_buffers_of_their_size() -> None:
    saved = peak_mib(batch_size=16) - peak_mib(batch_size=16, return_logits=False)
    assert saved == pytest.approx(2 * LOGIT_MIB, abs=100)  # less what a weight's gradient fills of it


def test_logits_that_stay_inside_are_overwritten_by_their_gradient() -> None:
    step = programs.build(settled(batch_size=16, return_logits=False))
    held = find_peak(step).by_kind()[Kind.LOGITS.value]
    assert held / MIB == pytest.approx(LOGIT_MIB, rel=0.01)


def test_rows_of_logits_are_laid_out_aligned_where_no_caller_sees_them() -> None:
    odd, even = (peak_mib(batch_size=16, return_logits=False, vocab_size=words) for words in (50257, 50304))
    weights = 18 * 47 * 768  # bytes of a word's vector: parameter, gradient, two moments, half copy
    assert even - odd == pytest.approx(weights / MIB, abs=0.5)  # 50257 columns take the room of 50304


def test_before_torch_2_6_saved_logits_are_not_overwritten() -> None:
    old, new = (peak_mib(batch_size=16, return_logits=False, torch_version=v) for v in ("2.5", "2.6"))
    assert old - new == pytest.approx(LOGIT_MIB, abs=100)


def test_before_torch_2_5_the_targets_are_a_float32_matrix() -> None:
    old, new = (peak_mib(batch_size=16, torch_version=v) for v in ("2.4", "2.5"))
    assert old - new == pytest.approx(2 * LOGIT_MIB, rel=0.01)


def test_a_block_saves_36_bytes_a_row_and_column_and_its_half_weights() -> None:
    rows, width, heads = 16 * 1024, 768, 12
    more = peak_mib(batch_size=16, n_layer=13) - peak_mib(batch_size=16, n_layer=12)
    weights = 12 * width * width + 2 * width
    saved = rows * (36 * width + 4 * heads + 8) + 2 * 12 * width * width
    assert more == pytest.approx((saved + 16 * weights) / MIB, rel=1e-4)


def test_dropout_saves_a_byte_an_element() -> None:
    more = peak_mib(batch_size=16, dropout=0.1) - peak_mib(batch_size=16)
    assert more == pytest.approx((2 * 12 + 1) * 16 * 1024 * 768 / MIB, rel=0.01)


def test_gradients_of_a_later_micro_step_are_all_alive_beside_the_accumulated_ones() -> None:
    step = programs.build(settled(batch_size=1, block_size=8, vocab_size=64))
    parameters = sum(b.bytes for b in step.resident if b.kind is Kind.PARAMETERS)
    live = dict.fromkeys(step.resident)
    most = 0
    for section in step.sections:
        for op in section.ops:
            live |= dict.fromkeys(op.allocates)
            if op.phase is Phase.BACKWARD:
                most = max(most, sum(b.bytes for b in live if b.kind is Kind.GRADIENTS))
            for buffer in op.frees:
                del live[buffer]
    assert most >= 2 * parameters * 0.98


def test_the_number_of_operations_grows_by_the_same_for_each_layer() -> None:
    counts = [sum(len(s.ops) for s in programs.build(settled(n_layer=n)).sections) for n in (4, 8, 12)]
    assert counts[2] - counts[1] == counts[1] - counts[0]


def reserved_mib(batch_size: int) -> float:
    """GPT-2 124M with biases, as the public RunPod sweep ran it: its first steps, no evaluation."""
    config = settled(batch_size=batch_size, gradient_accumulation_steps=512 // batch_size, bias=True)
    steps = []
    for first in (True, False):
        step = build(config, first=first)
        training = tuple(section for section in step.sections if not section.name.startswith("evaluation"))
        steps.append(msgspec.structs.replace(step, sections=training))
    return reserve(steps).peak_reserved_bytes / MIB


def test_the_allocator_explains_both_slopes_of_the_public_sweep() -> None:
    """nvidia-smi rose by 626 MiB a sequence from 8 to 16 and by 723 from there on (RTX A4000, A40, RTX A6000).

    Allocated memory rises by 624 throughout. The first gradients settle in the memory that the logits' gradient has
    left, so the next micro-step has to reserve a fourth buffer of that size. Small batches hide it under Adam's state.
    """
    at = {batch: reserved_mib(batch) for batch in (8, 16, 32, 64)}
    assert (at[16] - at[8]) / 8 == pytest.approx(626, rel=0.02)
    assert (at[32] - at[16]) / 16 == pytest.approx(723, rel=0.02)
    assert (at[64] - at[32]) / 32 == pytest.approx(723, rel=0.02)
