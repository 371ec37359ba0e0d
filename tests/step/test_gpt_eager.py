"""The eager step by arithmetic is the traced one, byte for byte."""

from __future__ import annotations

import sys
from itertools import groupby

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_gpt import movements, rounded, traced, unfolded

from oomph.config.schema import TrainConfig
from oomph.predict.memory import find_peak
from oomph.step import build as steps
from oomph.step import loop
from oomph.step.ops import Buffer, Kind, Phase, Section
from oomph.step.tensor.tensor import Storage


def config_of(**keys: object) -> TrainConfig:
    """A small settled config, run eagerly."""
    settled: dict[str, object] = {
        "compile": False, "dtype": "bfloat16", "return_logits": True, "loss_chunk": 0, "optimizer_loop": "fused",
        "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 64, "batch_size": 2, "vocab_size": 512,
        "gradient_accumulation_steps": 3,
    }  # fmt: skip
    return TrainConfig(**{**settled, **keys})  # type: ignore[arg-type]


GPT2 = {
    "n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304, "batch_size": 16,
    "gradient_accumulation_steps": 32,
}  # fmt: skip


Keys = dict[str, object]


@st.composite
def gpu_shapes(draw: st.DrawFn) -> Keys:
    """A small model of any shape."""
    heads = draw(st.integers(1, 4))
    return {
        "n_head": heads,
        "n_embd": heads * draw(st.integers(2, 40)),
        "block_size": draw(st.integers(2, 150)),
        "batch_size": draw(st.integers(1, 4)),
        "vocab_size": draw(st.integers(3, 900)),
    }


@st.composite
def gpu_options(draw: st.DrawFn) -> Keys:
    """Any option that a trace knows."""
    dtype, layers = draw(st.sampled_from(["bfloat16", "float16", "float32"])), draw(st.sampled_from([1, 1, 1, 2]))
    return {
        "n_layer": layers,
        "gradient_accumulation_steps": draw(st.sampled_from([1, 1, 2, 2, 3, 5])),
        "trainer": draw(st.sampled_from(["nanogpt", "oomph"])),
        "dtype": dtype,
        "autocast": dtype != "bfloat16" or draw(st.booleans()),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
        "bias": draw(st.booleans()),
        "tie_weights": draw(st.booleans()),
        "attention": draw(st.sampled_from(["flash", "efficient", "math"])),
        "return_logits": draw(st.booleans()),
        "checkpoint_layers": draw(st.integers(0, layers)),
        "loss_chunk": draw(st.sampled_from([0, 0, 37, 64])),
        "optimizer": draw(st.sampled_from(["adamw", "adamw", "sgd", "muon"])),
        "optimizer_loop": draw(st.sampled_from(["fused", "foreach", "forloop"])),
        "grad_clip": draw(st.sampled_from([0.0, 1.0])),
    }


@st.composite
def cpu_shapes(draw: st.DrawFn) -> Keys:
    heads = draw(st.integers(1, 3))
    return {
        "n_head": heads,
        "n_embd": heads * draw(st.integers(2, 24)),
        "block_size": draw(st.integers(2, 300)),
        "batch_size": draw(st.integers(1, 3)),
        "vocab_size": draw(st.integers(3, 500)),
    }


@st.composite
def cpu_options(draw: st.DrawFn) -> Keys:
    """What nanoGPT runs on a CPU, or oomph train, which has more options and autocasts there too."""
    layers = draw(st.sampled_from([1, 1, 1, 2]))
    options: Keys = {
        "dtype": "float32",
        "optimizer_loop": "forloop",
        "n_layer": layers,
        "gradient_accumulation_steps": draw(st.integers(1, 3)),
        "dropout": draw(st.sampled_from([0.0, 0.2])),
        "bias": draw(st.booleans()),
        "tie_weights": draw(st.booleans()),
        "checkpoint_layers": draw(st.integers(0, layers)),
    }
    if draw(st.booleans()):
        return options
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    return options | {
        "trainer": "oomph",
        "dtype": dtype,
        "autocast": dtype != "bfloat16" or draw(st.sampled_from([True, True, False])),
        "attention": draw(st.sampled_from(["flash", "math"])),
        "return_logits": False,
        "loss_chunk": draw(st.sampled_from([0, 37, 64])),
        "optimizer": draw(st.sampled_from(["adamw", "adamw", "sgd", "muon"])),
        "optimizer_loop": draw(st.sampled_from(["fused", "foreach", "forloop"])),
    }


def gpu_configs() -> st.SearchStrategy[TrainConfig]:
    return st.builds(lambda shape, options: config_of(**shape, **options), gpu_shapes(), gpu_options())


def cpu_configs() -> st.SearchStrategy[TrainConfig]:
    return st.builds(lambda shape, options: config_of(**shape, **options), cpu_shapes(), cpu_options())


def check_equal(config: TrainConfig, cuda: bool, first: bool) -> None:
    """Both lists begin with the same buffers and change by the same bytes at every operation."""
    rounding = 512 if cuda else 1
    predicted = unfolded(loop.build(config, cuda=cuda, first=first, threads=torch.get_num_threads()))
    seen = traced(config, cuda=cuda, first=first)
    assert rounded(predicted.resident, rounding) == rounded(seen.resident, rounding)
    for ours, theirs in zip(predicted.sections, seen.sections, strict=True):
        assert ours.name == theirs.name
        assert movements(ours, rounding) == movements(theirs, rounding), ours.name


QUICK = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
STEPS = st.booleans()  # whether it is a run's first


@QUICK
@given(gpu_configs(), STEPS)
def test_every_operation_on_a_gpu_moves_the_bytes_that_a_trace_sees(config: TrainConfig, first: bool) -> None:
    check_equal(config, cuda=True, first=first)


@settings(QUICK, max_examples=4)
@given(cpu_configs(), STEPS)
def test_every_operation_on_a_cpu_moves_the_bytes_that_a_trace_sees(config: TrainConfig, first: bool) -> None:
    check_equal(config, cuda=False, first=first)


MODERN: dict[str, object] = {
    "trainer": "oomph", "return_logits": False, "position_embedding_type": "rotary", "norm_type": "rmsnorm",
    "use_qk_norm": True, "is_gated_act": True, "hidden_act": "silu", "optimizer": "muon", "n_layer": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"num_key_value_heads": 1, "n_layer": 2, "checkpoint_layers": 1, "loss_chunk": 37},
        {"autocast": False, "is_gated_act": False, "hidden_act": "relu2", "head_dim": 24},
    ],
    ids=str,
)
def test_the_modern_recipe_on_a_gpu_moves_the_bytes_that_a_trace_sees(keys: Keys) -> None:
    config = config_of(**MODERN | keys)
    predicted, seen = unfolded(loop.build(config, cuda=True, first=False, threads=1)), traced(config, cuda=True)
    assert rounded(predicted.resident) == rounded(seen.resident)
    for ours, theirs in zip(predicted.sections, seen.sections, strict=True):
        assert hills(ours) == hills(theirs), ours.name


def hills(section: Section) -> list[int]:
    """Rises and falls in turn: a fake rms_norm makes in two operations what the kernel makes in one."""
    return [sum(several) for _, several in groupby(movements(section), key=lambda change: change > 0)]


# Hundreds of configs. PyTorch remembers what an operation on fake tensors of a shape yields, so that several sets of
# options in turn on one shape take half the time of as many shapes.


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trainer", ["nanogpt", "oomph"])
@settings(QUICK, max_examples=21)
@given(shape=gpu_shapes(), several=st.lists(st.tuples(gpu_options(), STEPS), min_size=6, max_size=6))
def test_more_gpu_configs_agree_with_their_traces(trainer: str, shape: Keys, several: list[tuple[Keys, bool]]) -> None:
    for options, first in several:
        check_equal(config_of(**shape, **options | {"trainer": trainer}), cuda=True, first=first)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(QUICK, max_examples=11)
@given(cpu_shapes(), st.lists(st.tuples(cpu_options(), STEPS), min_size=5, max_size=5))
def test_more_cpu_configs_agree_with_their_traces(shape: Keys, several: list[tuple[Keys, bool]]) -> None:
    for options, first in several:
        check_equal(config_of(**shape, **options), cuda=False, first=first)


@given(gpu_configs(), st.booleans())
def test_what_is_freed_was_allocated_and_lives(config: TrainConfig, first: bool) -> None:
    step = loop.build(config, first=first)
    live = set(step.resident)
    for section in step.sections:
        for op in section.ops:
            assert live.isdisjoint(op.allocates)
            live.update(op.allocates)
            assert live.issuperset(op.frees)
            live.difference_update(op.frees)


@given(gpu_configs())
def test_a_step_ends_with_what_it_began_with(config: TrainConfig) -> None:
    step = loop.build(config)
    balance = sum(sum(movements(section)) for section in step.sections)
    assert balance == 0


@given(gpu_configs())
def test_a_first_step_leaves_the_optimizers_state_behind(config: TrainConfig) -> None:
    first, later = loop.build(config, first=True), loop.build(config)
    left = sum(rounded(first.resident)) + sum(sum(movements(section)) for section in first.sections)
    assert left == sum(rounded(later.resident))


def test_a_block_keeps_36_bytes_for_each_number_of_its_input() -> None:
    config = TrainConfig(n_layer=4, batch_size=2, dropout=0.0, dtype="bfloat16", compile=False, attention="flash")
    alive: set[Buffer] = set()
    for op in steps.build(config, evaluates=False).sections[0].ops:
        if op.phase is Phase.FORWARD:
            alive = (alive | set(op.allocates)) - set(op.frees)
    numbers = config.batch_size * config.block_size * config.n_embd
    kept = [
        b.bytes for b in alive if b.block == 2 and b.kind in (Kind.ACTIVATIONS, Kind.ATTENTION) and b.bytes > numbers
    ]
    assert sum(kept) == 36 * numbers


def test_gpt2_at_16_sequences_peaks_where_the_loss_turns_back() -> None:
    peak = find_peak(loop.build(config_of(**GPT2)))
    logits = 16 * 1024 * 50304
    assert peak.op.name == "loss.nll_loss.dx"
    assert peak.section.name == "micro-step 2"
    vocabulary_sized = [buffer.bytes for buffer in peak.live if buffer.kind is Kind.LOGITS and buffer.bytes >= logits]
    assert sorted(vocabulary_sized) == [2 * logits, 2 * logits, 4 * logits, 4 * logits]
    assert 16_000 < peak.allocated_bytes / 2**20 < 17_500  # MiB


def test_not_returning_the_logits_saves_them_once_at_the_peak() -> None:
    kept = find_peak(loop.build(config_of(**GPT2))).allocated_bytes
    dropped = find_peak(loop.build(config_of(**GPT2, return_logits=False))).allocated_bytes
    assert kept - dropped == 2 * 16 * 1024 * 50304


def test_a_chunked_loss_holds_no_tensor_of_all_logits() -> None:
    step = loop.build(config_of(**GPT2, return_logits=False, loss_chunk=1024))
    largest = max(buffer.bytes for section in step.sections for op in section.ops for buffer in op.allocates)
    assert largest < 2 * 16 * 1024 * 50304
    assert find_peak(step).allocated_bytes < 9_500 * 2**20


def test_evaluation_holds_the_training_loops_logits_too() -> None:
    step = loop.build(config_of(**GPT2))
    evaluation = step.sections[-1]
    assert all(op.phase is Phase.EVAL for op in evaluation.ops)
    training = sum(buffer.bytes for buffer in step.resident if buffer.name == "lm_head")
    assert training == 2 * 16 * 1024 * 50304


def test_operations_count_the_flops_of_the_usual_formula() -> None:
    config = config_of(**GPT2)
    step = loop.build(config)
    done = sum(
        op.flops * section.times for section in step.sections for op in section.ops if op.phase is not Phase.EVAL
    )
    tokens = config.batch_size * config.block_size * config.gradient_accumulation_steps
    matrices = config.vocab_size * config.n_embd + config.n_layer * 12 * config.n_embd**2
    attention = 2 * (config.block_size + 1) * config.n_embd * config.n_layer * 7 // 2
    assert done == tokens * (6 * matrices + attention)


def test_checkpointing_every_block_computes_them_once_more() -> None:
    plain = loop.build(config_of(**GPT2)).sections[1]
    again = loop.build(config_of(**GPT2, checkpoint_layers=12)).sections[1]
    tokens, width = 16 * 1024, 768
    products = 2 * tokens * 8 * width * width + 2 * tokens * 1025 * width  # all but the last one of the MLP
    assert sum(op.flops for op in again.ops) - sum(op.flops for op in plain.ops) == 12 * products
    assert find_peak(loop.build(config_of(**GPT2, checkpoint_layers=12))).allocated_bytes < 13_000 * 2**20


def test_cublas_keeps_a_workspace_for_each_of_two_threads() -> None:
    sizes = [b.bytes for b in steps.build(config_of()).resident if b.kind is Kind.WORKSPACE]
    assert sum(sizes) == 17_039_360  # measured on an A100 (erees.dev)
    assert steps.workspaces((9, 0)) == (32 << 20, 32 << 20)


def test_a_buffer_whose_making_was_interrupted_is_let_go_in_silence() -> None:
    raised: list[object] = []
    before, sys.unraisablehook = sys.unraisablehook, raised.append
    try:
        del_me = Storage.__new__(Storage)  # as Ctrl-C leaves it, between __new__ and __init__
        del del_me
    finally:
        sys.unraisablehook = before
    assert raised == []
