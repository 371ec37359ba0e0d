"""What an operator costs: its kernel, shape, precision, FLOPs and bytes moved, for the clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from oomph.step.ops import Kernel, Phase
from oomph.step.trace import flops as trace_flops

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_INDEX = ("embedding", "embedding_dense_backward", "index_select", "gather", "nll_loss_forward", "nll_loss_backward")
_REDUCTIONS = ("layer_norm", "rms_norm", "softmax", "sum", "mean", "norm", "logsumexp")

Cost = tuple[Kernel, tuple[int, ...], str, int, int]


def cost(func: Any, args: Any, result: Any, phase: Phase) -> Cost:
    """(kernel, shape, dtype, flops, bytes_moved) of one operator call."""
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    name = func._opname
    dtype = _NAMES.get(outputs[0].dtype, "float32") if outputs else "float32"
    if func.is_view or name in ("detach", "lift_fresh", "empty", "empty_like", "_unsafe_view", "alias"):
        return Kernel.NONE, (), dtype, 0, 0
    moved = sum(leaf.numel() * leaf.element_size() for leaf in (*inputs, *outputs))
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        first, second = inputs[-2:]
        batch = first.shape[0] if first.dim() == 3 else 1
        m, k = first.shape[-2:]
        n = second.shape[-1]
        return Kernel.GEMM, (batch, m, n, k), dtype, 2 * batch * m * n * k, moved
    if (product := _product(func, args, outputs)) is not None:
        return Kernel.GEMM, product, dtype, trace_flops.flops_of(product), moved
    if "scaled_dot_product" in name:
        backward = name.endswith("backward")
        query, key, value = args[1:4] if backward else args[:3]
        batch, heads, tokens, size = query.shape
        scores = trace_flops.attention_scores(tokens, key.shape[2], bool(_argument(func, args, "is_causal")))
        flops = batch * heads * trace_flops.attention(scores, size, value.shape[3], backward)
        return Kernel.ATTENTION, (batch, heads, tokens, size), dtype, flops, moved
    if phase is Phase.OPTIMIZER:
        return Kernel.OPTIMIZER, (), dtype, 0, moved
    if name in _INDEX:
        written = sum(leaf.numel() * leaf.element_size() for leaf in outputs)
        return Kernel.INDEX, (), dtype, 0, 2 * written
    kernel = Kernel.REDUCTION if any(part in name for part in _REDUCTIONS) else Kernel.POINTWISE
    return kernel, (), dtype, 0, moved


def _product(func: Any, args: Any, outputs: Sequence[torch.Tensor]) -> trace_flops.ProductShape | None:
    """The matrix product equivalent to a convolution, a recurrent layer or experts; None for other operators."""
    name = func._opname
    if name in ("convolution", "convolution_backward"):
        backward = name.endswith("backward")
        inputs, weight = args[1:3] if backward else args[:2]
        transposed, groups = _argument(func, args, "transposed"), _argument(func, args, "groups")
        wanted = sum(_argument(func, args, "output_mask")[:2]) if backward else 1
        moves_over = inputs.shape if transposed else args[0].shape if backward else outputs[0].shape
        return trace_flops.convolution(weight.shape, moves_over, groups, wanted) if wanted else None
    if name in ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"):
        steps, rows, size = args[0].shape
        return trace_flops.recurrent(steps, rows, size, args[2].shape, 2 if name.endswith("backward") else 1)
    if name == "_grouped_mm":
        return trace_flops.grouped(args[0].shape, args[1].shape)
    return None


def _argument(func: Any, args: Any, name: str) -> Any:
    """An operator's argument by name, or its default: trailing defaults are omitted from `args`."""
    position = [argument.name for argument in func._schema.arguments].index(name)
    return args[position] if position < len(args) else func._schema.arguments[position].default_value
