"""Traces of transformers' models, held against what PyTorch's profiler sees of a real step on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import Hf, changes, peak
from torch import nn

from oomph.step.ops import Kernel, Phase, Step
from oomph.step.trace.eager.program import trace
from oomph.step.trace.inductor.program import compiled

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
    "lora": Hf("llama", lora={"r": 4, "target_modules": ["q_proj", "v_proj"]}),
    "checkpointed": Hf("llama", checkpoint=True),
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


COMPILED = pytest.param(compiled, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen3", "gpt_neox", "gpt2"))]
)
def test_a_mask_is_made_compiled_and_not_eager(family: str) -> None:
    model = Hf(family, layers=1, tokens=128)
    kernels = []
    for make in (trace, compiled):
        step = planned(model, make, **({"evaluation": False} if make is compiled else {}))
        kernels += [{op.name.rpartition(".")[2] for op in step.sections[0].ops if op.kernel is Kernel.ATTENTION}]
    assert all("flash" in name for name in kernels[0])
    assert all("efficient" in name for name in kernels[1])


def flops(step: Step, phase: Phase) -> int:
    return sum(op.flops for op in step.sections[0].ops if op.phase is phase and op.kernel is Kernel.GEMM)


@pytest.mark.slow
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


def attention_bytes(step: Step, name: str) -> list[int]:
    """Bytes that the first attention kernel of that name returns."""
    found = next(op for op in step.sections[0].ops if op.name.endswith(name))
    gone = set(found.frees)
    return [buffer.bytes for buffer in found.allocates if buffer not in gone]


def test_cudas_flash_kernel_takes_grouped_queries_as_they_are() -> None:
    model = Hf("llama", kv_heads=2)
    step = planned(model, trace)
    head_bytes = 2 * model.batch * model.tokens * model.width // model.heads
    grads = attention_bytes(step, "_scaled_dot_product_flash_attention_backward")
    assert grads == [4 * head_bytes, 2 * head_bytes, 2 * head_bytes]  # of queries, keys and values
    forward = [op.name for op in step.sections[0].ops if op.phase is Phase.FORWARD]
    assert not [name for name in forward if name.endswith(("self_attn.expand", "self_attn.clone"))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["olmo2", "deepseek_v3"])
def test_attentions_result_lies_token_by_token(family: str, dtype: str) -> None:
    """The output projection reads what the kernel wrote: no copy between them."""
    step = planned(FAMILIES[family], trace, dtype=dtype)
    ops = [op for op in step.sections[0].ops if op.phase is Phase.FORWARD and ".layers.0.self_attn" in op.name]
    last = max(index for index, op in enumerate(ops) if op.kernel is Kernel.ATTENTION)
    assert not [op.name for op in ops[last:] if op.name.endswith("clone")]


@pytest.mark.parametrize("make", [trace, COMPILED])
def test_values_may_have_heads_of_their_own_size(make: Any) -> None:
    model = FAMILIES["deepseek_v3"]
    step = planned(model, make, **({"evaluation": False} if make is compiled else {}))
    name = "scaled_dot_product_efficient_attention"
    out = attention_bytes(step, name)[0]
    assert out == 2 * model.batch * model.tokens * model.heads * 16  # v_head_dim; queries have 8 + 16
    flops = next(op.flops for op in step.sections[0].ops if op.name.endswith(name))
    assert flops % (model.batch * model.heads * (24 + 16)) == 0


@pytest.mark.parametrize("make", [trace, COMPILED])
def test_a_mask_that_wants_a_gradient_gets_one(make: Any) -> None:
    step = planned(FAMILIES["t5"], make, **({"evaluation": False} if make is compiled else {}))
    added = {op.name for op in step.sections[1].ops if op.name.endswith("relative_attention_bias.weight.grad")}
    assert len(added) == 2  # the encoder's and the decoder's


@pytest.mark.parametrize("make", [trace, COMPILED])
def test_a_layer_that_might_be_dropped_is_there(make: Any) -> None:
    class Dropping(Called):
        def __init__(self, share: float) -> None:
            super().__init__(Hf("opt"))
            self.model.model.decoder.layerdrop = share  # type: ignore[union-attr]

    more = {"evaluation": False} if make is compiled else {}
    batch = tuple(Hf("opt").inputs().values())
    steps = [make(lambda share=share: Dropping(share), batch, **more) for share in (0.0, 0.9)]
    assert len({len(step.sections[0].ops) for step in steps}) == 1
