"""Mixtral's and Qwen3-MoE's blocks as in transformers 4.48 to 4.57: each expert a module, run one after the other.

    with experts_as_modules():
        Hf("mixtral").traced()

Tokens are dealt to experts in turn, whatever the router says, so that every expert gets the same number of them: what
a description takes for granted, and what fake tensors, which have no numbers, can be traced with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from peft.utils import transformers_weight_conversion
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import softmax
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe

from oomph.config import programs


class Expert(nn.Module):
    """MixtralBlockSparseTop2MLP, or Qwen3MoeMLP, which names its layers otherwise and in another order."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        mixtral = config.model_type == "mixtral"
        inner = config.intermediate_size if mixtral else config.moe_intermediate_size
        shapes = {"gate": (config.hidden_size, inner), "up": (config.hidden_size, inner)}
        shapes["down"] = (inner, config.hidden_size)
        self.names = {"gate": "w1", "down": "w2", "up": "w3"} if mixtral else {n: f"{n}_proj" for n in shapes}
        for part, name in self.names.items():
            self.add_module(name, nn.Linear(*shapes[part], bias=False))

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, up, down = (getattr(self, self.names[part]) for part in ("gate", "up", "down"))
        current_hidden_states = nn.functional.silu(gate(hidden_states)) * up(hidden_states)
        return down(current_hidden_states)  # type: ignore[no-any-return]


class SparseMoeBlock(nn.Module):
    """MixtralSparseMoeBlock, and Qwen3MoeSparseMoeBlock."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = getattr(config, "num_local_experts", None) or config.num_experts
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = getattr(config, "norm_topk_prob", True)
        self.gate = nn.Linear(config.hidden_size, self.num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(config) for _ in range(self.num_experts)])

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        router_logits = self.gate(hidden_states)
        routing_weights = softmax(router_logits, dim=1, dtype=torch.float)
        routing_weights, selected_experts = torch.topk(routing_weights, self.top_k, dim=-1)
        if self.norm_topk_prob:
            routing_weights /= routing_weights.sum(dim=-1, keepdim=True)
        routing_weights = routing_weights.to(hidden_states.dtype)
        final_hidden_states = torch.zeros_like(hidden_states, requires_grad=False)
        # what one_hot does on a card
        expert_mask = torch.zeros(*selected_experts.shape, self.num_experts, dtype=torch.long)
        expert_mask = expert_mask.scatter_(-1, selected_experts.unsqueeze(-1), 1).permute(2, 1, 0)
        for expert_idx in range(self.num_experts):
            expert_layer = self.experts[expert_idx]
            idx, top_x = self.where(expert_mask[expert_idx], expert_idx)
            current_state = hidden_states[None, top_x].reshape(-1, hidden_dim)
            current_hidden_states = expert_layer(current_state) * routing_weights[top_x, idx, None]
            final_hidden_states.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))
        final_hidden_states = final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)
        return final_hidden_states, router_logits

    def where(self, mask: Tensor, expert: int) -> tuple[Tensor, ...]:
        """torch.where(mask), in what it allocates, of tokens that are dealt to experts in turn."""
        count = mask.numel()
        first, last = (at * count // self.num_experts for at in (expert, expert + 1))
        found = torch.empty(last - first, 2, dtype=torch.long)
        if not isinstance(found, FakeTensor):
            for place, row in zip(range(first, last), found, strict=True):
                row[0], row[1] = divmod(place, mask.shape[1])
        return found.unbind(1)


def _layer(kind: Any) -> Any:
    """A class of decoder layers with the forward of that time: the router's logits are held until it returns."""

    class Layer(kind):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
            hidden_states, _weights = self.self_attn(hidden_states=hidden_states, **given)
            hidden_states = residual + hidden_states
            residual = hidden_states
            hidden_states = self.post_attention_layernorm(hidden_states)
            hidden_states, _router_logits = self.mlp(hidden_states)
            return residual + hidden_states

    return Layer


@contextmanager
def experts_as_modules() -> Iterator[None]:
    """The installed transformers' mixtures as those of 4.48 to 4.57, and the description of these for all releases."""
    mixtral, qwen = modeling_mixtral, modeling_qwen3_moe
    with (
        patch.object(mixtral, "MixtralSparseMoeBlock", SparseMoeBlock),
        patch.object(qwen, "Qwen3MoeSparseMoeBlock", SparseMoeBlock),
        patch.object(mixtral, "MixtralDecoderLayer", _layer(mixtral.MixtralDecoderLayer)),
        patch.object(qwen, "Qwen3MoeDecoderLayer", _layer(qwen.Qwen3MoeDecoderLayer)),
        # which would turn adapters of w1 into those of transformers 5's parameters
        patch.object(transformers_weight_conversion, "convert_peft_config_for_transformers"),
        patch.object(programs, "EXPERTS_GROUPED_SINCE", (99, 0)),
    ):
        yield
