"""Described adapters are peft's own traces, byte for byte, and these are what real runs allocate."""

from __future__ import annotations

from typing import Any

import pytest
from described_models import config_of, described, first_difference
from hf_models import Hf, changes, peak
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oomph.step import loop, models
from oomph.step.parameters import parameters, trained

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = {
    "llama": ["q_proj", "v_proj"], "qwen3": ["q_proj", "k_proj", "v_proj", "o_proj"], "gemma2": ["down_proj"],
    "phi3": ["qkv_proj"], "gpt2": ["c_attn"], "gpt_neox": ["query_key_value"], "opt": ["q_proj", "fc2"],
    "mixtral": ["q_proj", "v_proj"],
}  # fmt: skip
PRECISIONS = ("float32", "autocast", "loaded", "bfloat16")  # loaded: autocast over a base in bfloat16
UNTIMED = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))


def difference(model: Hf, cuda: bool, precision: str) -> str:
    """Where the description of two micro-steps parts from the trace."""
    ours = described(config_of(model, precision), cuda=cuda, micro_steps=2)
    return first_difference(ours, model.traced(cuda=cuda, precision=precision, micro_steps=2))


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_described_adapters_are_the_trace(family: str, precision: str, cuda: bool) -> None:
    lora = {"r": 4, "target_modules": FAMILIES[family], "lora_dropout": 0.1}
    assert not difference(Hf(family, lora=lora), cuda, precision)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "qwen2"])  # without, with biases
def test_described_dora_is_the_trace(family: str, checkpoint: bool, dropout: float) -> None:
    lora = {"r": 4, "target_modules": "all-linear", "lora_dropout": dropout, "use_dora": True}
    assert not difference(Hf(family, kv_heads=2, checkpoint=checkpoint, lora=lora), True, "loaded")


@st.composite
def adapted(draw: st.DrawFn) -> Hf:
    """A small model with adapters."""
    family = draw(st.sampled_from(list(FAMILIES)))
    heads = draw(st.sampled_from([1, 2, 4]))
    grouped = family not in ("gpt2", "gpt_neox", "opt")
    lora: dict[str, Any] = {"r": draw(st.integers(1, 9)), "lora_dropout": draw(st.sampled_from([0.0, 0.1]))}
    lora["use_dora"] = family != "gpt2" and draw(st.booleans())
    wanted = [FAMILIES[family], "all-linear"]
    return Hf(
        family,
        layers=draw(st.integers(1, 3)),
        heads=heads,
        kv_heads=draw(st.sampled_from([each for each in (1, 2, 4) if heads % each == 0])) if grouped else heads,
        width=8 * heads * draw(st.integers(1, 5)),
        ffn=8 * draw(st.integers(1, 20)),
        vocab=draw(st.integers(5, 400)),
        batch=draw(st.integers(1, 3)),
        tokens=draw(st.integers(2, 90)),
        tie=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.1])),
        checkpoint=draw(st.booleans()),
        lora=lora | {"target_modules": FAMILIES[family] if family == "mixtral" else draw(st.sampled_from(wanted))},
        half_adapters=draw(st.booleans()),
    )


@UNTIMED
@given(adapted(), st.booleans(), st.sampled_from(PRECISIONS))
def test_adapters_of_any_shape_are_the_trace(model: Hf, cuda: bool, precision: str) -> None:
    assert not difference(model, cuda, precision)


@pytest.mark.slow
@settings(UNTIMED, max_examples=150)
@given(adapted(), st.booleans(), st.sampled_from(PRECISIONS))
def test_many_adapters_are_traces(model: Hf, cuda: bool, precision: str) -> None:
    assert not difference(model, cuda, precision)


# Without products in bfloat16 at the peak: oneDNN's take memory of their own, which depends on the processor.
@pytest.mark.parametrize(
    ("precision", "checkpoint"),
    [*((precision, False) for precision in PRECISIONS), ("float32", True), ("bfloat16", True)],
)
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "qwen3"])  # which has norms more
def test_a_cpu_trace_of_adapters_is_what_the_profiler_sees(
    family: str, dora: bool, precision: str, checkpoint: bool
) -> None:
    lora = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.1, "use_dora": dora}
    width = 128 if checkpoint else 64
    model = Hf(family, kv_heads=2, width=width, ffn=2 * width, checkpoint=checkpoint, lora=lora)
    seen = peak(model.profiled(precision, micro_steps=2))
    assert peak(changes(model.traced(cuda=False, precision=precision, micro_steps=2))) == pytest.approx(seen, rel=1e-4)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mixtral"])
def test_parameters_are_those_of_peft(family: str) -> None:
    model = Hf(family, lora={"r": 4, "target_modules": "all-linear"})
    theirs = [(tuple(parameter.shape), parameter.requires_grad) for _, parameter in model.build().named_parameters()]
    assert [(each.shape, each.trained) for each in parameters(config_of(model))] == theirs


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_deep_adapted_model_is_its_blocks_repeated(checkpoint: bool) -> None:
    model = Hf("llama", layers=7, kv_heads=2, checkpoint=checkpoint, lora={"r": 4, "target_modules": "all-linear"})
    config = config_of(model, "loaded")
    whole = loop._interpreted(config, True, 1, range(config.n_layer))
    repeated = loop.micro_step(config, True, 1)
    assert [(op.name, [b.bytes for b in op.allocates], len(op.frees)) for op in repeated.ops] == [
        (op.name, [b.bytes for b in op.allocates], len(op.frees)) for op in whole.ops
    ]
    assert set(repeated.grads) == {each.name for each in trained(config)} == set(whole.grads)
    first, second, *_ = models.kinds(config)
    assert (first == second) is checkpoint  # without it the first block's input needs no gradient
