"""The graphs of a deep model from those of a shallow one.

Of a run of equal blocks three are recorded and cut: the first two and the last (`step.depth.sample`). The second one's
values are then written again for each block left out. What they read of the block before or after, a copy reads of the
copy before or after it; what only the first block to need it has made, such as a constant, all of them share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, groupby

from oomph.step.compile.graph import How, Value
from oomph.step.compile.partition import Graphs
from oomph.step.depth import Gap, UnlikeBlocksError, block_of, renamed


def deepened(graphs: Graphs, grads: Mapping[str, Value], gap: Gap) -> tuple[Graphs, dict[str, Value]]:
    """Graphs and gradients with the blocks of a gap filled in.

    Raises `UnlikeBlocksError` where the three blocks do not compute the same.
    """
    return _Deepening(graphs, gap).run(grads)


class _Deepening:
    """Places count from the block before, -1, through the pattern, 0, and its copies to the block after."""

    def __init__(self, graphs: Graphs, gap: Gap) -> None:
        self.graphs, self.gap = graphs, gap
        self.end = gap.copies + 1  # the place of the block after
        self.copies: dict[tuple[Value, int], Value] = {}
        self.places: dict[Value, int] = {}  # of every value of the three blocks and the copies
        self.offsets: dict[Value, int] = {}  # -1, 0 or 1: which of the three blocks it is of, or is a copy of
        self.origin: dict[Value, Value] = {}  # what a copy is a copy of
        self.names: dict[tuple[str, int], str] = {}  # names in copies: many values share one
        computed = {*graphs.forward, *graphs.backward}
        # Results of kernels that nothing reads, but that are written.
        self.unread = [item for call in computed if call.how is How.CALL for item in call.users if item not in computed]
        values = sorted({*graphs.inputs, *computed, *self.unread})
        self.next_index = max([value.index for value in values]) + 1
        self.twins = self._twins(values)

    def _twins(self, values: Sequence[Value]) -> dict[Value, dict[int, Value]]:
        """The same value in the block before (-1), in the pattern (0) and in the block after (1)."""
        found: dict[tuple[object, ...], dict[int, Value]] = {}
        result: dict[Value, dict[int, Value]] = {}
        counts: dict[tuple[object, ...], int] = {}
        for value in values:
            offset = self.gap.group_of(value.block)
            if offset is None or value.block is None:
                continue
            own = value.block - (self.gap.before, self.gap.template, self.gap.after)[offset + 1]
            key = (own, renamed(value.name, value.block, 0), value.op, value.shape, value.dtype)
            count = counts[offset, key] = counts.get((offset, key), 0) + 1
            twins = result[value] = found.setdefault((*key, count), {})
            twins[offset] = value
            self.places[value] = self.end if offset == 1 else offset
            self.offsets[value] = offset
        return result

    def run(self, grads: Mapping[str, Value]) -> tuple[Graphs, dict[str, Value]]:
        graphs = self.graphs
        order = range(self.end)
        deep = Graphs(
            tuple(self._repeated(graphs.inputs, order)),
            tuple(self._repeated(graphs.forward, order)),
            tuple(self._repeated(graphs.backward, order[::-1])),
            tuple(self._repeated(graphs.saved, order)),
        )
        unread = self._repeated(sorted(self.unread), order)
        self._wire([*deep.inputs, *dict.fromkeys(chain(deep.forward, deep.backward)), *unread])
        _check_order(deep.forward, deep.inputs)
        _check_order(deep.backward, (*deep.inputs, *deep.saved))
        return deep, self._grads(grads, order[::-1])

    def _repeated(self, values: Sequence[Value], order: Sequence[int]) -> list[Value]:
        """The values in order, each run of the pattern's once for every copy."""
        result: list[Value] = []
        for is_pattern, run in groupby(values, lambda value: self.places.get(value) == 0):
            if is_pattern:
                own = list(run)
                result += [self._at(each, at) for at in order for each in own]
            else:
                result += run
        return result

    def _grads(self, grads: Mapping[str, Value], order: Sequence[int]) -> dict[str, Value]:
        """Every parameter's gradient, in the order that backward makes them."""
        gap = self.gap
        found: dict[str, Value] = {}
        for is_pattern, names in groupby(grads, lambda name: gap.group_of(block_of(name)) == 0):
            if is_pattern:
                own = [(name, block_of(name) or 0) for name in names]
                found |= {
                    renamed(name, block, block + at * gap.period): self._at(grads[name], at)
                    for at in order
                    for name, block in own
                }
            else:
                found |= {name: grads[name] for name in names}
        return found

    def _at(self, value: Value, place: int) -> Value:
        """The value as it is at a place."""
        twins = self.twins[value]
        if place in (-1, 0, self.end):
            found = twins.get(1 if place == self.end else place)
            if found is None:
                raise UnlikeBlocksError
            return found
        first = twins[0]
        found = self.copies.get((first, place))
        if found is None:
            found = self.copies[first, place] = self._copied(first, place)
        return found

    def _copied(self, value: Value, place: int) -> Value:
        assert value.block is not None
        block = value.block + place * self.gap.period
        name = self.names.get((value.name, place))
        if name is None:
            name = self.names[value.name, place] = renamed(value.name, value.block, block)
        copy = value.copied(name, block, self.next_index)
        self.next_index += 1
        self.places[copy], self.offsets[copy], self.origin[copy] = place, 0, value
        return copy

    def _wire(self, values: Sequence[Value]) -> None:
        """Every value reads what stands where its own block does."""
        inputs = [self._reads(value) for value in values]
        for value, reads in zip(values, inputs, strict=True):
            value.inputs, value.users = reads, []
        for value in values:
            for each in dict.fromkeys(value.inputs):
                each.users.append(value)

    def _reads(self, value: Value) -> tuple[Value, ...]:
        result: list[Value] = []
        offset, place = self.offsets.get(value), self.places.get(value, 0)
        for read in self.origin.get(value, value).inputs:
            twins = self.twins.get(read)
            if twins is None or 0 not in twins:
                result.append(read)
                continue
            own = self.offsets[read]
            if offset is None:
                if own == 0:
                    raise UnlikeBlocksError
                result.append(read)
            elif abs(own - offset) > 1:
                raise UnlikeBlocksError
            else:
                result.append(self._at(read, place + own - offset))
        return tuple(result)


def _check_order(graph: Sequence[Value], given: Sequence[Value]) -> None:
    """Raises `UnlikeBlocksError` where a value reads something that is not there yet."""
    known = set(given)
    for value in graph:
        if any(read not in known and read.how is not How.TANGENT for read in value.inputs):
            raise UnlikeBlocksError
        known.add(value)
