"""torchtune's models, adapters and 4-bit bases, described, are their traces, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
from described_models import described, first_difference, settled, traced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchtune_model import Torchtune

from oomph.config.load import from_dict
from oomph.config.programs import OWN_CLASSES
from oomph.config.schema import TrainConfig
from oomph.step import build, loop, models
from oomph.step.ops import Kind, Phase, Step
from oomph.step.parameters import parameters

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = OWN_CLASSES["torchtune"]
ALL = "q_proj,k_proj,v_proj,output_proj,w1,w2,w3"
UNTIMED = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))


def config(**keys: Any) -> TrainConfig:
    """A small settled config."""
    small = {
        "trainer": "torchtune", "model_type": "llama", "n_layer": 2, "n_head": 4, "num_key_value_heads": 2,
        "n_embd": 64, "intermediate_size": 96, "vocab_size": 120, "block_size": 40, "batch_size": 2,
        "dtype": "bfloat16", "tie_weights": False, "checkpoint_layers": 0, "attention": "flash", "lora_rank": 4,
    }  # fmt: skip
    return settled(from_dict({**small, **keys}))


def difference(found: TrainConfig, cuda: bool = True) -> str:
    """Where two micro-steps part from the trace."""
    theirs = traced(lambda: Torchtune(found), found, cuda=cuda, micro_steps=2)
    return first_difference(described(found, cuda=cuda, micro_steps=2), theirs)


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_its_trace(family: str, dtype: str, cuda: bool) -> None:
    assert not difference(config(model_type=family, dtype=dtype), cuda)


@pytest.mark.parametrize("checkpoint", [0, 2])
@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_adapters_are_their_trace(family: str, method: str, checkpoint: int) -> None:
    keys = {"model_type": family, "method": method, "checkpoint_layers": checkpoint, "lora_dropout": 0.1}
    assert not difference(config(**keys))


# Every weight must fill whole blocks of scales: 64 × 256 numbers.
QUANTIZED = {"method": "qlora", "n_embd": 128, "n_head": 2, "num_key_value_heads": 2, "intermediate_size": 256}


@pytest.mark.parametrize("checkpoint", [0, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_4_bit_base_is_its_trace(family: str, checkpoint: int) -> None:
    assert not difference(config(model_type=family, checkpoint_layers=checkpoint, **QUANTIZED))


@st.composite
def any_config(draw: st.DrawFn) -> TrainConfig:
    heads = draw(st.sampled_from([1, 2, 4]))
    layers = draw(st.integers(1, 3))
    return config(
        model_type=draw(st.sampled_from(FAMILIES)),
        n_layer=layers,
        n_head=heads,
        num_key_value_heads=draw(st.sampled_from([each for each in (1, 2, 4) if heads % each == 0])),
        n_embd=8 * heads * draw(st.integers(1, 4)),
        intermediate_size=8 * draw(st.integers(1, 20)),
        vocab_size=draw(st.integers(5, 300)),
        block_size=draw(st.integers(8, 70)),
        batch_size=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        tie_weights=draw(st.booleans()),
        checkpoint_layers=draw(st.sampled_from([0, layers])),
        method=draw(st.sampled_from(["full", "lora", "dora"])),
        lora_dropout=draw(st.sampled_from([0.0, 0.1])),
        lora_targets=draw(st.sampled_from([None, ALL, "q_proj"])),
        loss_chunk=draw(st.sampled_from([None, 0])),
    )


@UNTIMED
@given(any_config(), st.booleans())
def test_any_shape_is_its_trace(found: TrainConfig, cuda: bool) -> None:
    assert not difference(found, cuda)


@pytest.mark.slow
@settings(UNTIMED, max_examples=100)
@given(any_config(), st.booleans())
def test_many_shapes_are_their_traces(found: TrainConfig, cuda: bool) -> None:
    assert not difference(found, cuda)


@pytest.mark.parametrize("method", ["full", "lora", "dora"])
def test_parameters_are_the_modules(method: str) -> None:
    found = config(method=method, model_type="qwen2")
    theirs = [(name, tuple(each.shape), each.requires_grad) for name, each in Torchtune(found).named_parameters()]
    assert [(each.name, each.shape, each.trained) for each in parameters(found)] == theirs


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("checkpoint", [0, 7])
def test_a_deep_model_is_its_blocks_repeated(method: str, checkpoint: int) -> None:
    found = config(**{**QUANTIZED, "method": method}, n_layer=7, checkpoint_layers=checkpoint)
    whole = loop._interpreted(found, True, 1, range(found.n_layer))
    sampled = loop.micro_step(found, True, 1)
    assert [op.name for op in sampled.ops] == [op.name for op in whole.ops]
    assert sampled.grads.keys() == whole.grads.keys()


def test_a_4_bit_base_is_taken_apart_with_14_bytes_a_weight() -> None:
    """Two halves of indices of 8 bytes, and six copies of half of the weights in bfloat16, two of them stacked."""
    found = config(**QUANTIZED)
    live = most = 0
    for op in described(found).sections[0].ops:
        live += sum(each.bytes for each in op.allocates if each.kind is Kind.HALF_WEIGHTS)
        most = max(most, live)
        live -= sum(each.bytes for each in op.frees if each.kind is Kind.HALF_WEIGHTS)
    assert most / (256 * 128) == pytest.approx(14, rel=0.01)


def test_a_target_that_no_layer_has_is_told() -> None:
    unknown, known = models.unknown_targets(config(method="lora", lora_targets="q_proj,o_proj"))
    assert unknown == ["o_proj"] and "output_proj" in known


def test_an_optimizer_in_backward_keeps_few_gradients() -> None:
    """Each gradient goes when its parameter was updated: never all of them are there."""
    keys = {"gradient_accumulation_steps": 1, "n_layer": 7}
    whole = build.build(config(**keys), cuda=True, evaluates=False)
    stepping = build.build(config(**keys, zero_grad="in_backward"), cuda=True, evaluates=False)
    weights = sum(2 * each.numel for each in parameters(config(**keys)))
    assert _most_gradients(whole) == weights
    assert _most_gradients(stepping) < weights / 2
    updates = [sum(op.phase is Phase.OPTIMIZER for s in step.sections for op in s.ops) for step in (whole, stepping)]
    assert 0 < updates[0] < updates[1]


def _most_gradients(step: Step) -> int:
    live = most = 0
    for op in (op for section in step.sections for op in section.ops):
        live += sum(each.bytes for each in op.allocates if each.kind is Kind.GRADIENTS)
        most = max(most, live)
        live -= sum(each.bytes for each in op.frees if each.kind is Kind.GRADIENTS)
    assert not live
    return most
