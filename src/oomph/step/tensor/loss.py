"""Cross-entropy: all logits at once, or the head and the loss by chunks of rows.

The chunked loss is `oomph.training.loss.chunked_loss`: one autograd function that computes the loss and its gradients
in the forward, so at most one chunk's logits exist at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.ops import Kernel, Kind, Phase
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.casts import to
from oomph.step.tensor.layout import HALVES, ITEM_BYTES
from oomph.step.tensor.tape import Tape, decomposable
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import reshape

_GROUP = 8  # a compiled loss pads the head's rows to a multiple of this, as in training.loss
_WRITTEN_CHUNKS = 3  # of equal chunks, written out: the allocator serves each like the one before


@decomposable
def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """F.cross_entropy of logits (…, vocabulary) and targets: log_softmax, then nll_loss.

    Under a GPU's autocast log_softmax keeps the logits' dtype and nll_loss is float32, so the log-probabilities are
    copied. On a CPU cross_entropy itself is on autocast's float32 list: the logits are copied.
    """
    tape = logits.tape
    flat = reshape(logits, logits.numel // logits.shape[-1], logits.shape[-1])
    if tape.autocast is not None and not tape.cuda and flat.dtype in HALVES:
        flat = to(flat, "float32")
    logs = _log_softmax(flat)
    wide = to(logs, "float32") if tape.autocast is not None and tape.cuda else logs
    node = tape.node(_nll_loss_backward, wide)
    if node:
        node.save(wide, targets)
    item = ITEM_BYTES[wide.dtype]
    made = tape.launch("nll_loss", (("", item), ("total_weight", item)), kernel=Kernel.INDEX, moved=12 * wide.shape[0])
    loss = tape.tensor(made[0], (), wide.dtype)
    if node:
        node.save(made[1])
        node.attach(loss)
    return loss


def cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """F.cross_entropy(reduction="none") of rows of logits: one loss per row."""
    tape, logs = logits.tape, _log_softmax(logits)
    node = tape.node(_nll_loss_backward, logs)
    if node:
        node.save(logs, targets)
    rows, item = logs.shape[0], ITEM_BYTES[logs.dtype]
    results = (("", rows * item), ("total_weight", item))
    made = tape.launch("nll_loss", results, kernel=Kernel.INDEX, moved=(8 + 2 * item) * rows)
    losses = tape.tensor(made[0], (rows,), logs.dtype)
    if node:
        node.save(made[1])
        node.attach(losses)
    return losses


def _log_softmax(x: Tensor) -> Tensor:
    node = x.tape.node(_log_softmax_backward, x)
    logs = x.tape.made("log_softmax", x.shape, x.dtype, (x,), kernel=Kernel.REDUCTION)
    if node:
        node.save(logs)
        node.attach(logs)
    return logs


def _log_softmax_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    (logs,) = node.unpack()
    grad = grads[0]
    assert grad is not None and isinstance(logs, Tensor)
    return [node.tape.made("log_softmax.dx", logs.shape, logs.dtype, (grad, logs), kernel=Kernel.REDUCTION)]


def _nll_loss_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    wide, *_ = node.unpack()
    assert isinstance(wide, Tensor) and grads[0] is not None
    return [node.tape.made("nll_loss.dx", wide.shape, wide.dtype)]


def chunks(rows: int, chunk: int) -> list[tuple[int, int]]:
    """(rows, repeats) of the chunks; of a long run of equal ones the first, those in between, and the last."""
    whole, rest = divmod(rows, chunk)
    if whole <= _WRITTEN_CHUNKS:
        runs = [(chunk, 1)] * whole
    else:  # the last one is separate: what the loop holds is freed after it
        runs = [(chunk, 1), (chunk, whole - _WRITTEN_CHUNKS + 1), (chunk, 1)]
    return [*runs, (rest, 1)] if rest else runs


@decomposable
def chunked_cross_entropy(hidden: Tensor, weight: Tensor, chunk: int) -> Tensor:
    """The loss of `hidden` under the head's `weight`, a chunk of rows at a time.

    1. Under autocast `hidden`, then `weight`, are cast to half; the copies live until the forward returns.
    2. The running loss is made; with gradients also `grad_hidden`, like the cast `hidden`, and `grad_weight`.
    3. For each chunk: its logits, their log_softmax in float32, the targets' entries gathered and summed.
    4. The logits' gradient overwrites the log-probabilities, and in half precision is cast.
    5. A product with `weight` writes the chunk's rows of `grad_hidden`. A product with the chunk's `hidden` is added
       into `grad_weight`: by the product itself or, if that is float32 and the product half, from a buffer.
    """
    tape = hidden.tape
    node = tape.node(_chunked_backward, hidden, weight)
    rows, width = hidden.numel // hidden.shape[-1], hidden.shape[-1]
    dtype = tape.autocast or hidden.dtype
    wanted = weight.dtype
    narrow = tape.cast(hidden, dtype, Kind.ACTIVATIONS) if hidden.dtype != dtype else hidden
    copy = _head_copy(weight, dtype) if weight.dtype != dtype else weight
    loss = tape.made("", (), "float32", moved=0)
    if node:
        node.save(tape.made("grad_hidden", narrow.shape, dtype, kernel=Kernel.NONE, moved=0))
        if node.needs(1):  # else the head is frozen
            node.save(tape.made("grad_weight", weight.shape, wanted, kind=Kind.GRADIENTS))
    for count, tape.ledger.times in chunks(rows, chunk):
        run = _compiled_chunk if tape.compiles_loss else _chunk
        run(tape, count, width, (weight.shape[0], copy.shape[0]), dtype, wanted, node)
    tape.ledger.times = 1
    del narrow, copy
    return node.attach(loss) if node else loss


def _head_copy(weight: Tensor, dtype: str) -> Tensor:
    """The head in half precision; for a compiled loss, its rows padded to whole groups."""
    tape, (words, width) = weight.tape, weight.shape
    if tape.compiles_loss and words % _GROUP:
        return tape.made("to", (words + -words % _GROUP, width), dtype, (weight,), Kind.HALF_WEIGHTS)
    return tape.cast(weight, dtype, Kind.HALF_WEIGHTS)


def _compiled_chunk(
    tape: Tape, rows: int, width: int, words: tuple[int, int], dtype: str, wanted: str, node: Node | None
) -> None:
    """Three kernels: each row's maximum and sum, the targets' log-probabilities, and the gradient over the logits."""
    vocab, padded = words
    size = rows * vocab * ITEM_BYTES[dtype]
    logits = tape.product("chunk_logits", 1, rows, padded, width, dtype)
    results = (("maximum", 4 * rows), ("total", 4 * rows))
    statistics = tape.launch("chunk_softmax", results, kernel=Kernel.REDUCTION, moved=size)
    summed = tape.made("chunk_sum", (), "float32", kernel=Kernel.REDUCTION, moved=(ITEM_BYTES[dtype] + 16) * rows)
    if node:
        tape.note("chunk_dlogits", Kernel.POINTWISE, 2 * size)
        statistics.clear()
        tape.product("chunk_grad_hidden", 1, rows, width, padded, dtype, into=True)
        if node.needs(1):
            _add_weight_grad(tape, rows, width, words, dtype, wanted)
    statistics.clear()
    del logits
    tape.note("sum", Kernel.POINTWISE, 12)
    del summed


def _add_weight_grad(tape: Tape, rows: int, width: int, words: tuple[int, int], dtype: str, wanted: str) -> None:
    """Add to the head's gradient: by the product itself or, if that is float32 and the product half, from a buffer."""
    adds = dtype == wanted
    own = tape.product("chunk_grad_weight", 1, words[1], width, rows, dtype, Kind.TEMPORARY, into=adds)
    if not adds:
        size = words[0] * width
        tape.note("chunk_grad_weight_sum", Kernel.POINTWISE, 10 * size, () if tape.cuda else (4 * size,))
    del own


def _chunk(
    tape: Tape, rows: int, width: int, words: tuple[int, int], dtype: str, wanted: str, node: Node | None
) -> None:
    half, vocab = dtype in HALVES, words[0]
    count = rows * vocab
    logits = tape.product("chunk_logits", 1, rows, vocab, width, dtype)
    if half:
        logits = tape.made("chunk_logits_float", (count,), "float32", moved=6 * count).storage
    tape.note("chunk_log_softmax", Kernel.REDUCTION, 8 * count)
    picked = tape.made("chunk_picked", (rows,), "float32", kernel=Kernel.INDEX, moved=8 * rows)
    summed = tape.made("chunk_loss", (), "float32", kernel=Kernel.REDUCTION, moved=4 * rows)
    del picked
    if node is None:
        return
    tape.note("chunk_softmax", Kernel.POINTWISE, 8 * count)
    ones = tape.made("chunk_ones", (rows,), "float32")
    tape.note("chunk_dlogits", Kernel.POINTWISE, 8 * count)
    del ones
    if half:
        logits = tape.made("chunk_dlogits_half", (count,), dtype, moved=6 * count).storage
    tape.product("chunk_grad_hidden", 1, rows, width, vocab, dtype, into=True)
    if node.needs(1):
        _add_weight_grad(tape, rows, width, words, dtype, wanted)
    del summed, logits


def _chunked_backward(node: Node, _grads: Gradients) -> Sequence[Tensor | None]:
    """Both gradients times the incoming one, the hidden state's cast to its own dtype."""
    hidden, *rest = node.unpack()
    node.saved = []
    tape = node.tape
    assert isinstance(hidden, Tensor)
    scale = tape.made("scale", (), "float32", moved=0)
    tape.note("grad_hidden", Kernel.POINTWISE, 2 * hidden.bytes)
    weight = next((each for each in rest if isinstance(each, Tensor)), None)
    if weight is not None:
        tape.note("grad_weight", Kernel.POINTWISE, 2 * weight.bytes)
    del rest
    if hidden.dtype != node.dtypes[0]:
        hidden = tape.cast(hidden, node.dtypes[0], Kind.TEMPORARY)
    del scale
    return [hidden, weight]


def enter_loss(tape: Tape) -> None:
    """Attribute the following operations to the loss."""
    if tape.training:
        tape.ledger.phase = Phase.LOSS
    tape.kind = Kind.LOGITS
