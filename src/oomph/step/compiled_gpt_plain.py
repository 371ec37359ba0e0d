"""Attention by plain matrix products as inductor compiles it: every score is written, and saved.

Three programs come to it. `attention = "math"` under scaled_dot_product_attention computes in float32, and under
autocast saves half copies of queries, keys and values, for backward multiplies in half precision. nanoGPT without that
function multiplies in the compute dtype and masks with a triangle of its own. On a CPU, dropout leads there.
"""

from __future__ import annotations

from oomph.step.compiled_gpt import Plain, Sizes
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
    shape = (s.batch * s.heads, s.tokens, s.tokens, s.width // s.heads)
    flops = 2 * s.rows * s.tokens * s.width
    operands: list[Buffer] = []
    wide: list[Buffer] = []

    def side_by_side(part: str) -> None:
        wide.append(p.new(f"{name}.{part}", n.count, n.work, Kind.ATTENTION))
        if n.operand != n.work and keeps:
            operands.append(p.new(f"{name}.{part}.half", n.count, n.operand, Kind.ATTENTION))
        p.run(f"{name}.{part}", Kernel.POINTWISE, n.count * (s.compute + n.work))

    def product(what: str, count: int, item: int) -> Buffer:
        made = p.new(f"{name}.{what}", count, item, Kind.ATTENTION)
        p.run(f"{name}.{what}", Kernel.GEMM, 2 * n.count * item + n.scores * item, flops, shape)
        return made

    side_by_side("q")
    side_by_side("k")
    scores = [product("scores", n.scores, n.score)]
    if n.operand != n.work or not keeps:
        p.drop(n.work, *wide)
        wide.clear()
    rows: list[Buffer] = []
    flags = [p.new(f"{name}.masked", s.tokens * s.tokens, 1, Kind.ATTENTION)] if s.by_hand or p.block == 0 else []
    if dropping:
        flags.append(p.new(f"{name}.dropped", n.scores, 1, Kind.ATTENTION))
    weights = scores[0]
    twice = not s.cuda and dropping
    if keeps and (s.autocast or not s.by_hand):
        rows = [p.new(f"{name}.{what}", s.rows * s.heads, 4, Kind.ATTENTION) for what in ("maximum", "sum")]
    if keeps and (s.autocast or dropping or twice):
        weights = p.new(f"{name}.weights", n.scores, n.score, Kind.ATTENTION)
        if s.by_hand or twice:
            scores.append(weights)
    p.run(f"{name}.softmax", Kernel.REDUCTION, n.scores * (s.compute + n.score))
    side_by_side("v")
    p.drop(s.compute, qkv)
    y = product("y", n.count, n.work)
    if weights not in scores:
        p.drop(n.score, weights)
    if n.operand != n.work or not keeps:
        p.drop(n.work, *wide)
        wide.clear()
    output = p.new(f"{name}.out", n.count, s.compute, Kind.ATTENTION)
    p.run(f"{name}.out", Kernel.POINTWISE, n.count * (n.work + s.compute))
    p.drop(n.work, y)
    if not keeps:
        p.drop(n.score, *scores)
        p.drop(1, *flags)
        return Plain(output, [], [], [], [])
    return Plain(output, operands or wide, scores, rows, flags)


def plain_backward(p: Generated, s: Sizes, name: str, saved: Plain, gradient: Buffer, own: bool) -> Buffer:
    """The gradients of queries, keys and values side by side. `own`: backward computed again what it takes."""
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
    halved = n.score != item  # float32 weights are read through a half copy, made with the scores' gradient
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
    p.run(f"{name}.dscores", Kernel.REDUCTION, n.scores * (2 * item + n.score))
    let_go(n.score, *(saved.scores if halved else saved.scores[:1]))
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
