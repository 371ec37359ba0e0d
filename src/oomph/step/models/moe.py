"""The mixture of experts in transformers' Mixtral and Qwen3-MoE (5.22): a router, and grouped products.

Before transformers 5 each expert was a module with its own linear layers, run one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oomph.config.programs import experts_are_modules
from oomph.step.models.lora import linear
from oomph.step.ops import Kind
from oomph.step.tensor.attention import softmax
from oomph.step.tensor.casts import to
from oomph.step.tensor.elementwise import activate, divide_into, mul, total
from oomph.step.tensor.indexing import add_rows, histc, inverse, one_hot, places, running_total, sort, take, topk
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.products import grouped_product
from oomph.step.tensor.tape import Module, forward
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import reshape, split, unsqueeze

FAMILIES = ("mixtral", "qwen3_moe")
_LAYERS = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}  # an expert's layers


def _are_modules(c: Any) -> bool:
    return experts_are_modules(c.model_type, c.transformers_version)


def home(c: Any) -> str:
    """The name of a block's mixture."""
    return "block_sparse_moe" if c.model_type == "mixtral" and _are_modules(c) else "mlp"


def expert_width(c: Any) -> int:
    """An expert's inner width."""
    return int(c.moe_intermediate_size or c.intermediate_size or 4 * c.n_embd)


def parameters(c: Any, name: str) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of one block's router and experts, in the order of `named_parameters()`."""
    router = (f"{name}.gate.weight", (c.num_experts, c.n_embd))
    if _are_modules(c):
        yield router
        for index in range(c.num_experts):
            yield from _expert_parameters(c, f"{name}.experts.{index}")
        return
    if c.model_type == "mixtral":
        yield router
    yield f"{name}.experts.gate_up_proj", (c.num_experts, 2 * expert_width(c), c.n_embd)
    yield f"{name}.experts.down_proj", (c.num_experts, c.n_embd, expert_width(c))
    if c.model_type != "mixtral":
        yield router


def _expert_parameters(c: Any, name: str) -> Iterator[tuple[str, Shape]]:
    gate, up, down = _LAYERS[c.model_type]
    inner, width = expert_width(c), c.n_embd
    shapes = {gate: (inner, width), up: (inner, width), down: (width, inner)}
    for layer in (gate, down, up) if c.model_type == "mixtral" else (gate, up, down):
        yield f"{name}.{layer}.weight", shapes[layer]


@forward
def sparse_block(m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
    """MixtralSparseMoeBlock.forward; before transformers 5 it returned the router's logits too."""
    if _are_modules(m.config):
        return _one_by_one(m, hidden_states)
    shape = hidden_states.shape
    hidden_states = reshape(hidden_states, shape[0] * shape[1], shape[2])
    logits, top_k_weights, top_k_index = router(m / "gate", hidden_states)
    hidden_states = experts(m / "experts", hidden_states, top_k_index, top_k_weights)
    hidden_states = reshape(hidden_states, *shape)
    del logits
    return hidden_states, None


def _one_by_one(m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """The same before transformers 5. How many tokens an expert gets depends on the data: here all get equally many."""
    c, tape, shape = m.config, m.tape, hidden_states.shape
    hidden_states = reshape(hidden_states, shape[0] * shape[1], shape[2])
    router_logits = linear(m / "gate", hidden_states)
    routing_weights = softmax(router_logits, "float32")
    routing_weights, selected_experts = topk(routing_weights, c.num_experts_per_tok)
    if c.model_type == "mixtral" or c.norm_topk_prob:
        routing_weights = divide_into(routing_weights, total(routing_weights, -1, keepdim=True))
    routing_weights = to(routing_weights, hidden_states.dtype)
    final_hidden_states = tape.made("zeros", hidden_states.shape, hidden_states.dtype)
    expert_mask = one_hot(selected_experts, c.num_experts)
    for index, count in enumerate(shares(selected_experts.numel, c.num_experts)):
        idx, top_x = places(expert_mask.as_strided(selected_experts.shape[::-1], (1, 1)), count)
        current_state = take(unsqueeze(hidden_states, 0), top_x, dims=2)
        current_hidden_states = mul(
            expert(m / "experts" / index, current_state), take(unsqueeze(routing_weights, 2), top_x, dims=2)
        )
        final_hidden_states = add_rows(final_hidden_states, top_x, to(current_hidden_states, hidden_states.dtype))
    final_hidden_states = reshape(final_hidden_states, *shape)
    del idx, top_x, current_state, current_hidden_states, expert_mask
    return final_hidden_states, router_logits


def shares(count: int, among: int) -> list[int]:
    """`count` things divided among `among` parts, as equally as possible."""
    return [(index + 1) * count // among - index * count // among for index in range(among)]


@forward
def expert(m: Module, hidden_states: Tensor) -> Tensor:
    """MixtralBlockSparseTop2MLP.forward."""
    gate, up, down = _LAYERS[m.config.model_type]
    current_hidden_states = activate(linear(m / gate, hidden_states), m.config.hidden_act)
    current_hidden_states = mul(current_hidden_states, linear(m / up, hidden_states))
    return linear(m / down, current_hidden_states)


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
