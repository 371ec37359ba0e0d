"""The mixture of experts in transformers' Mixtral and Qwen3-MoE (5.22): a router, and products by group of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oomph.step.ops import Kind
from oomph.step.tensor.attention import softmax
from oomph.step.tensor.casts import to
from oomph.step.tensor.elementwise import activate, divide_into, mul, total
from oomph.step.tensor.indexing import histc, inverse, running_total, sort, take, topk
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.products import grouped_product, linear
from oomph.step.tensor.tape import Module, forward
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import reshape, split, unsqueeze

FAMILIES = ("mixtral", "qwen3_moe")


def expert_width(c: Any) -> int:
    """The width inside an expert."""
    return int(c.moe_intermediate_size or c.intermediate_size or 4 * c.n_embd)


def parameters(c: Any, name: str) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of one block's router and experts, in the order of `named_parameters()`."""
    router = (f"{name}.gate.weight", (c.num_experts, c.n_embd))
    if c.model_type == "mixtral":
        yield router
    yield f"{name}.experts.gate_up_proj", (c.num_experts, 2 * expert_width(c), c.n_embd)
    yield f"{name}.experts.down_proj", (c.num_experts, c.n_embd, expert_width(c))
    if c.model_type != "mixtral":
        yield router


@forward
def sparse_block(m: Module, hidden_states: Tensor) -> Tensor:
    """MixtralSparseMoeBlock.forward."""
    shape = hidden_states.shape
    hidden_states = reshape(hidden_states, shape[0] * shape[1], shape[2])
    logits, top_k_weights, top_k_index = router(m / "gate", hidden_states)
    hidden_states = experts(m / "experts", hidden_states, top_k_index, top_k_weights)
    hidden_states = reshape(hidden_states, *shape)
    del logits
    return hidden_states


@forward
def router(m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """MixtralTopKRouter.forward: logits, the chosen experts' weights, and the experts."""
    c = m.config
    mixtral = c.model_type == "mixtral"
    hidden_states = reshape(hidden_states, *hidden_states.shape)
    router_logits = linear(m, hidden_states)
    router_probs = softmax(to(router_logits, "float32")) if mixtral else softmax(router_logits, "float32")
    router_top_value, router_indices = topk(router_probs, c.num_experts_per_tok)
    if mixtral or c.norm_topk_prob:
        router_top_value = divide_into(router_top_value, total(router_top_value, -1, keepdim=True))
    if not mixtral:
        router_top_value = to(router_top_value, router_logits.dtype)
    return router_logits, router_top_value, router_indices


@forward
def experts(m: Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """grouped_mm_experts_forward, the default on every device: rows sorted by expert, products by group."""
    c = m.config
    tokens, width = hidden_states.shape
    chosen = top_k_index.shape[-1]
    sample_weights = reshape(top_k_weights, tokens * chosen)
    expert_ids_g, perm = sort(reshape(top_k_index, tokens * chosen))
    selected_hidden_states_g = take(hidden_states, _numbers("floor_divide", perm))
    sample_weights_g = take(sample_weights, perm)
    histc_input = _numbers("to", expert_ids_g, "float32")
    tokens_per_expert = histc(histc_input, c.num_experts)
    offsets = running_total(tokens_per_expert, "int32")
    proj_out = grouped_product(
        _like(selected_hidden_states_g, m.parameter("gate_up_proj")), m.parameter("gate_up_proj"), offsets
    )
    proj_out = _gated(proj_out, c.hidden_act)
    proj_out = grouped_product(_like(proj_out, m.parameter("down_proj")), m.parameter("down_proj"), offsets)
    weighted_out = mul(proj_out, unsqueeze(sample_weights_g, 1))
    inv_perm = inverse(perm)
    weighted_out = take(weighted_out, inv_perm)
    final_hidden_states = total(reshape(weighted_out, tokens, chosen, width), 1)
    result = to(final_hidden_states, hidden_states.dtype)
    del histc_input, tokens_per_expert
    return result


def _like(x: Tensor, weight: Tensor) -> Tensor:
    return to(x, weight.dtype)


def _gated(gate_up_out: Tensor, name: str) -> Tensor:
    """_default_apply_gate."""
    gate, up = split(gate_up_out, [gate_up_out.shape[-1] // 2] * 2)
    return mul(activate(gate, name), up)


def _numbers(name: str, like: Tensor, dtype: str = "int64") -> Tensor:
    return like.tape.made(name, like.shape, dtype, (like,), Kind.TEMPORARY)
