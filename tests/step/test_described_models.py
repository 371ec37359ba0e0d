"""Described architectures are the real classes' traces, byte for byte, and these are what real runs allocate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from described_models import config_of, described, first_difference, nanochat_config, traced
from hf_models import Hf, changes, peak
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nanochat_model import Nanochat

from oomph.checking.child import peak_allocated_bytes
from oomph.predict.memory import find_peak
from oomph.step import loop, models
from oomph.step.ops import Kernel, Section, Step
from oomph.step.parameters import flops_per_token

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = ("gpt2", "gpt_neox", "opt", "mixtral", "qwen3_moe")
PRECISIONS = ("float32", "autocast", "bfloat16")
UNTIMED = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(UNTIMED, max_examples=120)


def own_keys(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """What a family alone has."""
    if family == "gpt2":
        return {"activation_function": draw(st.sampled_from(["gelu_new", "gelu", "relu"]))}
    if family == "gpt_neox":
        turned = {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": draw(st.sampled_from([0.25, 1.0])),
        }
        return {
            "use_parallel_residual": draw(st.booleans()),
            "attention_bias": draw(st.booleans()),
            "rope_parameters": turned,
        }
    if family == "opt":
        narrow = draw(st.sampled_from([None, 12, 30]))
        keys = {"do_layer_norm_before": draw(st.booleans()), "enable_bias": draw(st.booleans())}
        return keys | ({"word_embed_proj_dim": narrow} if narrow else {})
    count = draw(st.integers(2, 5))
    chosen = {"num_experts_per_tok": draw(st.integers(1, 2))}
    if family == "mixtral":
        return chosen | {"num_local_experts": count, "sliding_window": draw(st.sampled_from([None, 5, 40]))}
    inner = 8 * draw(st.integers(1, 6))
    return chosen | {"num_experts": count, "moe_intermediate_size": inner, "norm_topk_prob": draw(st.booleans())}


@st.composite
def hf_models(draw: st.DrawFn) -> Hf:
    """A small model of any of the families."""
    family = draw(st.sampled_from(FAMILIES))
    heads = draw(st.sampled_from([1, 2, 4]))
    grouped = family in ("mixtral", "qwen3_moe")
    return Hf(
        family,
        layers=draw(st.integers(1, 3)),
        heads=heads,
        kv_heads=draw(st.sampled_from([each for each in (1, 2, 4) if heads % each == 0])) if grouped else heads,
        width=8 * heads * draw(st.integers(1, 5)),
        head_dim=4 * draw(st.integers(1, 9)) if grouped else None,
        ffn=8 * draw(st.integers(1, 20)),
        vocab=draw(st.integers(5, 400)),
        batch=draw(st.integers(1, 3)),
        tokens=draw(st.integers(2, 90)),
        tie=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.1])),
        checkpoint=draw(st.booleans()),
        more=own_keys(draw, family),
    )


def difference(model: Hf, cuda: bool, precision: str, attention: str = "flash") -> str:
    """Where the description of two micro-steps parts from the trace."""
    ours = described(config_of(model, precision, attention=attention), cuda=cuda, micro_steps=2)
    theirs = model.traced(cuda=cuda, precision=precision, micro_steps=2, attention=attention)
    return first_difference(ours, theirs)


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_description_is_the_trace(family: str, precision: str, cuda: bool) -> None:
    assert not difference(Hf(family, kv_heads=4, dropout=0.1), cuda, precision)


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", [*FAMILIES, "llama", "qwen3"])
def test_a_description_that_keeps_keys_and_values_is_the_trace(family: str, precision: str, cuda: bool) -> None:
    kept = Hf(family, kv_heads=4, dropout=0.1, more={"use_cache": True})
    assert not difference(kept, cuda, precision)


@UNTIMED
@given(hf_models(), st.booleans(), st.sampled_from(PRECISIONS), st.sampled_from(["flash", "efficient", "math"]))
def test_a_description_of_any_shape_is_the_trace(model: Hf, cuda: bool, precision: str, attention: str) -> None:
    assert not difference(model, cuda, precision, attention if cuda or attention == "math" else "flash")


@pytest.mark.slow
@LONG
@given(hf_models(), st.booleans(), st.sampled_from(PRECISIONS), st.sampled_from(["flash", "efficient", "math"]))
def test_many_descriptions_are_traces(model: Hf, cuda: bool, precision: str, attention: str) -> None:
    assert not difference(model, cuda, precision, attention if cuda or attention == "math" else "flash")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cpu_trace_is_what_the_profiler_sees(family: str, precision: str) -> None:
    model = Hf(family, kv_heads=2 if family in ("mixtral", "qwen3_moe") else 4)
    seen = peak(model.profiled(precision, micro_steps=2))
    assert peak(changes(model.traced(cuda=False, precision=precision, micro_steps=2))) == pytest.approx(seen, rel=1e-4)


# --- nanochat -----------------------------------------------------------------------------------------------------


@st.composite
def nanochat_keys(draw: st.DrawFn) -> dict[str, Any]:
    heads, size = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([8, 12, 16, 20, 32]))
    layers = draw(st.integers(1, 5))
    return {
        "n_layer": layers,
        "n_head": heads,
        "num_key_value_heads": draw(st.sampled_from([each for each in (1, 2, 4) if heads % each == 0])),
        "n_embd": heads * max(size, 24),
        "vocab_size": draw(st.sampled_from([64, 100, 130])),
        "block_size": draw(st.sampled_from([16, 64, 150, 300])),
        "batch_size": draw(st.integers(1, 3)),
        "window_pattern": draw(st.sampled_from(["L", "SSSL", "SL"])),
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        "checkpoint_layers": draw(st.sampled_from([0, 0, layers])),
    }


@pytest.mark.slow
@settings(UNTIMED, max_examples=8)
@given(nanochat_keys(), st.booleans(), st.sampled_from(["flash", "efficient", "math"]))
def test_nanochat_described_is_its_trace(keys: dict[str, Any], cuda: bool, attention: str) -> None:
    kernel = attention if cuda or attention == "math" else "flash"
    config = nanochat_config(**keys, attention=kernel)
    ours = described(config, cuda=cuda, micro_steps=2)
    assert not first_difference(ours, traced(lambda: Nanochat(config), config, cuda=cuda, micro_steps=2))


def test_nanochats_parameters_are_the_modules() -> None:
    config = nanochat_config(n_layer=5, vocab_size=100)
    assert [(name, tuple(p.shape)) for name, p in Nanochat(config).named_parameters()] == list(
        models.parameters(config)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cpu_trace_of_nanochat_is_what_the_profiler_sees(dtype: str) -> None:
    config = nanochat_config(dtype=dtype, block_size=200, window_pattern="SSSL")
    batch = torch.zeros(config.batch_size, config.block_size, dtype=torch.long)
    model = Nanochat(config)

    def real() -> None:
        for _ in range(2):
            model(batch, batch).backward()

    step = traced(lambda: Nanochat(config), config, cuda=False, micro_steps=2)
    assert peak(changes(step)) == pytest.approx(peak_allocated_bytes(real), rel=1e-4)


def test_flash_attention_3_needs_no_mask() -> None:
    windowed = nanochat_config(dtype="bfloat16", block_size=600, window_pattern="S", attention="flash3")
    masked = described(nanochat_config(dtype="bfloat16", block_size=600, window_pattern="S", attention="flash"))
    step = described(windowed)
    assert not any(op.name.endswith("mask") for op in step.sections[0].ops)
    assert find_peak(step).allocated_bytes < find_peak(masked).allocated_bytes


# --- what is common to all ----------------------------------------------------------------------------------------

SHAPES = {
    "gpt2": Hf("gpt2", layers=8),
    "gpt_neox": Hf("gpt_neox", layers=7),
    "opt": Hf("opt", layers=7, dropout=0.1),
    "mixtral": Hf("mixtral", layers=7, checkpoint=True),
    "qwen3_moe": Hf("qwen3_moe", layers=7),
}


@pytest.mark.parametrize("family", SHAPES)
def test_a_deep_model_is_the_one_interpreted_block_by_block(family: str) -> None:
    config = config_of(SHAPES[family], "autocast")
    sampled = loop.micro_step(config, True, 1)
    whole = loop._interpreted(config, True, 1, range(config.n_layer))
    steps = [Step((), (Section("micro-step", each.ops),)) for each in (sampled, whole)]
    assert not first_difference(*steps)
    assert sampled.grads.keys() == whole.grads.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_formula_counts_the_products_that_run(family: str) -> None:
    """6N for each token, less what multiplies it only on paper: biases and norms, and the first block's input."""
    model = Hf(family, width=128, heads=4, kv_heads=4, ffn=512, vocab=1024)
    config = config_of(model)
    products = sum(op.flops for op in described(config).sections[0].ops if op.kernel is Kernel.GEMM)
    tokens = config.batch_size * config.block_size
    attention = 12 * config.n_layer * config.n_embd * config.block_size
    assert products / tokens == pytest.approx(flops_per_token(config) - attention, rel=0.02)
