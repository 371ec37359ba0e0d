"""Where nothing that keeps the training fits: the nearest things that would."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

import msgspec

from oomph.config import TrainConfig
from oomph.devices import Device, all_devices
from oomph.fitting.result import Value
from oomph.fitting.rows import Row, shallower
from oomph.fitting.search import Searcher
from oomph.fitting.shapes import HEAD_SIZE
from oomph.fitting.space import Program, changes_between, ladders


def nearest_rows(program: Program, searcher: Searcher) -> Iterator[Row]:
    """From the leanest setting: the deepest and the widest model that fit."""
    leanest = searcher.roomiest(program.loaded, ladders(program))
    if leanest is None:
        return
    base = leanest.config

    def row(name: str, changed: TrainConfig, effect: str) -> Row:
        return Row(name, program.key, _from(program, changed), "different", effect)

    layers = _largest(base.n_layer - 1, lambda n: _with(base, shallower(base, n)), program, searcher)
    if layers:
        effect = f"a smaller model: {layers} layers of {base.n_layer}"
        yield row("the deepest that fits", _with(base, shallower(base, layers)), effect)
    units = _largest((base.n_embd - 1) // HEAD_SIZE, lambda n: _with(base, _wide(n)), program, searcher)
    if units:
        effect = f"a smaller model: width {units * HEAD_SIZE} of {base.n_embd}"
        yield row("the widest that fits", _with(base, _wide(units)), effect)


def smallest_card(need_mib: float) -> Device | None:
    """The card with the least memory on which a process can have that much; None where there is none."""
    cards = [card for card in all_devices() if card.kind == "cuda" and card.usable_mib >= need_mib]
    return min(cards, key=lambda card: (card.usable_mib, -(card.tflops_fp16 or 0.0)), default=None)


def _largest(top: int, make: Callable[[int], TrainConfig], program: Program, searcher: Searcher) -> int:
    """The largest number up to `top` whose config fits, by the full simulation; 0 where none does. Memory grows with
    the number: halving finds the last that may fit by the safe bound, then the last whose peak fits; what is left is
    fragmentation, so that from there each is simulated."""

    def last(top: int, fits: Callable[[TrainConfig], bool]) -> int:
        return bisect_left(range(1, top + 1), True, key=lambda number: not fits(make(number)))

    number = last(last(top, searcher.may_fit), searcher.peak_fits)
    while number > 0:
        memory = searcher.simulate(program.loaded, make(number)).memory
        if memory.fits and not memory.retries:
            break
        number -= 1
    return number


def _wide(heads: int) -> dict[str, Value]:
    return {"n_embd": heads * HEAD_SIZE, "n_head": heads}


def _with(config: TrainConfig, changes: dict[str, Value]) -> TrainConfig:
    return msgspec.structs.replace(config, **changes)


def _from(program: Program, config: TrainConfig) -> dict[str, Value]:
    return changes_between(program.settled, config)
