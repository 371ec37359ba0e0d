"""What DTensor runs between the ranks that split each layer (torch/distributed/tensor, read in torch 2.13).

Between attention and MLP a rank has its part of each sequence (sequence parallelism). `gather` brings all of it before
a layer whose outputs are split; `reduce_scatter` sums what layers whose inputs are split have made, and keeps a part.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.layout import ITEM_BYTES, Shape, numel
from oomph.step.tensor.tape import Module, Tape, forward
from oomph.step.tensor.tensor import Storage, Tensor
from oomph.step.tensor.views import reshape

_INDEX_BYTES = 29  # a token's, of what says where the loss's gradient is -1: targets, their mask, positions, values


def gather(x: Tensor, ranks: int) -> Tensor:
    """Shard(1) to Replicate; backward sums the ranks' gradients and keeps a part."""
    if ranks == 1:
        return x

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        return [_reduce_scattered(grads[0], ranks)]

    node = x.tape.node(backward, x)
    out = _gathered(x, ranks)
    return node.attach(out) if node else out


def reduce_scatter(x: Tensor, ranks: int) -> Tensor:
    """Partial to Shard(1); backward gathers the ranks' gradients."""
    if ranks == 1:
        return x

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        return [_gathered(grads[0], ranks)]

    node = x.tape.node(backward, x)
    out = _reduce_scattered(x, ranks)
    return node.attach(out) if node else out


def _gathered(x: Tensor, ranks: int) -> Tensor:
    """all_gather_single on dimension 1: gathered along the first one, then put side by side unless that is a view."""
    tape, (batch, tokens, *rest) = x.tape, x.shape
    shape = (batch, ranks * tokens, *rest)
    flat = _collective(tape, "all_gather", Kernel.ALL_GATHER, shape, x.dtype, ranks * x.bytes, ranks)
    if batch == 1:
        return tape.tensor(flat, shape, x.dtype)
    return tape.made("all_gather.cat", shape, x.dtype, moved=2 * ranks * x.bytes)


def _reduce_scattered(x: Tensor, ranks: int) -> Tensor:
    """reduce_scatter_single on dimension 1: parts are first brought behind each other. By operation it is kept."""
    tape, (batch, tokens, *rest) = x.tape, x.shape
    _parts = tape.made("reduce_scatter.cat", x.shape, x.dtype, (x,))
    shape = (batch, tokens // ranks, *rest)
    kernel, size = Kernel.REDUCE_SCATTER, x.bytes
    storage = tape.kept(lambda: _collective(tape, "reduce_scatter", kernel, shape, x.dtype, size, ranks))
    return tape.tensor(storage, shape, x.dtype)


def _collective(tape: Tape, name: str, kernel: Kernel, shape: Shape, dtype: str, whole: int, ranks: int) -> Storage:
    (made,) = tape.launch(name, (("", numel(shape) * ITEM_BYTES[dtype]),), kernel=kernel, shape=(ranks, whole))
    tape.note(name, Kernel.WAIT)
    return made


@forward
def embedding(module: Module, ids: Tensor, ranks: int) -> Tensor:
    """A table of which a rank has some rows: it looks up all tokens, and those of others are 0.

    Keeps the masked ids. Its gradient is the whole table: DTensor's is Partial, and reduced by whoever reads it.
    """
    weight, tape = module.parameter("weight"), ids.tape
    mask = tape.made("mask", ids.shape, "int8", (ids,))
    masked = tape.made("masked", ids.shape, "int64", (ids,))

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        _saved, grad = node.unpack(), grads[0]
        assert grad is not None
        table = ranks * numel(node.shapes[0]) * ITEM_BYTES[grad.dtype]
        kind, moved = tape.grad_kind(node, 0), table + 2 * grad.bytes
        (made,) = tape.launch("weight.grad", (("", table),), kind, kernel=Kernel.INDEX, moved=moved)
        return [tape.tensor(made, node.shapes[0], grad.dtype)]

    node = tape.node(backward, weight)
    if node:
        node.save(masked)
    shape = (*ids.shape, weight.shape[1])
    size = numel(shape) * ITEM_BYTES[weight.dtype]
    out = tape.made("", shape, weight.dtype, kernel=Kernel.INDEX, moved=2 * size)
    tape.note("apply_mask", moved=size)
    del mask
    return reduce_scatter(node.attach(out) if node else out, ranks)


def cross_entropy(logits: Tensor, targets: Tensor, ranks: int) -> Tensor:
    """F.cross_entropy under `loss_parallel`, of float32 logits that a rank has some columns of.

    log_softmax is composed of its parts. The backward of nll_loss is that of log_softmax too.
    """
    tape = logits.tape
    flat = reshape(logits, logits.numel // logits.shape[-1], logits.shape[-1])
    logs = _log_softmax(flat, ranks)
    rows = logs.shape[0]

    def backward(node: Node, _grads: Gradients) -> Sequence[Tensor | None]:
        (saved, *_rest) = node.unpack()
        assert isinstance(saved, Tensor)
        made = tape.made("nll_loss.zeros", saved.shape, saved.dtype)
        _places = tape.allocate("nll_loss.places", _INDEX_BYTES * rows, Kind.LOGITS)
        powers = tape.made("nll_loss.exp", saved.shape, saved.dtype, (saved,))
        both = tape.made("nll_loss.add", saved.shape, saved.dtype, (made, powers))
        del powers
        return [tape.made("nll_loss.dx", saved.shape, saved.dtype, (both,))]

    node = tape.node(backward, logs)
    if node:
        node.save(logs, targets)
    item = ITEM_BYTES[logs.dtype]
    _picked = _collective(tape, "nll_loss.picked", Kernel.ALL_REDUCE, (rows,), logs.dtype, rows * item, ranks)
    made = tape.launch("nll_loss", (("", item), ("total_weight", item)), kernel=Kernel.INDEX, moved=12 * rows)
    loss = tape.tensor(made[0], (), logs.dtype)
    if node:
        node.save(made[1])
        node.attach(loss)
    return loss


def _log_softmax(x: Tensor, ranks: int) -> Tensor:
    tape, rows = x.tape, x.shape[0]
    node = tape.node(_pass_on, x)
    item = ITEM_BYTES[x.dtype]
    shape, size = (rows, 1), rows * item
    _largest = _collective(tape, "log_softmax.max", Kernel.ALL_REDUCE, shape, x.dtype, size, ranks)
    shifted = tape.made("log_softmax.shifted", x.shape, x.dtype, (x,))
    powers = tape.made("log_softmax.exp", x.shape, x.dtype, (shifted,))
    del powers
    _total = _collective(tape, "log_softmax.sum", Kernel.ALL_REDUCE, shape, x.dtype, size, ranks)
    logs = tape.made("log_softmax", x.shape, x.dtype, (shifted,))
    if node:
        node.save(logs)
        node.attach(logs)
    return logs


def _pass_on(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    _saved = node.unpack()
    return [grads[0]]
