"""A deep compiled model from three of its blocks against the same model recorded whole."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from oomph.config.programs import MIXTURES, MODEL_TYPES
from oomph.config.schema import TrainConfig
from oomph.step import models
from oomph.step.build import build
from oomph.step.compile.model import CompiledEvaluation, CompiledModel, ProgramMaker, compiled_model
from oomph.step.depth import sample
from oomph.step.ops import Buffer, Op

SMALL = {"n_head": 4, "n_embd": 128, "block_size": 128, "batch_size": 4, "vocab_size": 1000}
GPT2: dict[str, Any] = {"return_logits": True, "loss_chunk": 0, "dtype": "bfloat16", "n_layer": 7, **SMALL}
LLAMA: dict[str, Any] = {
    **GPT2, "model_type": "llama", "trainer": "hf", "return_logits": False, "num_key_value_heads": 2, "bias": False,
    "intermediate_size": 352, "hidden_act": "silu",
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2, 8 blocks": {**GPT2, "n_layer": 8},
    "gpt2 with dropout and biases": {**GPT2, "dropout": 0.1, "bias": True},
    "gpt2 in float32": {**GPT2, "dtype": "float32"},
    "gpt2 in pure bfloat16": {**GPT2, "autocast": False},
    "gpt2, plain attention": {**GPT2, "attention": "math"},
    "gpt2 checkpointed": {**GPT2, "checkpoint_layers": 7},
    "gpt2, some blocks checkpointed": {**GPT2, "n_layer": 10, "checkpoint_layers": 5, "dropout": 0.1},
    "gpt2, loss in chunks": {**GPT2, "return_logits": False, "loss_chunk": 1, "trainer": "oomph"},
    "llama": LLAMA,
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 64, "tie_weights": True},
    "gemma2": {
        **LLAMA, "model_type": "gemma2", "n_layer": 10, "head_dim": 32, "sliding_window": 64, "hidden_act": "gelu",
        "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        **LLAMA, "model_type": "gemma3_text", "n_layer": 26, "head_dim": 32, "sliding_window": 64,
        "sliding_window_pattern": 6, "hidden_act": "gelu",
    },
    "opt checkpointed": {
        **LLAMA, "model_type": "opt", "bias": True, "num_key_value_heads": None, "intermediate_size": 512,
        "hidden_act": "relu", "max_position_embeddings": 128, "checkpoint_layers": 7,
    },
}  # fmt: skip


def buffers(found: tuple[Buffer, ...]) -> list[tuple[str, int, str, int | None]]:
    return [(b.name, b.bytes, b.kind.value, b.block) for b in found]


def written(ops: tuple[Op, ...]) -> list[Any]:
    """Everything that operations say."""
    return [
        (op.name, op.kernel, op.shape, op.flops, op.bytes_moved, buffers(op.allocates), sorted(buffers(op.frees)))
        for op in ops
    ]


def made(config: TrainConfig, cuda: bool, whole: bool) -> tuple[CompiledModel, CompiledEvaluation]:
    layers, gaps = (range(config.n_layer), []) if whole else sample(models.kinds(config))
    assert whole or gaps
    return tuple(getattr(ProgramMaker(config, cuda, 1, layers, gaps), part)() for part in ("training", "evaluation"))


@pytest.mark.parametrize("checkpointed", [0, 4, 7])
@pytest.mark.parametrize("architecture", [each for each in MODEL_TYPES if each not in ("nanochat", "qwen")])
def test_every_architecture_compiles_at_any_depth(architecture: str, checkpointed: int) -> None:
    keys = {**LLAMA, "model_type": architecture, "checkpoint_layers": checkpointed, "max_position_embeddings": 128}
    if architecture in MIXTURES:
        keys |= {"num_experts": 4, "num_experts_per_tok": 2}
    if architecture in ("gpt2", "gpt_neox", "opt"):
        keys |= {"bias": True, "num_key_value_heads": None, "intermediate_size": 512, "hidden_act": "gelu"}
    config = TrainConfig(**keys)
    step = build(config)
    alive = dict.fromkeys(step.resident)
    for op in (op for section in step.sections for op in section.ops):
        alive |= dict.fromkeys(op.allocates)
        assert alive.keys() >= set(op.frees), op.name
        alive = {buffer: None for buffer in alive if buffer not in op.frees}
    assert {op.block for section in step.sections for op in section.ops} >= set(range(7))


@pytest.mark.parametrize("cuda", [True, False], ids=["card", "cpu"])
@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_that_are_repeated_are_those_of_the_whole_model(name: str, cuda: bool) -> None:
    (repeated, evaluation), (whole, evaluation_of_whole) = (
        made(TrainConfig(**CONFIGS[name]), cuda, each) for each in (False, True)
    )
    assert written(repeated.forward) == written(whole.forward)
    assert written(repeated.backward) == written(whole.backward)
    assert written(evaluation.forward) == written(evaluation_of_whole.forward)
    assert [(name, b.bytes) for name, b in repeated.grads.items()] == [(n, b.bytes) for n, b in whole.grads.items()]


def test_a_program_leaves_hardly_anything_to_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        compiled_model(TrainConfig(**{**GPT2, "vocab_size": 1001}), True, 1)
        assert gc.collect() < 1000  # its graph is some ten thousand objects
    finally:
        gc.enable()
