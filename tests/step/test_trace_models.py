"""Traces of transformers' models, held against what PyTorch's profiler sees of a real step on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import Hf, changes, peak
from torch import nn

from oomph.step.ops import Kernel, Phase, Step
from oomph.step.trace.compiled import compiled
from oomph.step.trace.eager import trace

pytestmark = pytest.mark.filterwarnings("ignore")  # inductor warns of what this machine lacks, peft of a config
GEMMA3 = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
DESCRIBED = {
    "llama": Hf("llama", kv_heads=2), "mistral": Hf("mistral", kv_heads=2), "qwen2": Hf("qwen2", kv_heads=2),
    "qwen3": Hf("qwen3", head_dim=32), "olmo2": Hf("olmo2"), "phi3": Hf("phi3", kv_heads=2),
    "gemma2": Hf("gemma2", kv_heads=2, more={"sliding_window": 16}), "gemma3": Hf("gemma3_text", more=GEMMA3),
    "gpt2": Hf("gpt2"), "gpt_neox": Hf("gpt_neox"), "opt": Hf("opt"), "mixtral": Hf("mixtral", kv_heads=2),
    "qwen3_moe": Hf("qwen3_moe", kv_heads=2),
}  # fmt: skip
OTHERS = {
    "bert": Hf("bert"), "t5": Hf("t5"), "vit": Hf("vit"), "deepseek_v3": Hf("deepseek_v3"),
    "lora": Hf("llama", lora_rank=4), "checkpointed": Hf("llama", checkpoint=True),
}  # fmt: skip
FAMILIES = DESCRIBED | OTHERS


@pytest.mark.parametrize("family", FAMILIES)
def test_a_traced_step_peaks_where_the_profiler_sees_it(family: str) -> None:
    model = FAMILIES[family]
    seen = peak(changes(model.traced(cuda=False, micro_steps=2)))
    assert seen == pytest.approx(peak(model.profiled(micro_steps=2)), rel=1e-4)


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
@pytest.mark.parametrize("family", [*DESCRIBED, "deepseek_v3", "lora", "checkpointed"])
def test_a_traced_step_in_half_precision_peaks_where_the_profiler_sees_it(family: str, precision: str) -> None:
    model = FAMILIES[family]
    seen = peak(changes(model.traced(cuda=False, precision=precision, micro_steps=2)))
    assert seen == pytest.approx(peak(model.profiled(precision, micro_steps=2)), rel=1e-4)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_traced_step_with_autocast_peaks_where_the_profiler_sees_it(family: str) -> None:
    model = FAMILIES[family]
    seen = peak(changes(model.traced(cuda=False, precision="autocast", micro_steps=2)))
    assert seen == pytest.approx(peak(model.profiled("autocast", micro_steps=2)), rel=1e-4)


class Called(nn.Module):
    """A transformers model called with its inputs in order."""

    def __init__(self, model: Hf) -> None:
        super().__init__()
        self.model, self.names = model.build(), tuple(model.inputs())

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result: Any = self.model(**dict(zip(self.names, inputs, strict=True)))
        return result.logits, result.loss


def planned(model: Hf, make: Any, **options: Any) -> Step:
    step: Step = make(lambda: Called(model), tuple(model.inputs().values()), **options)
    return step


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "gpt2"])
def test_a_mask_is_made_compiled_and_not_eager(family: str) -> None:
    model = Hf(family, tokens=128)
    kernels = []
    for make in (trace, compiled):
        step = planned(model, make, **({"evaluation": False} if make is compiled else {}))
        kernels += [{op.name.rpartition(".")[2] for op in step.sections[0].ops if op.kernel is Kernel.ATTENTION}]
    assert all("flash" in name for name in kernels[0])
    assert all("efficient" in name for name in kernels[1])


def flops(step: Step, phase: Phase) -> int:
    return sum(op.flops for op in step.sections[0].ops if op.phase is phase and op.kernel is Kernel.GEMM)


@pytest.mark.parametrize("autocast", [True, False])
def test_experts_are_counted_and_get_gradients_compiled_as_eager(autocast: bool) -> None:
    model = Hf("mixtral")
    eager = planned(model, trace, autocast=autocast)
    step = planned(model, compiled, autocast=autocast, evaluation=False)
    experts = 2 * 2 * (2 * model.tokens * model.batch) * model.width * 3 * model.ffn  # two blocks, two experts a token
    dense = Hf("mixtral", more={"num_experts_per_tok": 1})
    assert flops(eager, Phase.FORWARD) - flops(planned(dense, trace, autocast=autocast), Phase.FORWARD) == experts // 2
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert flops(step, phase) == flops(eager, phase)
    trained = {name for name, _ in Called(model).named_parameters()}
    assert {op.name for op in step.sections[1].ops if op.name.endswith(".grad")} == {f"{n}.grad" for n in trained}
