"""The head and the loss of an eager step: all logits at once as nanoGPT has them, or a chunk of rows at a time.

The chunked loss is `oomph.training.loss.chunked_loss`: one autograd function that computes the loss and its gradients
in the forward, so that no more than a chunk's logits ever exist. For `hidden` (rows, width) and the head's `weight`,
where nothing is compiled (`compiled_gpt_chunks` says what else differs where it is):

1. Under autocast `hidden`, then `weight`, are cast to half; the copies live until the forward returns.
2. The running loss is made (float32, zero); with gradients also `grad_hidden`, empty and like the cast `hidden`, and
   `grad_weight`, zeros like `weight`.
3. For each chunk of rows: its logits; half ones are cast to float32 and let go; the logarithms of their softmax in
   their place; those of the targets gathered and summed. Without gradients the chunk ends here.
4. The logarithms become the gradient of the logits in place, with a column of minus ones scattered onto the targets.
   In half precision they are cast and the float32 ones let go.
5. A product with `weight` writes the chunk's rows of `grad_hidden`. A product with the chunk's `hidden` is added into
   `grad_weight`: by the product itself, or, if that is float32 and the product half, from a buffer of its own.

The backward makes a number of the incoming gradient and the rows, multiplies both gradients by it in place, casts
`grad_hidden` to the precision that `hidden` had, and hands them on.
"""

from __future__ import annotations

from oomph.step.gpt_eager_layers import linear, note_product
from oomph.step.gpt_eager_ledger import Held
from oomph.step.gpt_eager_run import Node, Run
from oomph.step.ops import Kernel, Kind, Phase

HEAD = "lm_head"
_WRITTEN_CHUNKS = 3  # of equal ones: the allocator serves each as it served the one before


def whole_loss(run: Run, hidden: Held, targets: Held) -> tuple[Held, Held]:
    """All logits, then cross_entropy. Returns (logits, loss).

    Under a GPU's autocast cross_entropy asks log_softmax for the logits' own type, which autocast respects; nll_loss is
    on its float32 list, so it is the logarithms that are copied to float32, and kept for the backward. On a CPU
    cross_entropy itself is on that list: the logits are copied to float32, for as long as it runs.
    """
    sizes, ledger = run.sizes, run.ledger
    count = sizes.rows * sizes.vocab
    logits = linear(run, HEAD, hidden, (sizes.width, sizes.vocab), False, Kind.LOGITS)
    if run.training:
        ledger.phase = Phase.LOSS
    scores = logits
    if sizes.autocast and not sizes.cuda:
        scores = ledger.make("loss.logits_float", 4 * count, Kind.LOGITS, moved=6 * count)
    logarithms = ledger.make("loss.log_softmax", scores.bytes, Kind.LOGITS, Kernel.REDUCTION, 2 * scores.bytes)
    saved = [logarithms]
    if sizes.autocast and sizes.cuda:
        saved.append(ledger.make("loss.log_softmax_float", 4 * count, Kind.LOGITS, moved=6 * count))
    loss = ledger.hold("loss", sizes.loss_bytes, Kind.LOGITS)
    weight = ledger.hold("loss.total_weight", sizes.loss_bytes, Kind.LOGITS)
    ledger.note("loss.nll_loss", (loss, weight), Kernel.INDEX, 12 * sizes.rows)
    run.save(_whole_loss_backward, "loss", [*saved, targets, weight])
    return logits, loss


def _whole_loss_backward(run: Run, node: Node) -> None:
    """nll_loss and log_softmax, with the cast back to half before the second on a GPU, after it on a CPU."""
    sizes, ledger = run.sizes, run.ledger
    count = sizes.rows * sizes.vocab
    logarithms, losses = node.saved[0], node.saved[1 if sizes.autocast and sizes.cuda else 0]
    grad = run.take_grad()
    dlosses = ledger.make("loss.nll_loss.dx", losses.bytes, Kind.LOGITS, moved=losses.bytes)
    del grad, losses
    node.saved.clear()
    if sizes.autocast and sizes.cuda:
        moved = dlosses.bytes + logarithms.bytes
        dlosses = ledger.make("loss.log_softmax.dx_half", logarithms.bytes, Kind.LOGITS, moved=moved)
    moved = 3 * logarithms.bytes
    run.grad = ledger.make("loss.log_softmax.dx", logarithms.bytes, Kind.LOGITS, Kernel.REDUCTION, moved)
    del dlosses, logarithms
    if sizes.autocast and not sizes.cuda:
        run.grad = ledger.make("loss.logits.dx", 2 * count, Kind.LOGITS, moved=6 * count)


def chunks(rows: int, chunk: int) -> list[tuple[int, int]]:
    """The rows of each chunk, and how often a chunk of so many follows: equal ones are written a few times only."""
    whole, rest = divmod(rows, chunk)
    if whole <= _WRITTEN_CHUNKS:
        runs = [(chunk, 1)] * whole
    else:  # the last one stands alone: what ends with the loop is freed after it
        runs = [(chunk, 1), (chunk, whole - _WRITTEN_CHUNKS + 1), (chunk, 1)]
    return [*runs, (rest, 1)] if rest else runs


def chunked_loss(run: Run, hidden: Held, chunk: int) -> Held:
    """The loss by chunks of rows, as the module's docstring has it."""
    sizes, ledger = run.sizes, run.ledger
    learns = run.nodes is not None
    count, hidden_bytes = sizes.vocab * sizes.width, sizes.rows * sizes.width * sizes.compute_bytes
    if run.training:
        ledger.phase = Phase.LOSS
    copies: list[Held] = []
    cast = hidden.bytes != hidden_bytes
    if cast:
        copies.append(ledger.make(f"{HEAD}.input", hidden_bytes, Kind.ACTIVATIONS, moved=3 * hidden_bytes))
    if sizes.autocast:
        copies.append(ledger.make(f"{HEAD}.weight.half", 2 * count, Kind.HALF_WEIGHTS, moved=6 * count))
    loss = ledger.make("loss", 4, Kind.LOGITS)
    saved: list[Held] = []
    if learns:
        weight_bytes = count * sizes.weight_bytes
        saved.append(ledger.make("loss.grad_hidden", hidden_bytes, Kind.LOGITS, Kernel.NONE))
        saved.append(ledger.make(f"{HEAD}.weight.grad", weight_bytes, Kind.GRADIENTS, moved=weight_bytes))
    for rows, ledger.times in chunks(sizes.rows, chunk):
        _chunk(run, rows, learns)
    ledger.times = 1
    run.save(_chunked_loss_backward, "loss", saved, cast)
    return loss


def _chunk(run: Run, rows: int, learns: bool) -> None:
    sizes, ledger = run.sizes, run.ledger
    compute = sizes.compute_bytes
    count = rows * sizes.vocab
    logits = ledger.hold("loss.chunk_logits", count * compute, Kind.LOGITS)
    note_product(run, "loss.chunk_logits", (logits,), 1, rows, sizes.vocab, sizes.width)
    if compute == 2:
        logits = ledger.make("loss.chunk_logits_float", 4 * count, Kind.LOGITS, moved=6 * count)
    ledger.note("loss.chunk_log_softmax", (), Kernel.REDUCTION, 8 * count)
    picked = ledger.make("loss.chunk_picked", 4 * rows, Kind.LOGITS, Kernel.INDEX, 8 * rows)
    summed = ledger.make("loss.chunk_loss", 4, Kind.LOGITS, Kernel.REDUCTION, 4 * rows)
    del picked
    if not learns:
        return
    ledger.note("loss.chunk_softmax", (), Kernel.POINTWISE, 8 * count)
    ones = ledger.make("loss.chunk_ones", 4 * rows, Kind.LOGITS)
    ledger.note("loss.chunk_dlogits", (), Kernel.POINTWISE, 8 * count)
    del ones
    if compute == 2:
        logits = ledger.make("loss.chunk_dlogits_half", 2 * count, Kind.LOGITS, moved=6 * count)
    note_product(run, "loss.chunk_grad_hidden", (), 1, rows, sizes.width, sizes.vocab)
    made: tuple[Held, ...] = ()
    weight_bytes = sizes.vocab * sizes.width * compute
    if compute != sizes.weight_bytes:
        made = (ledger.hold("loss.chunk_grad_weight", weight_bytes, Kind.TEMPORARY),)
    note_product(run, "loss.chunk_grad_weight", made, 1, sizes.vocab, sizes.width, rows)
    if made:
        promoted = () if sizes.cuda else (ledger.hold("loss.chunk_promoted", 2 * weight_bytes, Kind.TEMPORARY),)
        ledger.note("loss.chunk_grad_weight_sum", promoted, Kernel.POINTWISE, 5 * weight_bytes)
        del promoted
    del summed


def _chunked_loss_backward(run: Run, node: Node) -> None:
    ledger = run.ledger
    (cast,) = node.extra
    grad = run.take_grad()
    weight = [node.saved.pop()]
    hidden = node.saved.pop()
    scale = ledger.make("loss.scale", 4, Kind.LOGITS)
    ledger.note("loss.grad_hidden", (), Kernel.POINTWISE, 2 * hidden.bytes)
    ledger.note("loss.grad_weight", (), Kernel.POINTWISE, 2 * weight[0].bytes)
    if cast:
        hidden = ledger.make(f"{HEAD}.dx.float", 2 * hidden.bytes, Kind.TEMPORARY, moved=3 * hidden.bytes)
    del grad, scale
    run.grad = hidden
    del hidden
    run.accumulate(f"{HEAD}.weight", weight)
