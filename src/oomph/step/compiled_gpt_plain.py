"""Attention by plain matrix products as inductor compiles it: every score is written, and saved.

Three programs come to it. `attention = "math"` under scaled_dot_product_attention computes in float32, and under
autocast saves half copies of queries, keys and values, for backward multiplies in half precision. nanoGPT without that
function multiplies in the compute dtype and masks with a triangle of its own. On a CPU, dropout leads there.
"""

from __future__ import annotations

from collections.abc import Callable

from oomph.step.compiled_gpt import Begun, Plain, Sizes
from oomph.step.compiled_reuse import Generated
from oomph.step.ops import Buffer, Kernel, Kind


def output_of(attention: tuple[Buffer, ...] | Plain) -> Buffer:
    """Attention's output."""
    return attention.output if isinstance(attention, Plain) else attention[0]


class _Items:
    """Counts, and bytes of an item."""

    def __init__(self, s: Sizes) -> None:
        self.count = s.rows * s.width
        self.scores = s.rows * s.heads * s.tokens
        self.score = s.compute if s.by_hand else 4  # of a saved score
        self.operand = s.compute if s.by_hand or s.autocast else 4  # of a saved query
        self.work = s.compute if s.by_hand else 4  # of what forward multiplies


def attend_plainly(p: Generated, s: Sizes, name: str, qkv: Buffer, keeps: bool, dropping: bool) -> Plain:
    """Forward. What is not kept for backward is dead after it."""
    n = _Items(s)
    begun = begin_plainly(p, s, name, qkv, keeps)
    scores, weights = [begun.scores], begun.scores
    rows: list[Buffer] = []
    flags = [p.new(f"{name}.masked", s.tokens * s.tokens, 1, Kind.ATTENTION)] if s.by_hand or p.block == 0 else []
    if dropping:
        flags.append(p.new(f"{name}.dropped", n.scores, 1, Kind.ATTENTION))
    twice = not s.cuda and dropping
    if keeps and not s.composed and (s.autocast or not s.by_hand):
        rows = [p.new(f"{name}.{what}", s.rows * s.heads, 4, Kind.ATTENTION) for what in ("maximum", "sum")]
    if keeps and (dropping or twice or (s.autocast and not s.composed)):
        weights = p.new(f"{name}.weights", n.scores, n.score, Kind.ATTENTION)
        if s.by_hand or twice:
            scores.append(weights)
    p.run(f"{name}.softmax", Kernel.REDUCTION, n.scores * (s.compute + n.score))
    output, operands = _finish(p, s, name, begun, keeps, spent=() if weights in scores else (weights,))
    if not keeps:
        p.drop(n.score, *scores)
        p.drop(1, *flags)
        return Plain(output, [], [], [], [])
    return Plain(output, operands, scores, rows, flags)


def attend_again(p: Generated, s: Sizes, name: str, begun: Begun, dropping: bool) -> Plain:
    """The same in the backward program; the softmax may have run already, in another block's kernel."""
    n = _Items(s)
    if not begun.weighed:
        weigh(p, s, name, begun, dropping)
        in_place = begun.scores.bytes * (2 if s.constants else 1)  # the masked scores, then the weights
        p.run(f"{name}.softmax", Kernel.REDUCTION, n.scores * (s.compute + n.score), in_place=in_place)
        weighed(p, s, begun)
    output, operands = _finish(p, s, name, begun, keeps=True, spent=begun.spent)
    return Plain(output, operands, begun.weighed, [], [])


def weigh(p: Generated, s: Sizes, name: str, begun: Begun, dropping: bool) -> None:
    """What the softmax of a block that is computed again writes.

    Nothing weighs there what is cheaper to keep. The softmax's own result stays, in float32 under autocast, beside
    the weights that are multiplied; the triangle is read once more; dropout's random numbers stay as they were drawn.
    """
    n = _Items(s)
    scores = [begun.scores]
    if s.by_hand and s.autocast:
        scores.insert(0, p.new(f"{name}.softmax", n.scores, 4, Kind.ATTENTION))
    elif dropping:
        if s.chained:
            scores = [p.new(f"{name}.exponentials", n.scores, n.score, Kind.ATTENTION)]
        scores.append(p.new(f"{name}.weights", n.scores, n.operand, Kind.ATTENTION))
        if n.operand != n.score:
            begun.spent = (p.new(f"{name}.weights.float", n.scores, n.score, Kind.ATTENTION),)
    if dropping:
        scores.insert(1, p.new(f"{name}.random", n.scores, 4, Kind.ATTENTION))
    begun.weighed = scores


def weighed(p: Generated, s: Sizes, begun: Begun) -> None:
    """After the softmax's kernel: the scores are dead where it did not write over them."""
    if begun.scores not in begun.weighed:
        p.drop(_Items(s).score, begun.scores)


def weigh_together(p: Generated, fronts: list[Begun]) -> None:
    """The softmaxes of one or two blocks as one kernel, in place; that of two also writes the masked scores there."""
    for begun in fronts:
        begun.weighed = [begun.scores]
    scores_bytes = sum([begun.scores.bytes for begun in fronts])
    p.run("attn.sdpa.softmax", Kernel.REDUCTION, 2 * scores_bytes, in_place=len(fronts) * scores_bytes)


def begin_plainly(p: Generated, s: Sizes, name: str, qkv: Buffer, keeps: bool) -> Begun:
    """Queries, keys, and the product of both."""
    n = _Items(s)
    begun = Begun(qkv, [], [], qkv, [])
    for part in "qk":
        _side_by_side(p, s, f"{name}.{part}", begun, keeps)
    begun.scores = _product(p, s, f"{name}.scores", n.scores, n.score)
    _served(p, n, begun, keeps)
    return begun


def _finish(
    p: Generated, s: Sizes, name: str, begun: Begun, keeps: bool, spent: tuple[Buffer, ...] = ()
) -> tuple[Buffer, list[Buffer]]:
    """The values weighed, and their heads put side by side; with what backward multiplies again."""
    n = _Items(s)
    _side_by_side(p, s, f"{name}.v", begun, keeps)
    p.drop(s.compute, begun.qkv)
    y = _product(p, s, f"{name}.y", n.count, n.work)
    p.drop(n.score, *spent)
    _served(p, n, begun, keeps)
    output = p.new(f"{name}.out", n.count, s.compute, Kind.ATTENTION)
    p.run(f"{name}.out", Kernel.POINTWISE, n.count * (n.work + s.compute))
    p.drop(n.work, y)
    return output, begun.operands or begun.wide


def _side_by_side(p: Generated, s: Sizes, name: str, begun: Begun, keeps: bool) -> None:
    n = _Items(s)
    begun.wide.append(p.new(name, n.count, n.work, Kind.ATTENTION))
    if n.operand != n.work and keeps:
        begun.operands.append(p.new(f"{name}.half", n.count, n.operand, Kind.ATTENTION))
    p.run(name, Kernel.POINTWISE, n.count * (s.compute + n.work))


def _product(p: Generated, s: Sizes, name: str, count: int, item: int) -> Buffer:
    n = _Items(s)
    made = p.new(name, count, item, Kind.ATTENTION)
    shape = (s.batch * s.heads, s.tokens, s.tokens, s.width // s.heads)
    p.run(name, Kernel.GEMM, 2 * n.count * item + n.scores * item, 2 * s.rows * s.tokens * s.width, shape)
    return made


def _served(p: Generated, n: _Items, begun: Begun, keeps: bool) -> None:
    """After a product: its operands are dead, unless backward multiplies them again."""
    if n.operand != n.work or not keeps:
        p.drop(n.work, *begun.wide)
        begun.wide = []


def plain_backward(
    p: Generated, s: Sizes, name: str, saved: Plain, gradient: Buffer, own: bool, chained: Callable[[], Begun | None]
) -> Buffer:
    """The gradients of queries, keys and values side by side. `own`: backward computed again what it takes.

    `chained` begins the block whose softmax runs together with the gradient of these scores.
    """
    n = _Items(s)
    shape = (s.batch * s.heads, s.tokens, s.tokens, s.width // s.heads)
    flops = 2 * s.rows * s.tokens * s.width
    item = n.operand
    q, k, v = saved.operands

    def let_go(item_bytes: int, *buffers: Buffer) -> None:
        if own:
            p.drop(item_bytes, *buffers)
        else:
            p.release(*buffers)

    def product(what: str, count: int) -> Buffer:
        made = p.new(f"{name}.{what}", count, item, Kind.TEMPORARY)
        p.run(f"{name}.{what}", Kernel.GEMM, (2 * n.count + n.scores) * item, flops, shape)
        return made

    rows = p.new(f"{name}.dy", n.count, item, Kind.TEMPORARY)
    p.run(f"{name}.dy", Kernel.POINTWISE, n.count * (s.compute + item))
    p.drop(s.compute, gradient)
    # Float32 weights are read through a half copy, made with the scores' gradient.
    halved = saved.scores[-1].bytes // n.scores != item
    parts: list[Buffer] = []
    narrow: tuple[Buffer, ...] = ()
    if not halved:
        parts.append(product("dv", n.count))
        if len(saved.scores) > 1:
            let_go(n.score, saved.scores[-1])
    dscores = product("dweights", n.scores)
    let_go(item, v)
    if halved:
        narrow = (p.new(f"{name}.weights.half", n.scores, item, Kind.TEMPORARY),)
    begun = chained()
    p.run(f"{name}.dscores", Kernel.REDUCTION, n.scores * (2 * item + n.score))
    if begun is not None:
        weighed(p, s, begun)
    for scores in saved.scores if halved else saved.scores[:-1] or saved.scores:
        let_go(scores.bytes // n.scores, scores)
    let_go(4, *saved.rows)
    let_go(1, *saved.flags)
    if halved:
        parts.append(product("dv", n.count))
    p.drop(item, rows, *narrow)
    parts.append(product("dq", n.count))
    let_go(item, k)
    parts.append(product("dk", n.count))
    let_go(item, q)
    p.drop(item, dscores)
    packed = p.new(f"{name}.dqkv", s.rows * s.padded(3 * s.width), s.compute, Kind.TEMPORARY)
    p.run(f"{name}.dqkv", Kernel.POINTWISE, 3 * n.count * (item + s.compute))
    p.drop(item, *parts)
    return packed
