"""FlashAttention 3: causal attention of (batch, tokens, heads, head size), over all tokens before or a window of them.

What it allocates is read from its sources (hopper/flash_api.cpp, mha_fwd and mha_bwd), and has not been measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.kernels import flash3_backward_bytes, flash_lse_bytes
from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.layout import dense_strides_like
from oomph.step.tensor.tape import primitive
from oomph.step.tensor.tensor import Tensor


@primitive
def flash_attention_3(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Keeps queries, keys, values, the output and a logsumexp; takes grouped queries and windows without a mask."""
    tape = q.tape
    batch, tokens, heads, size = q.shape
    flops = 4 * batch * heads * size * scores_of(tokens, window)

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        _saved = node.unpack()  # alive while this runs
        grad, (shape, key_shape, value_shape) = grads[0], node.shapes
        assert grad is not None
        spent = flash3_backward_bytes(batch, heads, tokens, size, key_shape[2])
        sizes = [("dq", q_bytes), ("dk", k_bytes), ("dv", k_bytes)]
        moved = 4 * q_bytes + 4 * k_bytes + 2 * sum(spent)
        made = node.tape.launch(
            "sdpa.backward", sizes, Kind.ATTENTION, spent=spent, kernel=Kernel.ATTENTION, moved=moved,
            flops=5 * flops // 2, shape=(batch, heads, tokens, size), dtype=dtype,
        )  # fmt: skip
        shapes = (shape, key_shape, value_shape)
        return [node.tape.tensor(each, own, dtype) for each, own in zip(made, shapes, strict=True)]

    q_bytes, k_bytes, dtype = q.bytes, k.bytes, q.dtype
    node = tape.node(backward, q, k, v)
    if node:
        node.save(q, k, v)
    results = (("out", q.bytes), ("logsumexp", flash_lse_bytes(batch, heads, tokens)))
    made = tape.launch(
        "sdpa", results, Kind.ATTENTION, kernel=Kernel.ATTENTION, moved=2 * q.bytes + k.bytes + v.bytes, flops=flops,
        shape=(batch, heads, tokens, size), dtype=dtype,
    )  # fmt: skip
    out = tape.tensor(made[0], q.shape, q.dtype, dense_strides_like(q.shape, q.strides))
    if node:
        node.save(out, made[1])
        node.attach(out)
    return out


def scores_of(tokens: int, window: int | None) -> int:
    """How many pairs of a token and one it sees there are; a window leaves so many before the token itself."""
    seen = tokens if window is None else min(tokens, window + 1)
    return seen * (seen + 1) // 2 + (tokens - seen) * seen
