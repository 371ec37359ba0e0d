"""A loop over tokens, as in Mamba without its kernels, from a trace of a few iterations: one stands for many.

Such a model's list grows with the tokens: a group of operations repeats for each. Of the iterations the first two
and the last two are kept, and of those in between one, with their number as its `times`. What these
allocate and free each time is one buffer; what they all keep is one buffer as large as all of it. Such a list has the
same operations at any length, and its numbers are polynomials in the tokens like any other's.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import msgspec

from oomph.step.ops import Buffer, Op
from oomph.step.trace.template import Lists

KEPT = 2  # iterations kept at each end of a loop
LONGEST = 400  # operations of one iteration
_SLACK = 4  # iterations at both ends that may differ from the others


class _Turns(NamedTuple):
    """A loop: the index of its first operation, the operations per iteration, the number of iterations."""

    start: int
    size: int
    often: int


class _Position(NamedTuple):
    """An operation's index in the rolled list; its loop and iteration, if that stands for many."""

    at: int
    turns: _Turns | None = None
    turn: int = 0


def rolled(lists: Lists, tokens: int) -> Lists:
    """The lists of a trace at `tokens` tokens, with one iteration in place of many in each loop over them."""
    names = [name for name in lists.sections if lists.sections[name]]
    ops = [op for name in names for op in lists.sections[name]]
    places = _places(ops, _loops(ops, tokens))
    new = _merged(ops, places, kept={*lists.grads.values(), *(b for held in lists.roles.values() for b in held)})
    sections = dict(lists.sections)
    start = 0
    for name in names:
        end = start + len(lists.sections[name])
        sections[name] = _written(ops[start:end], places[start:end], new)
        start = end
    return Lists(sections, lists.roles, lists.grads)


def _loops(ops: Sequence[Op], tokens: int) -> list[_Turns]:
    """Groups of operations that repeat about once per token."""
    numbers: dict[Hashable, int] = {}
    kinds = [numbers.setdefault(_kind(op), len(numbers)) for op in ops]
    found: list[_Turns] = []
    start = 0
    while start < len(kinds):
        turns = _turns(kinds, start, tokens - _SLACK)
        if turns is not None:
            found.append(turns)
        start = start + 1 if turns is None else start + turns.size * turns.often
    return found


def _kind(op: Op) -> Hashable:
    made, gone = (tuple(b.bytes for b in buffers) for buffers in (op.allocates, op.frees))
    return op.name, op.phase, op.kernel, op.dtype, op.shape, op.flops, op.bytes_moved, made, tuple(sorted(gone))


def _turns(kinds: Sequence[int], start: int, least: int) -> _Turns | None:
    """The shortest group that begins here and repeats at least `least` times; None if there is none."""
    for size in range(1, min(LONGEST, (len(kinds) - start) // least) + 1):
        if kinds[start] != kinds[start + size]:
            continue
        turn = kinds[start : start + size]
        count = 1
        while kinds[start + count * size : start + (count + 1) * size] == turn:
            count += 1
        if count >= least:
            return _Turns(start, size, count)
    return None


def _places(ops: Sequence[Op], loops: Sequence[_Turns]) -> list[_Position]:
    """Each operation's position in the list with one iteration for many."""
    places: list[_Position] = []
    left_out = 0
    for turns in loops:
        places += [_Position(at - left_out) for at in range(len(places), turns.start)]
        for turn in range(turns.often):
            many = KEPT <= turn < turns.often - KEPT
            at = turns.start + min(turn, KEPT) * turns.size - left_out
            if turn >= turns.often - KEPT:
                at += (turn + 1 - turns.often + KEPT) * turns.size
            places += [_Position(at + offset, turns if many else None, turn) for offset in range(turns.size)]
        left_out += max(0, turns.often - 2 * KEPT - 1) * turns.size
    return [*places, *(_Position(at - left_out) for at in range(len(places), len(ops)))]


def _merged(ops: Sequence[Op], places: Sequence[_Position], kept: set[Buffer]) -> dict[Buffer, Buffer | None]:
    """For each buffer of the merged iterations: its replacement, or None if it has none of its own."""
    freed = {buffer: place for op, place in zip(ops, places, strict=True) for buffer in op.frees}
    groups: dict[tuple[Any, ...], list[Buffer]] = {}
    turning: set[tuple[Any, ...]] = set()
    for op, place in zip(ops, places, strict=True):
        for slot, buffer in enumerate(op.allocates):
            end = freed.get(buffer)
            if buffer in kept or (place.turns is None and (end is None or end.turns is None)):
                continue
            key = (place.at, slot, None if end is None else end.at)
            groups.setdefault(key, []).append(buffer)
            if end is not None and place.turns is not None and place.turns is end.turns:
                turning.add(key)
    new: dict[Buffer, Buffer | None] = {}
    for key, buffers in groups.items():
        made, _, gone = key
        first = buffers[0]
        if key not in turning:
            total = sum(buffer.bytes for buffer in buffers)
            one: Buffer | None = Buffer(first.name, total, first.kind, first.block)
        else:  # one that lives on into the next iteration exists already, from the iteration before these
            one = first if gone is not None and gone >= made else None
        new |= dict.fromkeys(buffers, one)
    return new


def _written(ops: Sequence[Op], places: Sequence[_Position], new: dict[Buffer, Buffer | None]) -> tuple[Op, ...]:
    """A section's operations, one for each position."""
    found: dict[int, tuple[Op, int, dict[Buffer, None], dict[Buffer, None]]] = {}
    for op, place in zip(ops, places, strict=True):
        times = place.turns.often - 2 * KEPT if place.turns is not None else 1
        _, _, made, gone = found.setdefault(place.at, (op, times, {}, {}))
        for buffers, all_of_them in ((op.allocates, made), (op.frees, gone)):
            mapped = [new.get(buffer, buffer) for buffer in buffers]
            all_of_them.update(dict.fromkeys(each for each in mapped if each is not None))
    return tuple(
        msgspec.structs.replace(op, allocates=tuple(made), frees=tuple(gone), times=op.times * times)
        for op, times, made, gone in found.values()
    )
