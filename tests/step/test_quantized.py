"""Quantized bases: what they store, and the copies that products make, held against a module that does the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from described_models import config_of, described, first_difference
from hf_models import Hf
from torch import Tensor, nn

from oomph.config import from_dict
from oomph.devices import find
from oomph.planning.plan import plan
from oomph.step.ops import Kind
from oomph.step.tensor.quantized import Quantization, stored

pytestmark = pytest.mark.filterwarnings("ignore")
BLOCK = 64


class Dequantized(torch.autograd.Function):
    """bitsandbytes' MatMul4Bit where it does not fuse: a copy of the weight for each product, none of the input.

    Before 0.43.2 it held that, in an attribute, which lives as long as the graph.
    """

    keeps_input = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: tuple[int, int], double: bool) -> Tensor:
        ctx.packed, ctx.shape, ctx.double = packed, shape, double
        ctx.held = x if Dequantized.keeps_input and ctx.needs_input_grad[0] else None
        if double:
            scales_8bit = torch.empty(-(-shape[0] * shape[1] // BLOCK), device=packed.device)
            _scales = scales_8bit + 1.0
        weight = torch.empty(shape, dtype=x.dtype, device=packed.device)
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (
            torch.matmul(grads[0], _dequantize_4bit(ctx.packed, ctx.shape, grads[0].dtype, ctx.double)),
            None,
            None,
            None,
        )


def _dequantize_4bit(packed: Tensor, shape: tuple[int, int], dtype: torch.dtype, double: bool) -> Tensor:
    if double:
        scales = torch.empty(-(-shape[0] * shape[1] // BLOCK), device=packed.device)
        scales += 1.0
    return torch.empty(shape, dtype=dtype, device=packed.device)


class Linear4bit(nn.Module):
    """A quantized linear layer as bitsandbytes and peft run it, with adapters or without."""

    def __init__(self, shape: tuple[int, int], double: bool, rank: int, dropout: float) -> None:
        super().__init__()
        self.shape, self.double, self.dropout = shape, double, dropout
        self.register_buffer("packed", torch.empty(-(-shape[0] * shape[1] // 2), dtype=torch.uint8))
        self.lora_A = nn.Linear(shape[1], rank, bias=False, dtype=torch.float32) if rank else None
        self.lora_B = nn.Linear(rank, shape[0], bias=False, dtype=torch.float32) if rank else None

    def base(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.bfloat16)
        return Dequantized.apply(x, self.packed, self.shape, self.double).to(dtype)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        if self.lora_A is None or self.lora_B is None:
            return result
        result = result.clone()
        converts = not torch.is_autocast_enabled("cpu")
        expected = result.dtype
        if converts:
            x = x.to(torch.float32)
        output = self.lora_B(self.lora_A(nn.functional.dropout(x, self.dropout))) * 2.0
        if converts:
            output = output.to(expected)
        return result + output


class Quantized(Hf):
    """A model whose linear layers are quantized, with adapters on queries and values."""

    double = True
    upcast = "off"

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        plain, self.lora = self.lora, {}
        made = super().build(dtype)
        self.lora = plain
        made.requires_grad_(False)
        for name, module in list(made.named_modules()):
            if isinstance(module, nn.Linear) and name != "lm_head":
                parent, _, last = name.rpartition(".")
                rank = self.lora["r"] if last in self.lora["target_modules"] else 0
                made_of = Linear4bit((module.out_features, module.in_features), self.double, rank, 0.1)
                setattr(made.get_submodule(parent), last, made_of)
        for name, parameter in made.named_parameters():
            if "lora" not in name and (self.upcast == "all" or (self.upcast == "norms" and "norm" in name)):
                parameter.data = parameter.data.float()
        if self.checkpoint:
            made.enable_input_require_grads()  # type: ignore[operator]
        return made.train()


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("upcast", ["off", "norms", "all"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("precision", ["loaded", "bfloat16"])
def test_a_described_quantized_base_is_the_trace(precision: str, double: bool, upcast: str, checkpoint: bool) -> None:
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}
    model = Quantized("llama", kv_heads=2, checkpoint=checkpoint, lora=lora)
    model.double, model.upcast = double, upcast
    keys = {"quantization": "nf4", "double_quantization": double, "upcast": upcast}
    ours = described(config_of(model, precision, **keys), micro_steps=2)
    assert not first_difference(ours, model.traced(precision=precision, micro_steps=2))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_an_older_bitsandbytes_holds_every_input(checkpoint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dequantized, "keeps_input", True)
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}
    model = Quantized("llama", kv_heads=2, checkpoint=checkpoint, lora=lora)
    keys = {"quantization": "nf4", "double_quantization": True, "upcast": "off", "bitsandbytes_version": "0.43.1"}
    ours = described(config_of(model, "loaded", **keys), micro_steps=2)
    assert not first_difference(ours, model.traced(precision="loaded", micro_steps=2))


class GptqLinear(nn.Module):
    """AutoGPTQ's QuantLinear (qlinear_cuda_old.py) of many tokens, and peft's adapters on it."""

    def __init__(self, linear: nn.Linear, rank: int, dropout: float) -> None:
        super().__init__()
        outputs, inputs = linear.weight.shape
        self.register_buffer("qweight", torch.zeros(inputs // 8, outputs, dtype=torch.int32))
        self.register_buffer("qzeros", torch.zeros(inputs // 128, outputs // 8, dtype=torch.int32))
        self.register_buffer("scales", torch.zeros(inputs // 128, outputs, dtype=linear.weight.dtype))
        self.register_buffer("wf", torch.zeros(1, 8, dtype=torch.int32))
        self.dropout, self.bias = dropout, linear.bias
        self.lora_A = nn.Linear(inputs, rank, bias=False, dtype=torch.float32) if rank else None
        self.lora_B = nn.Linear(rank, outputs, bias=False, dtype=torch.float32) if rank else None

    def base(self, x: Tensor) -> Tensor:
        out_shape = (*x.shape[:-1], self.scales.shape[1])  # type: ignore[index,union-attr]
        x = x.reshape(-1, x.shape[-1])
        qzeros, qweight, wf = self.qzeros, self.qweight, self.wf
        zeros: Any = torch.bitwise_right_shift(qzeros.unsqueeze(2).expand(-1, -1, 8), wf.unsqueeze(0)).to(torch.int8)  # type: ignore[operator,call-overload]
        zeros = torch.bitwise_and(zeros, 15)
        zeros = zeros.reshape(-1, 1, zeros.shape[1] * zeros.shape[2])
        scales: Any = self.scales
        scales = scales.reshape(-1, 1, scales.shape[-1])
        weight: Any = torch.bitwise_right_shift(qweight.unsqueeze(1).expand(-1, 8, -1), wf.unsqueeze(-1)).to(torch.int8)  # type: ignore[operator,call-overload]
        weight = torch.bitwise_and(weight, 15)
        weight = weight.reshape(-1, 128, weight.shape[2])
        weight = scales * (weight - zeros)
        weight = weight.reshape(weight.shape[0] * weight.shape[1], weight.shape[2])
        out = torch.matmul(x, weight)
        out = out.reshape(out_shape)
        return out + self.bias if self.bias is not None else out

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        if self.lora_A is None or self.lora_B is None:
            return result
        dtype = result.dtype
        x = x.to(torch.float32)
        result = result + self.lora_B(self.lora_A(nn.functional.dropout(x, self.dropout))) * 2.0
        return result.to(dtype)


class Gptq(Hf):
    """A model on a GPTQ base."""

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        plain, self.lora = self.lora, {}
        made = super().build(dtype)
        self.lora = plain
        made.requires_grad_(False)
        for name, module in list(made.named_modules()):
            if isinstance(module, nn.Linear) and name != "lm_head":
                parent, _, last = name.rpartition(".")
                rank = self.lora["r"] if last in self.lora["target_modules"] else 0
                setattr(made.get_submodule(parent), last, GptqLinear(module, rank, 0.1))
        if self.checkpoint:
            made.enable_input_require_grads()  # type: ignore[operator]
        return made.train()


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # without and with biases
def test_a_described_gptq_base_is_the_trace(family: str, checkpoint: bool) -> None:
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}
    model = Gptq(family, width=128, ffn=256, checkpoint=checkpoint, lora=lora)
    ours = described(config_of(model, "bfloat16", quantization="gptq"), micro_steps=2)
    assert not first_difference(ours, model.traced(precision="bfloat16", micro_steps=2))


@pytest.mark.parametrize(
    ("how", "per_weight"),
    [
        (Quantization("nf4"), 0.5 + 4 / 64),
        (Quantization("nf4", double=True), 0.5 + 1 / 64 + 4 / (64 * 256)),
        (Quantization("int8"), 1 + 4 / 4096),
        (Quantization("awq"), 0.5 + 2 / 128 + 0.5 / 128),
    ],
)
def test_a_quantized_weight_takes_its_published_bytes(how: Quantization, per_weight: float) -> None:
    count = 4096 * 4096
    assert sum(size for _, size in stored(how, (4096, 4096))) == pytest.approx(per_weight * count, rel=2e-4)


def test_qlora_of_mistral_7b_holds_what_was_measured_after_training() -> None:
    keys = {"method": "qlora", "lora_rank": 16, "lora_targets": "q_proj,k_proj,v_proj,o_proj", "upcast": "off"}
    found = plan(from_dict(MISTRAL | keys), find("A100 80GB"))
    held = sum(buffer.bytes for buffer in found.steps[-1].resident)
    assert held == pytest.approx(4_306_496_512, rel=1e-3)  # FMSACC-MISTRAL-13b of benchmarks/published.csv
    assert found.model.params - found.model.params_frozen == 13_631_488


MISTRAL = {
    "trainer": "hf", "model_type": "mistral", "n_layer": 32, "n_head": 32, "n_embd": 4096, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 32000, "tie_weights": False, "batch_size": 4, "block_size": 4096,
    "dtype": "bfloat16", "checkpoint_layers": 32, "optimizer_loop": "foreach",
}  # fmt: skip


@pytest.mark.parametrize(("optimizer", "unpaged"), [("paged_adamw", "adamw"), ("paged_adamw8bit", "adamw8bit")])
def test_paged_moments_of_large_tensors_are_not_on_the_card(optimizer: str, unpaged: str) -> None:
    shape = {"trainer": "hf", "model_type": "llama", "n_layer": 2, "n_embd": 512, "n_head": 8, "dtype": "bfloat16"}
    paged, usual = (
        sum(b.bytes for b in plan(from_dict(shape | {"optimizer": name}), "A100 80GB").steps[-1].resident
            if b.kind is Kind.OPTIMIZER)
        for name in (optimizer, unpaged)
    )  # fmt: skip
    assert paged < 0.04 * usual
