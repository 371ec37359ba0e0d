"""DeepSpeed's ZeRO: what a device holds for a trained number, and when."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from described_models import settled
from hypothesis import given, settings
from hypothesis import strategies as st

from oomph.config import from_dict
from oomph.config.schema import TrainConfig
from oomph.errors import InputError
from oomph.predict.memory import find_peak
from oomph.step import loop, zero
from oomph.step.ops import COLLECTIVES, Kernel, Kind, Phase, Step
from oomph.step.parameters import trained

SMALL = {
    "trainer": "hf", "model_type": "llama", "n_layer": 3, "n_head": 2, "n_embd": 64, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 512, "tie_weights": False, "batch_size": 1, "block_size": 8,
    "dtype": "bfloat16", "compile": False, "deepspeed": "zero2", "gradient_accumulation_steps": 4,
}  # fmt: skip


def config_of(**keys: Any) -> TrainConfig:
    return settled(from_dict(SMALL | {"reduce_bucket_size": 20_000, "stage3_param_persistence_threshold": 200} | keys))


def built(config: TrainConfig, first: bool = False) -> Step:
    return loop.build(config, first=first, evaluates=False)


def numbers(config: TrainConfig) -> int:
    return sum(each.numel for each in trained(config))


@pytest.mark.parametrize("first", [False, True])
def test_weights_and_two_moments_in_float32_are_there_from_the_start(first: bool) -> None:
    config = config_of()
    held = sum(buffer.bytes for buffer in built(config, first).resident if buffer.kind is Kind.OPTIMIZER)
    assert held == 12 * numbers(config)


def test_the_step_holds_22_bytes_of_a_trained_number() -> None:
    """Weights 2, in float32 4, moments 8, gradients 2, a flat copy 2, that in float32 4; norms, the second group, are
    few."""
    config = config_of()
    peak = find_peak(built(config), rounding_bytes=1)
    assert peak.op.phase is Phase.OPTIMIZER
    assert peak.allocated_bytes == pytest.approx(22 * numbers(config), rel=0.01)


@pytest.mark.parametrize(("overlap", "count"), [(False, 1), (True, 2)])
def test_buckets_are_made_as_backward_begins_and_go_when_it_ends(overlap: bool, count: int) -> None:
    config = config_of(overlap_comm=overlap)
    ops = built(config).sections[1].ops
    made = [buffer for op in ops for buffer in op.allocates if buffer.name == "zero.bucket"]
    gone = [buffer for op in ops for buffer in op.frees if buffer.name == "zero.bucket"]
    assert made == gone
    assert [buffer.bytes for buffer in made] == count * [2 * 20_000]


def test_adapters_alone_have_gradients_and_state() -> None:
    config = config_of(method="lora", lora_rank=4, lora_targets="q_proj")
    step = built(config)
    assert sum(b.bytes for b in step.resident if b.kind is Kind.OPTIMIZER) == 12 * numbers(config)
    assert config.adapter_dtype == "bfloat16"
    kept = [b for op in step.sections[0].ops for b in op.allocates if b.name == "zero.gradients"]
    assert [b.bytes for b in kept] == [2 * numbers(config)]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 100_000), st.booleans(), st.integers(1, 4), st.sampled_from(["full", "lora"]), st.booleans())
def test_every_buffer_is_freed_as_often_as_it_is_made(
    bucket: int, overlap: bool, micro_steps: int, method: str, first: bool
) -> None:
    keys = {"reduce_bucket_size": bucket, "overlap_comm": overlap, "gradient_accumulation_steps": micro_steps}
    step = built(config_of(method=method, **keys), first)
    alive = {id(buffer) for buffer in step.resident}
    for section in step.sections:
        for op in section.ops:
            for buffer in op.allocates:
                assert id(buffer) not in alive
                alive.add(id(buffer))
            for buffer in op.frees:
                alive.remove(id(buffer))
    assert alive == {id(buffer) for buffer in step.resident}


@pytest.mark.parametrize(
    ("key", "value"), [("parallel", "fsdp"), ("dtype", "float32"), ("optimizer", "sgd"), ("trainer", "torch")]
)
def test_what_is_not_described_with_it_is_refused(key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        from_dict(SMALL | {key: value})


# Several devices


def kept_bytes(config: TrainConfig, *kinds: Kind) -> int:
    return sum(buffer.bytes for buffer in built(config).resident if buffer.kind in kinds)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_of_zero2_has_its_part_of_the_state_and_the_whole_model(ranks: int) -> None:
    config = config_of(world_size=ranks, gradient_accumulation_steps=4 * ranks)
    assert kept_bytes(config, Kind.OPTIMIZER) == pytest.approx(12 * numbers(config) / ranks, rel=1e-3)
    assert kept_bytes(config, Kind.PARAMETERS) == pytest.approx(2 * numbers(config), rel=0.01)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_of_zero3_has_16_bytes_of_its_part_of_a_number(ranks: int) -> None:
    """Weights 2, in float32 4, moments 8, gradients 2; norms are kept whole."""
    config = config_of(deepspeed="zero3", world_size=ranks, gradient_accumulation_steps=4 * ranks, n_embd=128)
    held = kept_bytes(config, Kind.OPTIMIZER, Kind.PARAMETERS, Kind.GRADIENTS)
    assert held == pytest.approx(16 * numbers(config) / ranks, rel=0.03)


def test_the_bucket_of_zero3_is_there_all_the_time() -> None:
    config = config_of(deepspeed="zero3", world_size=2, gradient_accumulation_steps=8)
    assert kept_bytes(config, Kind.COMMUNICATION) == 2 * config.reduce_bucket_size


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize(("method", "tied"), [("full", False), ("full", True), ("lora", False)])
def test_every_buffer_of_a_rank_is_allocated_once_and_freed_once(stage: str, method: str, tied: bool) -> None:
    keys = {"deepspeed": stage, "world_size": 2, "gradient_accumulation_steps": 6, "method": method}
    keys |= {"tie_weights": tied, "n_embd": 128}
    kept = ["off", "optimizer"] if stage != "zero3" else ["off", "optimizer", "all"]
    for first, offload, overlap in product((True, False), kept, (False, True)):
        step = built(config_of(**keys, cpu_offload=offload, overlap_comm=overlap), first)
        alive = set(step.resident)
        for op in (op for section in step.sections for op in section.ops):
            assert alive.isdisjoint(op.allocates), op.name
            alive |= set(op.allocates)
            assert alive.issuperset(op.frees), op.name
            alive -= set(op.frees)


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_what_the_ranks_exchange_in_a_step_is_what_they_train(stage: str) -> None:
    config = config_of(deepspeed=stage, world_size=2, gradient_accumulation_steps=2, n_embd=128)
    ops = [op for section in built(config).sections for op in section.ops]
    kernel = Kernel.REDUCE_SCATTER if stage == "zero3" else Kernel.ALL_REDUCE
    reduced = sum(op.shape[1] for op in ops if op.kernel is kernel)
    assert reduced == pytest.approx(2 * numbers(config), rel=1e-3)
    begun = sorted(op.name for op in ops if op.kernel in COLLECTIVES)
    assert begun == sorted(op.name for op in ops if op.kernel is Kernel.WAIT)


def test_zero1_keeps_gradients_whole_until_the_last_micro_step() -> None:
    config = config_of(deepspeed="zero1", world_size=2, gradient_accumulation_steps=6)
    first, between, last = (section.ops for section in built(config).sections[:3])
    grads = {buffer for op in first for buffer in op.allocates if buffer.kind is Kind.GRADIENTS} - {
        buffer for op in first for buffer in op.frees
    }
    buckets = {buffer for buffer in grads if buffer.name == "zero.bucket"}
    assert sum(buffer.bytes for buffer in grads - buckets) == 2 * numbers(config)
    assert grads.isdisjoint(buffer for op in between for buffer in op.frees)
    assert grads.issubset(buffer for op in last for buffer in op.frees)


def test_a_rank_keeps_gradients_of_parameters_at_its_ends_whole() -> None:
    config = config_of(world_size=3, gradient_accumulation_steps=3)
    part = zero.share(config)
    assert sum(each.numel for each in part.updated) == pytest.approx(numbers(config) / 3, rel=0.01)
    assert sum(part.inside.values()) > sum(each.numel for each in part.updated)
    made = [b for section in built(config).sections for op in section.ops for b in op.allocates]
    assert [b.bytes for b in made if b.name == zero.GRADIENTS] == [2 * sum(part.inside.values())]


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_what_is_kept_on_the_host_is_not_on_the_card(stage: str) -> None:
    keys = {"deepspeed": stage, "world_size": 2, "gradient_accumulation_steps": 4, "n_embd": 128}
    assert kept_bytes(config_of(**keys, cpu_offload="optimizer"), Kind.OPTIMIZER, Kind.GRADIENTS) == 0
    if stage == "zero3":
        assert kept_bytes(config_of(**keys, cpu_offload="all"), Kind.PARAMETERS) == 0


def zero3_gathered(**keys: Any) -> int:
    """Most elements gathered at once, beside those that stay so."""
    config = config_of(deepspeed="zero3", world_size=2, gradient_accumulation_steps=4, n_embd=128, **keys)
    held = highest = 0
    for op in built(config).sections[1].ops:
        held += sum(buffer.bytes // 2 for buffer in op.allocates if buffer.kind is Kind.GATHERED)
        highest = max(highest, held)
        held -= sum(buffer.bytes // 2 for buffer in op.frees if buffer.kind is Kind.GATHERED)
    assert held == 0
    return highest


def test_zero3_gathers_ahead_and_keeps_what_is_used_again_soon() -> None:
    largest = 512 * 128
    alone = zero3_gathered(stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0)
    ahead = zero3_gathered(stage3_prefetch_bucket_size=30_000, stage3_max_reuse_distance=0)
    kept = zero3_gathered(stage3_prefetch_bucket_size=0)
    assert alone == largest
    assert largest < ahead
    assert largest < kept
    assert zero3_gathered(stage3_prefetch_bucket_size=10**9, stage3_max_live_parameters=0) == kept


def test_zero3_of_a_quantized_base_is_refused() -> None:
    with pytest.raises(InputError, match="quantization"):
        from_dict(SMALL | {"deepspeed": "zero3", "method": "lora", "quantization": "gptq"})
