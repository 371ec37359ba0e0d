"""Attention, decomposed, and checkpointed regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from oomph.step import kernels
from oomph.step.compile.decompose.nodes import (
    ResultLayout,
    as_dtype,
    as_float32,
    attach,
    called,
    constant,
    pointwise,
    recorder_of,
    reduction,
)
from oomph.step.compile.graph import GraphRecorder, How
from oomph.step.ops import Kind
from oomph.step.tensor import elementwise, views
from oomph.step.tensor.attention import _Sizes, _token_major, _unit, scores_of
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.layout import (
    Shape,
    dense_strides_like,
)
from oomph.step.tensor.tensor import Tensor


def _fused(q: Tensor, k: Tensor, v: Tensor, kernel: str, rate: float, mask: Tensor | None = None) -> Tensor:
    """A fused kernel's output; it also returns a logsumexp and two numbers of random state."""
    del rate
    recorder, s = recorder_of(q), _Sizes(q)
    cuda, flash = recorder.cuda, kernel == "flash"
    masks = (views.expand(mask, *q.shape[:3], k.shape[2]),) if mask is not None else ()
    facts: dict[str, Any] = {"kind": Kind.ATTENTION, "shape": s.shape, "dtype": _unit(recorder, s)}

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        shape = (s.batch, s.heads, s.tokens, s.head_size)
        if not cuda:
            temporaries: tuple[int, ...] = kernels.cpu_flash_backward_bytes(recorder.threads, s.tokens, s.half)
        elif flash:
            temporaries = kernels.flash_backward_bytes(*shape, k.shape[1])
        else:
            temporaries = kernels.efficient_backward_bytes(*shape, s.half, v.shape[3])
        by_query = cuda and flash
        like = [dense_strides_like(t.shape, t.strides) if by_query else _token_major(t.shape) for t in (q, k, v)]
        results = [(t.shape, t.dtype, strides) for t, strides in zip((q, k, v), like, strict=True)]
        reads = (grad, q, k, v, *masks, *outs)
        return called("attention_backward", reads, results, flops=5 * s.flops // 2, temporaries=temporaries, **facts)

    node = recorder.node(backward, q, k, v)
    temporaries = () if cuda else (kernels.cpu_flash_bytes(recorder.threads, s.tokens, s.head_size, s.half),)
    rows = s.tokens if flash or not cuda else kernels.efficient_rows(s.tokens)
    strides = _token_major(q.shape) if cuda and not flash else dense_strides_like(q.shape, q.strides)
    state: list[Shape] = [] if not cuda else [(2,), ()] if flash else [(), ()]
    sums: ResultLayout = ((s.batch, s.heads, rows), "float32", None)
    results: list[ResultLayout] = [(q.shape, q.dtype, strides), sums, *((each, "int64", None) for each in state)]
    work = {"flops": s.flops, "temporaries": temporaries, **facts}
    outs = recorder.kept(lambda: called("attention", (q, k, v, *masks), results, **work))
    return attach(node, outs[0].detach())


def flash_attention_3(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """FlashAttention 3's output; it also returns a logsumexp."""
    batch, tokens, heads, size = q.shape
    flops = 4 * batch * heads * size * scores_of(tokens, window)
    facts: dict[str, Any] = {"kind": Kind.ATTENTION, "shape": (batch, heads, tokens, size), "dtype": q.dtype}

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        temporaries = kernels.flash3_backward_bytes(batch, heads, tokens, size, k.shape[2])
        results = [(each.shape, each.dtype, None) for each in (q, k, v)]
        reads = (grads[0], q, k, v, out, sums)
        return called("attention_backward", reads, results, flops=5 * flops // 2, temporaries=temporaries, **facts)

    node = q.tape.node(backward, q, k, v)
    found: list[ResultLayout] = [(q.shape, q.dtype, None), ((batch, heads, tokens), "float32", None)]
    out, sums = called("attention", (q, k, v), found, flops=flops, **facts)
    return attach(node, out.detach())


def _softmax_slope(grad: Tensor, out: Tensor) -> Tensor:
    grad = pointwise("mul", grad, out)
    total = reduction("sum", grad, (*grad.shape[:-1], 1))
    return pointwise("fma", pointwise("neg", out), total, grad)


def softmax(scores: Tensor, dtype: str | None = None) -> Tensor:
    """Softmax over the last dimension, in float32: maximum, exponentials, their sum."""
    recorder = recorder_of(scores)
    wanted = dtype or ("float32" if recorder.autocast is not None else scores.dtype)

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        return [as_dtype(_softmax_slope(as_float32(grads[0]), as_float32(out)), node.dtypes[0])]

    node = recorder.node(backward, scores)
    wide = as_float32(scores)
    row = (*scores.shape[:-1], 1)
    powers = pointwise("exp", pointwise("sub", wide, reduction("amax", wide, row)))
    out = as_dtype(pointwise("div", powers, reduction("sum", powers, row)), wanted)
    return attach(node, out)


def masked(scores: Tensor, mask: Tensor) -> Tensor:
    """scores.masked_fill(mask, -inf)."""

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        return [pointwise("where", mask, constant(mask, "full_0", (), node.dtypes[0]), grads[0], dtype=grads[0].dtype)]

    node = scores.tape.node(backward, scores)
    least = constant(scores, "full_-inf", (), scores.dtype)
    return attach(node, pointwise("where", mask, least, scores, dtype=scores.dtype))


def window_mask(tape: GraphRecorder, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """A boolean mask of the earlier tokens inside the window; and its row and column indices."""
    numbers = tape.record("arange", How.CONSTANT, (), (tokens,), "int64", kind=Kind.INPUTS)
    rows, columns = pointwise("add_0", views.unsqueeze(numbers, 1)), views.unsqueeze(numbers, 0)
    before = pointwise("le", columns, rows, dtype="bool")
    near = pointwise("le_window", pointwise("sub", rows, columns), dtype="bool")
    return pointwise("and", before, near), rows, columns


def _causal_bias(tape: GraphRecorder, rows: int, columns: int) -> Tensor:
    """A causal bias: 0 or -inf for each query and key.

    The rows are unsqueezed at -1, the columns at -2, and Python's hash of both is the same: AOTAutograd's search for
    equal operations by hash (fx_graph_cse) never finds the rows again, nor anything computed from them.
    """
    place = tape.record("arange", How.CONSTANT, (), (columns,), "int64", kind=Kind.INPUTS)
    other = tape.record("arange", How.CONSTANT, (), (rows,), "int64", kind=Kind.INPUTS)
    anew = len(tape.values)
    turned = tape.record("unsqueeze", How.VIEW, (other,), (rows, 1), "int64", (1, 1), key=anew)
    flags = pointwise("le", pointwise("sub", views.unsqueeze(place, 0), turned), dtype="bool")
    flags = pointwise("and", flags, constant(flags, "full", (rows, columns), "bool"))
    zero, least = (constant(flags, name, (), "float32") for name in ("full_0", "full_-inf"))
    return pointwise("where", flags, zero, least, dtype="float32")


def _biased(scores: Tensor, bias: Tensor) -> Tensor:
    """scores + bias."""
    return elementwise.add(scores, bias)


def _safe_softmax(scores: Tensor) -> Tensor:
    """Softmax that is zero in rows without any score."""

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        return [_softmax_slope(grads[0], out)]

    node = scores.tape.node(backward, scores)
    row = (*scores.shape[:-1], 1)
    powers = pointwise("exp", pointwise("sub", scores, reduction("amax", scores, row)))
    whole = pointwise("div", powers, reduction("sum", powers, row))
    found = pointwise("not", pointwise("eq", scores, dtype="bool"))
    empty = pointwise("not", reduction("any", found, row))
    zeros = constant(scores, "full", scores.shape, scores.dtype)
    out = pointwise("where", empty, zeros, whole, dtype=scores.dtype)
    return attach(node, out)


def checkpoint(
    tape: GraphRecorder, function: Callable[..., Tensor], *args: Tensor, random: bool = False, by_op: bool = False
) -> Tensor:
    """The block's result, its operations marked for backward to recompute."""
    del random
    tape.regions += 1
    outer = tape.region, tape.by_op
    tape.region, tape.by_op, tape.products = tape.regions, by_op, 0
    try:
        return function(*args)
    finally:
        tape.region, tape.by_op = outer
