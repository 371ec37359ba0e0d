"""How AOTAutograd and inductor decompose operations (torch/_decomp, torch/_inductor/decomposition.py).

Each rule replaces the operation of the same name in `step.tensor` while a graph is recorded. Operations that are
a single node there too (add, mul, views, ...) need no rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oomph.step.compile.decompose import attention, elementwise, indexing, loss, norms, products, views

RULES: dict[str, Callable[..., Any]] = {
    rule.__name__: rule
    for rule in (
        elementwise.mean, elementwise.activation, elementwise.activation_from_result, elementwise.dropout,
        elementwise.total, elementwise.divide_into, views.split, views.part, views.cat, views.select,
        products.product, products.addmm,
        products.matmul, products.grouped_product, norms.layer_norm, norms.rms_norm, indexing.embedding,
        indexing.arange, indexing.take, indexing.inverse, indexing.topk, indexing.sort, indexing.histc,
        indexing.running_total, attention._fused, attention.flash_attention_3, attention.softmax, attention.masked,
        attention.window_mask, attention._causal_bias, attention._biased, attention._safe_softmax, attention.checkpoint,
        loss.cross_entropy, loss.chunked_cross_entropy,
    )
}  # fmt: skip
