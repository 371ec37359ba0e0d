"""The parameters of a model that is never built, against the model built."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_gpt import Gpt

from oomph.config.schema import TrainConfig
from oomph.step import build as steps
from oomph.step import loop
from oomph.step.ops import Kind
from oomph.step.parameters import by_group, count_nanogpt, flops_per_token, flops_per_token_causal, parameters

RUN_A = TrainConfig(n_layer=6, n_head=6, n_embd=384, block_size=512)
RUN_B = TrainConfig(n_layer=12, n_head=12, n_embd=384, block_size=1024)
SIZES = st.integers(1, 6)


@settings(deadline=None, max_examples=30)
@given(SIZES, SIZES, SIZES, SIZES, st.booleans(), st.booleans())
def test_names_shapes_and_order_are_those_of_the_built_model(
    layers: int, width: int, vocab: int, block: int, bias: bool, tied: bool
) -> None:
    config = TrainConfig(
        n_layer=layers, n_head=1, n_embd=width, vocab_size=vocab, block_size=block, bias=bias, tie_weights=tied
    )
    built = [(name, tuple(tensor.shape)) for name, tensor in Gpt(config).named_parameters()]
    assert [(parameter.name, parameter.shape) for parameter in parameters(config)] == built
    numbers = sum(parameter.numel for parameter in parameters(config))
    assert count_nanogpt(config) == numbers - block * width
    assert sum(by_group(parameters(config)).values()) == numbers


def test_run_a_has_the_parameters_that_nanogpt_printed() -> None:
    decayed = [parameter.numel for parameter in parameters(RUN_A) if parameter.decayed]
    assert round(count_nanogpt(RUN_A) / 1e6, 2) == 29.94
    assert (len(decayed), sum(decayed)) == (26, 30_130_176)


def test_run_b_has_the_parameters_and_flops_of_its_log() -> None:
    assert round(count_nanogpt(RUN_B) / 1e6, 2) == 40.56
    step_flops = flops_per_token(RUN_B) * 524_288
    assert round(step_flops / 3.91 / 312e12, 3) == 0.129  # 3900 to 3920 ms a step, MFU 12.9 %


def test_a_token_attends_to_half_of_the_tokens_on_average() -> None:
    full, causal = (count(RUN_B) - 6 * count_nanogpt(RUN_B) for count in (flops_per_token, flops_per_token_causal))
    assert causal / full == pytest.approx((1024 + 1) / 2 / 1024)


def settled(**keys: object) -> TrainConfig:
    given_keys: dict[str, object] = {
        "compile": False, "dtype": "bfloat16", "return_logits": True, "loss_chunk": 0, "optimizer_loop": "fused",
        "batch_size": 1, "block_size": 64,
    }  # fmt: skip
    return TrainConfig(**{**given_keys, **keys})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("optimizer", "least", "most"),
    [("adamw", 8.0, 8.001), ("sgd", 4.0, 4.0), ("adafactor", 0.0, 0.01), ("muon", 4.0, 6.0), ("adamw8bit", 2.03, 2.04)],
)
def test_state_bytes_of_a_parameter_by_optimizer(optimizer: str, least: float, most: float) -> None:
    config = settled(optimizer=optimizer)
    state = sum(buffer.bytes for buffer in loop.build(config).resident if buffer.kind is Kind.OPTIMIZER)
    assert least <= state / sum(parameter.numel for parameter in parameters(config)) <= most


@given(st.integers(2, 8))
def test_distributed_training_holds_the_gradients_twice(devices: int) -> None:
    config = settled(world_size=devices, gradient_accumulation_steps=40, parallel="ddp")
    alone, shared = (
        [buffer.bytes for buffer in steps.build(each).resident if buffer.kind is Kind.COMMUNICATION]
        for each in (settled(gradient_accumulation_steps=40), config)
    )
    assert alone == []
    assert sum(shared) == 4 * sum(parameter.numel for parameter in parameters(config))
    assert shared[0] >= 1 << 20
