"""How AOTAutograd and inductor write operations in smaller ones (torch/_decomp, torch/_inductor/decomposition.py).

Each rule stands in for the operation of the same name in `step.tensor` while a graph is recorded. Operations that are
one node there too (add, mul, views, ...) need none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oomph.step.compile.decompose import attention, experts, indexing, layers, loss, norm

RULES: dict[str, Callable[..., Any]] = {
    rule.__name__: rule
    for rule in (
        layers.product, layers.addmm, layers.matmul, layers.layer_norm, layers.mean, layers.activation,
        layers.squashed, layers.dropout, layers.split, layers.part, layers.cat, layers.embedding, layers.arange,
        norm.rms_norm, indexing.select, indexing.take, indexing.inverse, indexing.topk, indexing.sort, indexing.histc,
        indexing.running_total, experts.total, experts.divide_into, experts.grouped_product, attention._fused,
        attention.flash_attention_3, attention.softmax, attention.masked, attention.window_mask,
        attention._causal_bias, attention._biased, attention._safe_softmax, attention.checkpoint, loss.cross_entropy,
        loss.chunked_cross_entropy,
    )
}  # fmt: skip
