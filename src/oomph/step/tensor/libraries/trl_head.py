"""TRL's fused head (trl 1.16, trainer/utils.py, kernels/chunked_logprob.py): log-probabilities of the targets by tiles.

A tile has 4,096 tokens × 32,768 words; the full logits never exist. Backward recomputes each tile as its gradient.

On a GPU one Triton kernel processes a tile in place, and only tokens with a label are computed; elsewhere torch's
operations do it, pass by pass, for all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.casts import to
from oomph.step.tensor.elementwise import neg, pointwise, scale
from oomph.step.tensor.indexing import take
from oomph.step.tensor.layout import ITEM_BYTES
from oomph.step.tensor.loss import chunks
from oomph.step.tensor.tape import Tape
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import part, reshape

TILE_TOKENS, TILE_WORDS = 4096, 32768
_STATISTICS = 7  # float32 numbers that a token's passes over the vocabulary carry: maximum, sums, the target's logit


def head_loss(hidden_states: Tensor, labels: Tensor, weight: Tensor, softcap: bool) -> Tensor:
    """The mean of the negative log-probabilities, as SFTTrainer computes it from the model's outputs."""
    tape, (batch, tokens, width) = hidden_states.tape, hidden_states.shape
    hidden = part(hidden_states, 0, tokens - 1, dim=1)
    rows = batch * (tokens - 1)
    mask = tape.made("mask", (batch, tokens - 1), "bool", (labels,), Kind.INPUTS)
    if tape.cuda:
        places = tape.made("nonzero", (rows, 2), "int64", (mask,), Kind.INPUTS)
        hidden = take(hidden, places.as_strided((rows,), (2,)), dims=2)
        targets = tape.made("targets", (rows,), "int64", (labels,), Kind.INPUTS)
        del places
    else:
        hidden = reshape(hidden, rows, width)
        clamped = tape.made("clamp", (batch, tokens - 1), "int64", (labels,), Kind.INPUTS)
        targets = reshape(clamped, rows)
        del clamped
    log_probs, *_metrics = _scattered(_log_probs(hidden, weight, targets, softcap), mask)
    del hidden, targets
    return scale(_total(neg(log_probs)), "div")


def _total(x: Tensor) -> Tensor:
    """x.sum()."""

    def backward(node: Node, _grads: Gradients) -> Sequence[Tensor | None]:
        return [node.tape.tensor(None, node.shapes[0], "float32", (0,) * len(node.shapes[0]))]  # an expanded scalar

    node = x.tape.node(backward, x)
    out = x.tape.made("sum", (), x.dtype, (x,), kernel=Kernel.REDUCTION)
    return node.attach(out) if node else out


def _scattered(found: Sequence[Tensor], mask: Tensor) -> list[Tensor]:
    """Log-probabilities, entropies and hits in the batch's shape, zero where there is no label."""
    tape, made = mask.tape, []
    for each in found:
        node = tape.node(_gathered, each)
        if tape.cuda:
            zeros = tape.made("zeros", mask.shape, each.dtype)
            places = (8 * mask.numel,)
            out = tape.made("masked_scatter", mask.shape, each.dtype, (zeros, mask, each), temporaries=places)
            kept = mask
            del zeros
        else:
            kept = pointwise("not", mask)
            out = tape.made("masked_fill", mask.shape, each.dtype, (each, mask))
        if node:
            node.save(kept)
            node.attach(out)
        made.append(out)
        del kept
    return made


def _gathered(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    _mask = node.unpack()
    grad = grads[0]
    assert grad is not None
    return [node.tape.made("masked_select", node.shapes[0], grad.dtype, (grad,))]


def _log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: bool) -> list[Tensor]:
    """ChunkedLogProbFunction: log-probabilities, entropies, and whether a target has the highest."""
    tape, (rows, _) = hidden.tape, hidden.shape
    dtype = tape.autocast or hidden.dtype

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        return _backward(node, grads, weight, dtype, softcap)

    def vector(name: str, dtype: str = "float32") -> Tensor:
        return tape.made(name, (rows,), dtype)

    node = tape.node(backward, hidden, weight)
    statistics = [vector("statistics") for _ in range(_STATISTICS)]
    tile = tape.made("tile", (min(rows, TILE_TOKENS), TILE_WORDS), dtype, moved=0)
    for count, words, _chunk in _tiles(tape, hidden, weight, dtype):
        head = _rounded(tape, (words, weight.shape[1]), weight.dtype, dtype)
        tape.product("tile", 1, count, words, weight.shape[1], dtype, into=True)
        del head
        _fold(tape, count, words, dtype, softcap)
    log = vector("log")
    log_z = vector("log_z")
    del log
    log_probs = vector("log_probs")
    quotient = vector("div")
    entropy = vector("entropy")
    del quotient
    above, first = vector("is_top1", "bool"), vector("is_top1", "bool")
    is_top1 = vector("is_top1", "bool")
    del above, first
    if node:
        node.save(hidden, targets, log_z, entropy)
        node.attach(log_probs)
    del statistics, tile
    return [log_probs, entropy, is_top1]


def _tiles(tape: Tape, hidden: Tensor, weight: Tensor, dtype: str) -> Iterator[tuple[int, int, Tensor | None]]:
    """(tokens, words) of each tile, and its tokens if they are cast: once for all of its words."""
    for count, times in chunks(hidden.shape[0], TILE_TOKENS):
        tape.ledger.times = times
        chunk = _rounded(tape, (count, hidden.shape[1]), hidden.dtype, dtype)
        for words, more in chunks(weight.shape[0], TILE_WORDS):
            tape.ledger.times = times * more
            yield count, words, chunk
    tape.ledger.times = 1


def _rounded(tape: Tape, shape: tuple[int, int], dtype: str, half: str) -> Tensor | None:
    """A part of a tensor in the products' dtype; None if it already has that."""
    return tape.made("to", shape, half, kind=Kind.HALF_WEIGHTS) if dtype != half else None


def _fold(tape: Tape, rows: int, words: int, dtype: str, softcap: bool) -> None:
    """Accumulate a tile's part of every sum: one kernel, or torch's operations (_forward_tile)."""
    if tape.cuda:
        tape.note("fold", Kernel.REDUCTION, moved=rows * words * ITEM_BYTES[dtype])
        return
    shape = (rows, words)
    z = _transformed(tape, shape, dtype, softcap)
    order = tape.made("arange", (words,), "int64")
    before = tape.made("before_target", shape, "bool")
    del order
    others = pointwise("not", before)
    filled = tape.made("masked_fill", shape, "float32", (z,))
    del others, filled
    shifted = pointwise("sub", z)
    exponents = pointwise("exp", shifted)
    del shifted
    weighted = pointwise("mul", exponents, z)
    del weighted, exponents, before


def _transformed(tape: Tape, shape: tuple[int, int], dtype: str, softcap: bool) -> Tensor:
    """The tile in float32, scaled, capped and divided by the temperature, one pass each."""
    z = tape.made("float", shape, "float32") if dtype != "float32" else None
    y = tape.made("mul", shape, "float32")
    del z
    if softcap:
        divided = pointwise("div", y)
        activation_from_result = pointwise("tanh", divided)
        del divided
        y = pointwise("mul", activation_from_result)
        del activation_from_result
    return pointwise("mul", y)


def _slope(tape: Tape, rows: int, words: int, dtype: str, softcap: bool) -> None:
    """Turn a tile of logits into their gradient: one kernel, or torch's operations (_backward_tile)."""
    if tape.cuda:
        tape.note("slope", Kernel.POINTWISE, moved=2 * rows * words * ITEM_BYTES[dtype])
        return
    shape = (rows, words)
    whole = tape.made("float", shape, "float32") if dtype != "float32" else None
    y = tape.made("mul", shape, "float32")
    del whole
    kept = [y]
    if softcap:
        divided = pointwise("div", y)
        kept.append(pointwise("tanh", divided))
        del divided
        capped = pointwise("mul", y)
        kept.append(pointwise("mul", capped))
        del capped
    else:
        kept.append(pointwise("mul", y))
    kept.append(pointwise("log_p", y))
    kept.append(pointwise("p", y))
    grad = pointwise("zeros", y)
    order = tape.made("arange", (words,), "int64")
    kept.append(tape.made("is_target", shape, "bool"))
    del order
    hot = pointwise("float", y)
    difference = pointwise("sub", hot, y)
    del hot
    product = pointwise("mul", difference)
    del difference, product
    grad = pointwise("mul", grad)
    if softcap:
        squared, rest = pointwise("mul", y), pointwise("sub", y)
        del squared
        grad = pointwise("mul", grad)
        del rest
    _last = pointwise("mul", grad)


def _backward(node: Node, grads: Gradients, weight: Tensor, dtype: str, softcap: bool) -> Sequence[Tensor | None]:
    hidden, *_kept = node.unpack()
    assert isinstance(hidden, Tensor) and grads[0] is not None
    tape, (rows, width) = node.tape, hidden.shape
    grad_hidden = tape.made("grad_hidden", hidden.shape, "float32") if node.needs(0) else None
    kind = tape.grad_kind(node, 1)
    grad_weight = tape.made("grad_weight", weight.shape, "float32", kind=kind) if node.needs(1) else None
    tile = tape.made("tile", (min(rows, TILE_TOKENS), TILE_WORDS), dtype, moved=0)
    head: Tensor | None = None
    for count, words, _chunk in _tiles(tape, hidden, weight, dtype):
        head = _rounded(tape, (words, width), weight.dtype, dtype)
        tape.product("tile", 1, count, words, width, dtype, into=True)
        _slope(tape, count, words, dtype, softcap)
        for wanted, shape in ((grad_hidden, (count, width, words)), (grad_weight, (words, width, count))):
            if wanted is not None:
                _added_product(tape, *shape, dtype)
    made = ((grad_hidden, node.dtypes[0]), (grad_weight, node.dtypes[1]))
    found = [None if grad is None else to(grad, wanted) for grad, wanted in made]
    del tile, head
    return found


def _added_product(tape: Tape, rows: int, columns: int, inner: int, dtype: str) -> None:
    """acc += a @ b in float32: since torch 2.8 a GPU accumulates half products directly; else both are copied first."""
    if tape.cuda or dtype == "float32":
        tape.product("addmm", 1, rows, columns, inner, dtype, into=True)
        return
    _left = tape.made("float", (rows, inner), "float32")
    _right = tape.made("float", (inner, columns), "float32")
    tape.product("addmm", 1, rows, columns, inner, "float32", into=True)
