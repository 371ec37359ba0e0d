"""The loss, decomposed."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.compile.decompose.nodes import as_dtype, as_float32, attach, constant, pointwise, recorder_of, reduction
from oomph.step.compile.graph import How
from oomph.step.ops import Kind
from oomph.step.tensor import casts, views
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.layout import (
    HALVES,
    Shape,
)
from oomph.step.tensor.tensor import Tensor


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """F.cross_entropy: log_softmax, then nll_loss, whose backward is a comparison, not a scattered one-hot."""
    recorder = recorder_of(logits)
    words = logits.shape[-1]
    flat = views.reshape(logits, logits.numel // words, words)
    rows, dtype = flat.shape[0], flat.dtype
    row: Shape = (rows, 1)
    if recorder.autocast is not None and not recorder.cuda and dtype in HALVES:
        flat, dtype = casts.to(flat, "float32"), "float32"
    ids = targets.as_strided((rows,), (1,))

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        share = pointwise("div", grads[0], count)
        column = views.unsqueeze(ids, 1)
        used = pointwise("ne", column, dtype="bool")
        zero = constant(logs, "full", (), "int64")
        chosen = pointwise("where", used, column, zero, dtype="int64")
        one_hot = _one_hot(chosen, rows, words, dtype if recorder.autocast is None else "float32")
        grad = pointwise("mul", one_hot, pointwise("where", used, share, dtype=share.dtype))
        grad = as_float32(as_dtype(grad, dtype))
        total = reduction("sum", grad, row)
        return [as_dtype(pointwise("sub", grad, pointwise("mul", pointwise("exp", wide), total)), dtype)]

    node = recorder.node(backward, flat)
    raw = as_float32(flat)
    highest = reduction("amax", raw, row)
    shifted = pointwise("sub", raw, highest)
    total = pointwise("log", reduction("sum", pointwise("exp", shifted), row))
    logs = as_dtype(pointwise("sub", shifted, total), dtype)
    wide = as_float32(logs)
    used = pointwise("ne", ids, dtype="bool")
    chosen = views.unsqueeze(pointwise("where", used, ids, constant(logs, "full", (), "int64"), dtype="int64"), 1)
    found = recorder.record("gather", How.POINTWISE, (wide, chosen), row, "float32", gathers=True)
    losses = pointwise("where", used, pointwise("neg", found.as_strided((rows,), (1,))), dtype="float32")
    count = pointwise("convert", reduction("sum", used, (), "int64"), dtype="float32")
    loss = pointwise("div", reduction("sum", losses, ()), count)
    return attach(node, loss)


def _one_hot(chosen: Tensor, rows: int, words: int, dtype: str) -> Tensor:
    """Where the vocabulary index equals the target: since 2.5 torch scatters no one-hot matrix.

    Earlier versions write it in the dtype of the log-probabilities.
    """
    recorder = recorder_of(chosen)
    if recorder.writes_one_hot:
        zeros = constant(chosen, "full", (rows, words), dtype)
        return recorder.record("scatter", How.SCATTER, (zeros, chosen), (rows, words), dtype, kind=Kind.LOGITS)
    numbers = constant(chosen, "arange", (words,), "int64").as_strided((1, words), (words, 1))
    equal = pointwise("eq", views.expand(chosen, rows, words), numbers, dtype="bool")
    first, second = (constant(chosen, name, (), "float32") for name in ("scalar_0", "scalar_-1"))
    return pointwise("where", equal, second, first, dtype="float32")


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, chunk: int) -> Tensor:
    """The hidden state: the compiled model ends there, and the chunked loss runs as a separate function."""
    del weight, chunk
    return hidden
