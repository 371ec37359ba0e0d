"""LoRA as peft computes it: small trained matrices beside the frozen linear layers of the blocks.

    c_attn.weight         frozen
    c_attn.lora_A.weight  (rank, inputs), random at first
    c_attn.lora_B.weight  (outputs, rank), zeros at first, so that training begins at the base model

A checkpoint holds all of them, so it needs no other file; what is exported has them merged into one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional as F

from oomph.config import TrainConfig
from oomph.config.adapters import is_target

_A, _B = ".lora_A.weight", ".lora_B.weight"
_ALL = "all-linear"


class AdaptedLinear(nn.Linear):
    """A linear layer with its frozen weight, plus the adapters' output."""

    def __init__(self, base: nn.Linear, config: TrainConfig) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Linear(base.in_features, config.lora_rank, bias=False)
        self.lora_B = nn.Linear(config.lora_rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.scale, self.dropout = scale_of(config), config.lora_dropout

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        dtype = result.dtype
        x = x.to(self.lora_A.weight.dtype)
        result = result + self.lora_B(self.lora_A(F.dropout(x, self.dropout, self.training))) * self.scale
        out: Tensor = result.to(dtype)
        return out


def scale_of(config: TrainConfig) -> float:
    """The factor on the adapters' output."""
    return config.lora_alpha / config.lora_rank


def add_adapters(model: nn.Module, config: TrainConfig) -> None:
    """Freeze the model, and put adapters beside the blocks' linear layers that `lora_targets` names."""
    model.requires_grad_(False)
    blocks = [(name, module) for name, module in model.named_modules() if ".h." in name]
    for name, module in blocks:
        if isinstance(module, nn.Linear) and (config.lora_targets == _ALL or is_target(name, config.lora_targets)):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, AdaptedLinear(module, config))


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return name.endswith((_A, _B))


def adapters_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's adapters by name."""
    return {name: value for name, value in model.state_dict().items() if is_adapter(name)}


def merged(weights: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The weights of a model without adapters that computes the same: each base plus `scale` × B × A."""
    found = {name: tensor for name, tensor in weights.items() if not is_adapter(name)}
    for name, a in weights.items():
        if name.endswith(_A):
            layer = name.removesuffix(_A)
            base, b = found[f"{layer}.weight"], weights[f"{layer}{_B}"]
            found[f"{layer}.weight"] = (base.float() + scale * (b.float() @ a.float())).to(base.dtype)
    return found
