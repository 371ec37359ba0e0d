"""Where nothing that keeps the training fits: the nearest things that would."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cache

from oomph.devices import Device, all_devices
from oomph.fitting.estimate import replace
from oomph.fitting.result import Value
from oomph.fitting.rows import Row, shallower
from oomph.fitting.search import Searcher, boundary
from oomph.fitting.shapes import HEAD_SIZE
from oomph.fitting.space import Program, batches, changes_between, ladders, resized
from oomph.planner import Plan

SMALL_BATCHES = 4  # micro-batches, the smallest, that a smaller model is searched with


def nearest_rows(program: Program, searcher: Searcher, tell: Callable[[str], None]) -> Iterator[Row]:
    """The deepest and the widest model that fit, each with settings of its own. `tell` is told what is being tried."""
    base = program.settled
    tell(f"models of fewer than {base.n_layer} layers")
    layers, shallow = _largest(base.n_layer - 1, lambda n: shallower(base, n), program, searcher)
    if shallow is not None:
        effect = f"a smaller model: {layers} layers of {base.n_layer}"
        yield Row("the deepest that fits", program.key, changes_between(base, shallow.config), "different", effect)
    tell(f"models narrower than {base.n_embd}")
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

    Memory grows with the number. Which is the last is guessed from the setting that is the leanest for the whole model;
    those about it are searched with settings of their own.
    """
    leanest = searcher.roomiest(program.loaded, ladders(program))
    if leanest is None:
        return 0, None

    def seems_to_fit(number: int) -> bool:
        smaller = replace(leanest.config, **change(number))
        again = min(smaller.checkpoint_layers, smaller.n_layer)
        return searcher.seems_to_fit(replace(smaller, checkpoint_layers=again))

    @cache
    def fastest(number: int) -> Plan | None:
        smaller = resized(program, change(number), searcher.device)
        small = {size for size, _ in batches(smaller.settled)[-SMALL_BATCHES:]}
        every = [each for each in ladders(smaller) if each.config.batch_size in small]
        return searcher.fastest(smaller.loaded, every) if searcher.peak_ever_fits(every) else None

    numbers = range(1, top + 1)
    guess = bisect_left(numbers, True, key=lambda number: not seems_to_fit(number))
    number = boundary(numbers, guess, lambda number: fastest(number) is not None)
    return number, fastest(number) if number else None


def _wide(heads: int) -> dict[str, Value]:
    return {"n_embd": heads * HEAD_SIZE, "n_head": heads}
