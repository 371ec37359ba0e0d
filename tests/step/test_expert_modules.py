"""Experts that are modules, as before transformers 5, are described as the trace of such a module, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from described_models import config_of, described, first_difference
from expert_modules import experts_as_modules
from hf_models import Hf, changes, peak
from hypothesis import given, settings
from hypothesis import strategies as st

from oomph.step import models
from oomph.step.models.moe import shares

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = ("mixtral", "qwen3_moe")


@pytest.fixture(autouse=True)
def _modules() -> Iterator[None]:
    with experts_as_modules():
        yield


def difference(model: Hf, cuda: bool, precision: str) -> str:
    """Where the description of two micro-steps parts from the trace."""
    ours = described(config_of(model, precision), cuda=cuda, micro_steps=2)
    return first_difference(ours, model.traced(cuda=cuda, precision=precision, micro_steps=2))


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_are_modules_are_the_trace(family: str, precision: str, cuda: bool) -> None:
    assert not difference(Hf(family, kv_heads=2, tokens=51), cuda, precision)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], ["gate", "w2"]], ids=str)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_adapters_on_experts_are_the_trace(checkpoint: bool, targets: str | list[str]) -> None:
    lora = {"r": 4, "target_modules": targets, "lora_dropout": 0.1}
    assert not difference(Hf("mixtral", kv_heads=2, checkpoint=checkpoint, lora=lora), True, "loaded")


@pytest.mark.parametrize("family", FAMILIES)
def test_its_parameters_are_the_modules(family: str) -> None:
    model = Hf(family, kv_heads=2)
    theirs = [(name, tuple(each.shape)) for name, each in model.build().named_parameters()]
    ours = [(name.replace("block_sparse_moe", "mlp"), shape) for name, shape in models.parameters(config_of(model))]
    assert sorted(ours) == sorted(theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_trace_on_the_cpu_is_what_the_profiler_sees(family: str) -> None:
    model = Hf(family, kv_heads=2)
    traced = peak(changes(model.traced(cuda=False, micro_steps=2)))
    assert traced == pytest.approx(peak(model.profiled(micro_steps=2)), rel=1e-4)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 200))
def test_shares_are_whole_and_nearly_equal(count: int, among: int) -> None:
    found = shares(count, among)
    assert sum(found) == count and len(found) == among and max(found) - min(found) <= 1
