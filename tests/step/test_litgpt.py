"""litgpt's models and adapters, described, are their traces, byte for byte; and what its loop holds."""

from __future__ import annotations

from typing import Any

import pytest
from described_models import described, first_difference, settled, traced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from litgpt_model import Litgpt

from oomph.config.load import from_dict
from oomph.config.programs import OWN_CLASSES
from oomph.config.schema import TrainConfig
from oomph.step import build, loop, models
from oomph.step.ops import Kind, Phase
from oomph.step.parameters import parameters

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = OWN_CLASSES["litgpt"]
EVERY = "query,key,value,projection,mlp,head"
UNTIMED = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
OWN = {
    "gpt_neox": {"num_key_value_heads": 4, "partial_rotary_factor": 0.25},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}


def config(family: str = "llama", **keys: Any) -> TrainConfig:
    """A small settled config."""
    small = {
        "trainer": "litgpt", "model_type": family, "n_layer": 2, "n_head": 4, "num_key_value_heads": 2, "n_embd": 64,
        "intermediate_size": 96, "vocab_size": 120, "block_size": 40, "batch_size": 2, "dtype": "bfloat16",
        "attention": "flash", "loss_chunk": 16, "lora_rank": 4,
    }  # fmt: skip
    return settled(from_dict({**small, **OWN.get(family, {}), **keys}))


def difference(found: TrainConfig, cuda: bool = True) -> str:
    """Where two micro-steps part from the trace."""
    theirs = traced(lambda: Litgpt(found), found, cuda=cuda, micro_steps=2)
    return first_difference(described(found, cuda=cuda, micro_steps=2), theirs)


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_its_trace(family: str, method: str, cuda: bool) -> None:
    assert not difference(config(family, method=method), cuda)


@pytest.mark.parametrize("targets", ["all-linear", EVERY, "head", "query,key,value"])
def test_adapters_of_other_layers_are_their_trace(targets: str) -> None:
    assert not difference(config(method="lora", lora_targets=targets))


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_window_is_its_trace(method: str) -> None:
    assert not difference(config("gemma2", method=method, sliding_window=8, sliding_window_pattern=2))


def test_a_last_chunk_of_one_token_which_no_loss_uses_is_its_trace() -> None:
    assert not difference(config(method="lora", block_size=33, batch_size=1))


@st.composite
def any_config(draw: st.DrawFn) -> TrainConfig:
    family = draw(st.sampled_from(["llama", "qwen3", "olmo2", "gpt_neox"]))
    heads = draw(st.sampled_from([1, 2, 4]))
    groups = [each for each in (1, 2, 4) if heads % each == 0] if family != "gpt_neox" else [heads]
    return config(
        family,
        n_layer=draw(st.integers(1, 3)),
        n_head=heads,
        num_key_value_heads=draw(st.sampled_from(groups)),
        n_embd=8 * heads * draw(st.integers(1, 4)),
        intermediate_size=8 * draw(st.integers(1, 20)),
        vocab_size=draw(st.integers(5, 300)),
        block_size=draw(st.integers(2, 70)),
        batch_size=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        method=draw(st.sampled_from(["full", "lora"])),
        lora_dropout=draw(st.sampled_from([0.0, 0.1])),
        lora_targets=draw(st.sampled_from([None, EVERY, "value,mlp"])),
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


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("cuda", [True, False])
def test_mixed_precision_is_its_trace(method: str, cuda: bool) -> None:
    assert not difference(config(method=method, autocast=True, lora_dropout=0.0), cuda)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_the_modules(family: str, method: str) -> None:
    found = config(family, method=method)
    theirs = {name: (tuple(each.shape), each.requires_grad) for name, each in Litgpt(found).named_parameters()}
    assert {each.name: (each.shape, each.trained) for each in parameters(found)} == theirs


@pytest.mark.parametrize("keys", [{}, {"method": "lora"}, {"method": "qlora"}, {"autocast": True}])
def test_a_deep_model_is_its_blocks_repeated(keys: dict[str, Any]) -> None:
    found = config(n_layer=7, **keys)
    whole, sampled = loop._interpreted(found, True, 1, range(7)), loop.micro_step(found, True, 1)
    assert [op.name for op in sampled.ops] == [op.name for op in whole.ops]
    assert sampled.grads.keys() == whole.grads.keys()


def test_logits_of_the_step_before_are_held() -> None:
    found = config(method="lora")
    step = build.build(found, cuda=True)
    held = sum(each.bytes for each in step.resident if each.kind is Kind.LOGITS and each.name == "logits")
    assert held == 4 * 2 * 40 * 120  # float32, every token of the batch


def test_a_quantized_base_keeps_a_gradient_of_its_embedding_for_good() -> None:
    step = build.build(config(method="qlora"), cuda=True)
    assert 2 * 120 * 64 in [each.bytes for each in step.resident if each.kind is Kind.GRADIENTS]


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_an_older_bitsandbytes_holds_the_inputs_of_the_step_before(family: str) -> None:
    built = [
        build.build(config(family, method="qlora", n_layer=7, bitsandbytes_version=each)) for each in ("0.42", "0.43.2")
    ]
    before, after = (sum(each.bytes for each in step.resident) for step in built)
    inputs = 7 * (3 * 64 + 96) + 64  # of a block's projections, its output's and its MLP's; and of the head
    assert before - after == 2 * 2 * 40 * inputs


def test_a_quantized_head_is_quantized_too() -> None:
    names = {each.name for each in build.build(config(method="qlora"), cuda=True).resident}
    assert "lm_head.weight.packed" in names and "transformer.wte.weight" in names


def test_validation_makes_all_logits_at_once() -> None:
    step = build.build(config(method="lora", block_size=64), cuda=True)
    made = [each for s in step.sections for op in s.ops if op.phase is Phase.EVAL for each in op.allocates]
    assert 2 * 64 * 120 * 4 in {each.bytes for each in made}


def test_a_target_that_litgpt_has_not_is_told() -> None:
    unknown, known = models.unknown_targets(config(method="lora", lora_targets="query,q_proj"))
    assert unknown == ["q_proj"] and "projection" in known
