"""Where nothing that keeps the training fits: the nearest things that would."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from oomph.config import TrainConfig
from oomph.devices import Device, all_devices
from oomph.fitting.result import Value
from oomph.fitting.rows import Row, shallower
from oomph.fitting.search import Searcher
from oomph.fitting.shapes import HEAD_SIZE
from oomph.fitting.space import Program, changes_between, ladders, resized
from oomph.planner import Plan


def nearest_rows(program: Program, searcher: Searcher) -> Iterator[Row]:
    """The deepest and the widest model that fit, each at its own fastest setting."""
    base = program.settled
    for name, top, change, told in (
        ("the deepest that fits", base.n_layer - 1, _deep(base), lambda n: f"{n} layers of {base.n_layer}"),
        (
            "the widest that fits",
            (base.n_embd - 1) // HEAD_SIZE,
            _wide,
            lambda n: f"width {n * HEAD_SIZE} of {base.n_embd}",
        ),
    ):
        number, found = _largest(top, change, program, searcher)
        if found is not None:
            changes = changes_between(base, found.config)
            yield Row(name, program.key, changes, "different", f"a smaller model: {told(number)}")


def smallest_card(need_mib: float) -> Device | None:
    """The card with the least memory on which a process can have that much; None where there is none."""
    cards = [card for card in all_devices() if card.kind == "cuda" and card.usable_mib >= need_mib]
    return min(cards, key=lambda card: (card.usable_mib, -(card.tflops_fp16 or 0.0)), default=None)


def _largest(
    top: int, change: Callable[[int], dict[str, Value]], program: Program, searcher: Searcher
) -> tuple[int, Plan | None]:
    """The largest number up to `top` whose model fits at some setting, and its plan at the fastest of them.

    Memory grows with the number, so that halving finds it.
    """

    def fastest(number: int) -> Plan | None:
        if number not in known:
            smaller = resized(program, change(number), searcher.device)
            known[number] = searcher.fastest(smaller.loaded, ladders(smaller))
        return known[number]

    known: dict[int, Plan | None] = {0: None}
    number = bisect_left(range(1, top + 1), True, key=lambda number: fastest(number) is None)
    return number, fastest(number)


def _deep(base: TrainConfig) -> Callable[[int], dict[str, Value]]:
    return lambda layers: shallower(base, layers)


def _wide(heads: int) -> dict[str, Value]:
    return {"n_embd": heads * HEAD_SIZE, "n_head": heads}
