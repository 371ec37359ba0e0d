"""Where nothing that keeps the training fits: the nearest things that would."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from oomph.devices import Device, all_devices
from oomph.fitting.estimate import replace
from oomph.fitting.result import Value
from oomph.fitting.rows import Row, shallower
from oomph.fitting.search import Searcher
from oomph.fitting.shapes import HEAD_SIZE
from oomph.fitting.space import Program, batches, changes_between, ladders, resized
from oomph.planner import Plan

SMALL_BATCHES = 4  # micro-batches, the smallest, that a smaller model is searched with


def nearest_rows(program: Program, searcher: Searcher) -> Iterator[Row]:
    """The deepest and the widest model that fit, each with settings of its own."""
    base = program.settled
    layers, shallow = _largest(base.n_layer - 1, lambda n: shallower(base, n), program, searcher)
    if shallow is not None:
        effect = f"a smaller model: {layers} layers of {base.n_layer}"
        yield Row("the deepest that fits", program.key, changes_between(base, shallow.config), "different", effect)
    heads, narrow = _largest((base.n_embd - 1) // HEAD_SIZE, _wide, program, searcher)
    if narrow is not None:
        effect = f"a smaller model: width {heads * HEAD_SIZE} of {base.n_embd}"
        yield Row("the widest that fits", program.key, changes_between(base, narrow.config), "different", effect)


def smallest_card(need_mib: float) -> Device | None:
    """The card with the least memory on which a process can have that much; None where there is none."""
    cards = [card for card in all_devices() if card.kind == "cuda" and card.usable_mib >= need_mib]
    return min(cards, key=lambda card: (card.usable_mib, -(card.tflops_fp16 or 0.0)), default=None)


def _largest(
    top: int, change: Callable[[int], dict[str, Value]], program: Program, searcher: Searcher
) -> tuple[int, Plan | None]:
    """The largest number up to `top` whose model fits with a small micro-batch, and its plan at the fastest of those.

    Memory grows with the number: halving finds the last whose peak fits at the setting that is the leanest for the
    whole model. From there each size is searched with settings of its own, up while they fit, or down until one does.
    """

    def fastest(number: int) -> Plan | None:
        smaller = resized(program, change(number), searcher.device)
        small = {size for size, _ in batches(smaller.settled)[-SMALL_BATCHES:]}
        return searcher.fastest(smaller.loaded, (each for each in ladders(smaller) if each.config.batch_size in small))

    leanest = searcher.roomiest(program.loaded, ladders(program))
    if leanest is None:
        return 0, None
    lean = leanest.config

    def may_fit(number: int) -> bool:
        smaller = replace(lean, **change(number))
        again = min(smaller.checkpoint_layers, smaller.n_layer)
        return searcher.peak_fits(replace(smaller, checkpoint_layers=again))

    number = bisect_left(range(1, top + 1), True, key=lambda number: not may_fit(number))
    found = fastest(number) if number else None
    while found is None and number > 1:
        number -= 1
        found = fastest(number)
    while found is not None and number < top and (larger := fastest(number + 1)) is not None:
        number, found = number + 1, larger
    return number, found


def _wide(heads: int) -> dict[str, Value]:
    return {"n_embd": heads * HEAD_SIZE, "n_head": heads}
