"""Attention as nanoGPT multiplies it out itself, where it has no scaled_dot_product_attention: every score is kept.

Queries by keys, scaled, masked with a triangle that each block holds as a buffer, softmax, dropout, by values. Under
autocast the products are in half precision and the softmax in float32, so that the weights are kept twice.
"""

from __future__ import annotations

from oomph.step.gpt_eager_layers import note_product
from oomph.step.gpt_eager_ledger import Held
from oomph.step.gpt_eager_run import Node, Run
from oomph.step.ops import Kernel, Kind


class _Scores:
    """Bytes of one number for each head, query and key."""

    def __init__(self, run: Run) -> None:
        sizes = run.sizes
        self.count = sizes.rows * sizes.heads * sizes.tokens
        self.bytes = self.count * sizes.compute_bytes
        self.softmax_bytes = 4 * self.count if sizes.autocast else self.bytes
        self.mask_bytes = sizes.tokens * sizes.tokens
        # CUDA's softmax reads float16 and writes float32 in one pass; bfloat16 is cast before and after.
        self.casts = sizes.autocast and sizes.dtype != "float16"


class _Saved:
    """What autograd keeps for backward: nothing, where no gradients are asked for."""

    def __init__(self, run: Run, kept: list[Held]) -> None:
        self.held: list[Held] = []
        self.learns = run.nodes is not None
        self.take(kept)

    def take(self, kept: list[Held]) -> None:
        """Keep these, and empty the list that had them."""
        if self.learns:
            self.held += kept
        kept.clear()


def attend_by_hand(run: Run, name: str, qkv: Held) -> tuple[Held, Held]:
    """The heads' outputs side by side, and the weights, which the caller's variable holds as long as it runs."""
    sizes, ledger, scores = run.sizes, run.ledger, _Scores(run)
    kept = [_side_by_side(run, f"{name}.{part}", qkv) for part in "qk"]
    products = ledger.hold(f"{name}.products", scores.bytes, Kind.ATTENTION)
    _note_scores(run, f"{name}.products", products)
    saved = _Saved(run, kept)
    weights = ledger.make(f"{name}.scaled", scores.bytes, Kind.ATTENTION, moved=2 * scores.bytes)
    del products
    mask_moved = scores.mask_bytes * (1 + sizes.weight_bytes)
    kept = [ledger.make(f"{name}.masked_keys", scores.mask_bytes, Kind.ATTENTION, moved=mask_moved)]
    weights = ledger.make(f"{name}.masked", scores.bytes, Kind.ATTENTION, moved=2 * scores.bytes)
    saved.take(kept)
    weights = _softmax(run, name, weights)
    kept = [weights]
    weights = _drop(run, name, weights, kept)
    saved.take(kept)
    factor = weights
    if sizes.autocast:
        factor = ledger.make(f"{name}.weights_half", scores.bytes, Kind.ATTENTION, moved=3 * scores.bytes)
    v = _side_by_side(run, f"{name}.v", qkv)
    size = sizes.rows * sizes.width * sizes.compute_bytes
    out = ledger.hold(f"{name}.out", size, Kind.ATTENTION)
    _note_scores(run, f"{name}.out", out)
    saved.take([factor, v])
    del factor, v
    run.save(_backward, name, saved.held)
    del saved
    if sizes.heads == 1:
        return out, weights
    return ledger.make(f"{name}.contiguous", size, Kind.ATTENTION, moved=2 * size), weights


def _side_by_side(run: Run, name: str, qkv: Held) -> Held:
    """A part of the projection as a batched product wants it: a view with one head or one sequence, else a copy."""
    if run.sizes.heads == 1 or run.sizes.batch == 1:
        return qkv
    size = qkv.bytes // 3
    return run.ledger.make(f"{name}_rows", size, Kind.ATTENTION, moved=2 * size)


def _note_scores(run: Run, name: str, made: Held) -> None:
    sizes = run.sizes
    note_product(run, name, (made,), sizes.batch * sizes.heads, sizes.tokens, sizes.tokens, sizes.head_size)


def _softmax(run: Run, name: str, masked: Held) -> Held:
    ledger, scores = run.ledger, _Scores(run)
    wide = masked
    if scores.casts:
        moved = scores.bytes + scores.softmax_bytes
        wide = ledger.make(f"{name}.masked_float", scores.softmax_bytes, Kind.ATTENTION, moved=moved)
    moved = wide.bytes + scores.softmax_bytes
    return ledger.make(f"{name}.softmax", scores.softmax_bytes, Kind.ATTENTION, Kernel.REDUCTION, moved)


def _drop(run: Run, name: str, weights: Held, kept: list[Held]) -> Held:
    """Dropout on the weights; its mask joins what is kept."""
    sizes, ledger, size = run.sizes, run.ledger, weights.bytes
    if not (run.training and sizes.dropout):
        return weights
    if not sizes.cuda:
        kept.append(ledger.make(f"{name}.noise", size, Kind.ATTENTION, moved=3 * size))
        return ledger.make(f"{name}.dropped", size, Kind.ATTENTION, moved=3 * size)
    count = _Scores(run).count
    out = ledger.hold(f"{name}.dropped", size, Kind.ATTENTION)
    mask = ledger.hold(f"{name}.dropout_mask", count, Kind.ATTENTION)
    ledger.note(f"{name}.dropout", (out, mask), Kernel.POINTWISE, 2 * size + count)
    kept.append(mask)
    return out


def _backward(run: Run, node: Node) -> None:
    """The same way back, one pass over all scores at a time."""
    sizes, ledger, name, saved = run.sizes, run.ledger, node.name, node.saved
    scores, size = _Scores(run), sizes.rows * sizes.width * sizes.compute_bytes
    grad = run.take_grad()
    if sizes.heads > 1 and sizes.batch > 1:
        grad = ledger.make(f"{name}.dout_rows", size, Kind.ATTENTION, moved=2 * size)
    dv = ledger.hold(f"{name}.dv", size, Kind.ATTENTION)
    _note_scores(run, f"{name}.dv", dv)
    dscores = ledger.hold(f"{name}.dweights", scores.bytes, Kind.ATTENTION)
    _note_scores(run, f"{name}.dweights", dscores)
    del grad, saved[-2:]
    wide = scores.softmax_bytes
    if sizes.autocast:
        dscores = ledger.make(f"{name}.dweights_float", wide, Kind.ATTENTION, moved=wide + scores.bytes)
    if len(saved) > 4:
        dscores = ledger.make(f"{name}.ddropped", wide, Kind.ATTENTION, moved=2 * wide + saved[-1].bytes)
        saved.pop()
    after = wide if scores.casts else scores.bytes
    dscores = ledger.make(f"{name}.dsoftmax", after, Kind.ATTENTION, Kernel.REDUCTION, 2 * wide + after)
    saved.pop()
    if scores.casts:
        dscores = ledger.make(f"{name}.dsoftmax_half", scores.bytes, Kind.ATTENTION, moved=wide + scores.bytes)
    dscores = ledger.make(f"{name}.dmasked", scores.bytes, Kind.ATTENTION, moved=2 * scores.bytes)
    saved.pop()
    dscores = ledger.make(f"{name}.dscaled", scores.bytes, Kind.ATTENTION, moved=2 * scores.bytes)
    parts = [dv]
    del dv
    for part in ("dq", "dk"):
        made = ledger.hold(f"{name}.{part}", size, Kind.ATTENTION)
        _note_scores(run, f"{name}.{part}", made)
        parts.append(made)
        del made
    del dscores
    saved.clear()
    if sizes.heads > 1 and sizes.head_size > 1:
        for place in (0, 2):
            parts[place] = ledger.make(f"{name}.dqkv_rows", size, Kind.ATTENTION, moved=2 * size)
    run.grad = ledger.make(f"{name}.dqkv", 3 * size, Kind.ATTENTION, moved=6 * size)
