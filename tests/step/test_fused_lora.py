"""fms-acceleration's fused LoRA, held against functions that keep and make the same tensors in its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from described_models import config_of, described, first_difference
from hf_models import Hf
from test_liger_kernels import Norm, Rope
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd

pytestmark = pytest.mark.filterwarnings("ignore")
BLOCK = 64


class Layer(nn.Module):
    """A linear layer in 4 bits with adapters."""

    def __init__(self, linear: nn.Linear, rank: int, dropout: float) -> None:
        super().__init__()
        self.shape = (linear.out_features, linear.in_features)
        self.register_buffer("packed", torch.empty(linear.weight.numel() // 2, dtype=torch.uint8))
        self.lora_A = nn.Parameter(torch.empty(rank, self.shape[1]))
        self.lora_B = nn.Parameter(torch.empty(self.shape[0], rank))
        self.dropout = dropout

    def dequantized(self) -> Tensor:
        """fast_dequantize without its arithmetic."""
        out = torch.empty(self.shape, dtype=torch.bfloat16)
        scales = torch.empty(-(-self.shape[0] * self.shape[1] // BLOCK))
        scales += 1.0
        return out

    def output(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """matmul_lora, and what dropout left of the input."""
        dtype, shape = x.dtype, x.shape
        weight = self.dequantized().t()
        x = x.view(-1, shape[-1])
        out = torch.matmul(x, weight)
        del weight
        x = nn.functional.dropout(x, self.dropout)
        a, b = self.lora_A.t(), self.lora_B.t()
        out += (x @ a.to(dtype)) @ (2.0 * b.to(dtype))
        return out.view(*shape[:-1], -1), x

    def gradients(self, grad: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.lora_A.t(), self.lora_B.t()
        d_a = dropped.t() @ (grad @ b.t())
        d_b = (a.t() @ dropped.t()) @ grad
        d_a *= 2.0
        d_b *= 2.0
        return d_a.t(), d_b.t()

    def into(self, dx: Tensor, grad: Tensor, dropped: Tensor) -> None:
        a, b, dtype = self.lora_A.t(), self.lora_B.t(), dx.dtype
        dx += (dropped != 0) * (grad @ b.to(dtype).t() @ (2.0 * a.to(dtype).t()))


class Qkv(torch.autograd.Function):
    """LoRA_QKV."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, layers: list[Layer], *adapters: Tensor) -> Any:
        made = [layer.output(x) for layer in layers]
        ctx.layers = layers
        ctx.save_for_backward(x, *adapters, *(dropped for _, dropped in made))
        return tuple(out for out, _ in made)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, *given: Any) -> Any:
        x, dropped, layers = ctx.saved_tensors[0], ctx.saved_tensors[-3:], ctx.layers
        shape, x = x.shape, x.view(-1, x.shape[-1])
        grads = [grad.reshape(-1, grad.shape[-1]) for grad in given]
        made = [layer.gradients(*pair) for layer, *pair in zip(layers, grads, dropped, strict=True)]
        for layer, grad, left in zip(layers, grads, dropped, strict=True):
            weight = layer.dequantized()
            if layer is layers[0]:
                torch.matmul(grad, weight, out=x)
            else:
                x += grad @ weight
            del weight
            layer.into(x, grad, left)
        return (x.view(shape), None, *(each for pair in made for each in pair))


class One(torch.autograd.Function):
    """LoRA_W."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, layer: Layer, *adapters: Tensor) -> Any:
        out, dropped = layer.output(x)
        ctx.layer = layer
        ctx.save_for_backward(x, *adapters, dropped)
        return out

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, *given: Any) -> Any:
        x, _a, _b, dropped = ctx.saved_tensors
        grad = given[0].reshape(-1, given[0].shape[-1])
        made = ctx.layer.gradients(grad, dropped)
        weight = ctx.layer.dequantized()
        dx = grad @ weight
        del weight
        ctx.layer.into(dx, grad, dropped)
        return dx.view(x.shape), None, *made


class Fused(Hf):
    """A model with these in its attention, and an MLP without adapters that is not quantized."""

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        lora, self.lora = self.lora, {}
        made = super().build(dtype)
        self.lora = lora
        made.requires_grad_(False)
        for module in list(made.modules()):
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = lambda x, norm=module: Norm.apply(x, norm.weight)
            if type(module).__name__.endswith("Attention"):
                _fuse(module, lora["r"], lora["lora_dropout"])
        return made.train()


def _fuse(attention: Any, rank: int, dropout: float) -> None:
    """_build_fused_forwards: the first of the three computes all, the others take theirs."""
    outs: dict[str, Tensor] = {}
    names = ("q_proj", "k_proj", "v_proj")
    layers = [Layer(getattr(attention, name), rank, dropout) for name in names]

    def forward(x: Tensor, name: str) -> Tensor:
        if not outs:
            adapters = [each for layer in layers for each in (layer.lora_A, layer.lora_B)]
            outs.update(zip(names, Qkv.apply(x, layers, *adapters), strict=True))
        return outs.pop(name)

    for name, layer in zip(names, layers, strict=True):
        layer.forward = lambda x, name=name: forward(x, name)  # type: ignore[method-assign]
        setattr(attention, name, layer)
    o = Layer(attention.o_proj, rank, dropout)
    o.forward = lambda x: One.apply(x, o, o.lora_A, o.lora_B)  # type: ignore[method-assign]
    attention.o_proj = o


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_fused_lora_is_the_trace(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mistral import modeling_mistral

    from oomph.step.models import lora

    monkeypatch.setattr(modeling_mistral, "apply_rotary_pos_emb", lambda q, k, cos, sin, *_: Rope.apply(q, k, cos, sin))
    monkeypatch.setattr(lora, "is_linear", lambda _, module, shape: len(shape) == 2 and "self_attn" in module)
    keys: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "lora_dropout": dropout}
    model = Fused("mistral", kv_heads=2, lora=keys)
    config = config_of(model, "loaded", quantization="nf4", double_quantization=True, fast_kernels=True)
    assert config.upcast == "off"
    ours = described(config, micro_steps=2)
    assert not first_difference(ours, model.traced(precision="loaded", micro_steps=2))


def test_one_layer_without_adapters_leaves_the_others_apart() -> None:
    keys = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    model = Hf("mistral", kv_heads=2, lora=keys)
    plain, fast = (
        described(config_of(model, "loaded", quantization="nf4", upcast="off", fast_kernels=fast))
        for fast in (False, True)
    )
    names = [{op.name for op in step.sections[0].ops if "lora" in op.name} for step in (plain, fast)]
    assert names[0] == names[1]
