"""A deep model's graphs from those of a shallow one.

Of a run of equal blocks three are recorded and partitioned: the first two and the last (`step.depth.sample`). The
second is the template, copied for each block left out. Where the template reads from the block before or after, a
copy reads from its own neighbour; values made once, in the first block that needs them (constants), are shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter

from oomph.step.compile.graph import How, Value
from oomph.step.compile.partition import Graphs
from oomph.step.depth import Gap, UnlikeBlocksError, block_of, renamed


def deepened(graphs: Graphs, grads: Mapping[str, Value], gap: Gap) -> tuple[Graphs, dict[str, Value]]:
    """Graphs and gradients with a gap's blocks filled in.

    Raises `UnlikeBlocksError` if the three blocks compute different things.
    """
    try:
        return _Deepening(graphs, gap).run(grads)
    except KeyError:  # a block lacks this value
        raise UnlikeBlocksError from None


class _Deepening:
    """Fills one gap. Places: -1 is the block before, 0 the template, then its copies, `end` the block after."""

    def __init__(self, graphs: Graphs, gap: Gap) -> None:
        self.graphs, self.gap = graphs, gap
        self.end = gap.copies + 1  # the block after
        computed = {*graphs.forward, *graphs.backward}
        # Results of kernels that are written although nothing reads them.
        self.unread = [item for call in computed if call.how is How.CALL for item in call.users if item not in computed]
        self.values = sorted({*graphs.inputs, *computed, *self.unread}, key=attrgetter("index"))
        self.next_index = self.values[-1].index + 1
        self.offsets: dict[Value, int] = {}  # which of the three blocks a value belongs to: -1, 0 or 1
        self.pattern: dict[Value, Value] = {}  # the template's value for each
        self.at: dict[int, dict[Value, Value]] = {}  # by place: each template value's counterpart there
        self._pair()
        for place in range(1, self.end):
            self.at[place] = self._copied(place)

    def _pair(self) -> None:
        """Match each value of the template with its counterparts in the block before and after."""
        gap = self.gap
        found: dict[tuple[object, ...], dict[int, Value]] = {}
        counts: dict[tuple[object, ...], int] = {}
        for value in self.values:
            offset = gap.group_of(value.block)
            if offset is None or value.block is None:
                continue
            own = value.block - (gap.before, gap.template, gap.after)[offset + 1]
            key = (own, renamed(value.name, value.block, 0), value.op, value.shape, value.dtype)
            count = counts[offset, key] = counts.get((offset, key), 0) + 1
            found.setdefault((*key, count), {})[offset] = value
            self.offsets[value] = offset
        for place, offset in ((-1, -1), (0, 0), (self.end, 1)):
            self.at[place] = {twins[0]: twins[offset] for twins in found.values() if 0 in twins and offset in twins}
            self.pattern |= {value: first for first, value in self.at[place].items()}

    def _copied(self, place: int) -> dict[Value, Value]:
        """A copy of every template value, for a place; `_wire` sets the copies' inputs."""
        result: dict[Value, Value] = {}
        names: dict[str, str] = {}  # many values share a name
        for value in self.at[0]:
            assert value.block is not None
            block = value.block + place * self.gap.period
            name = names.get(value.name)
            if name is None:
                name = names[value.name] = renamed(value.name, value.block, block)
            result[value] = value.copied(name, block, self.next_index)
            self.next_index += 1
        return result

    def run(self, grads: Mapping[str, Value]) -> tuple[Graphs, dict[str, Value]]:
        graphs = self.graphs
        deep = Graphs(
            tuple(self._repeated(graphs.inputs)),
            tuple(self._repeated(graphs.forward)),
            tuple(self._repeated(graphs.backward)),
            tuple(self._repeated(graphs.saved)),
        )
        unread = self._repeated(sorted(self.unread))
        self._wire()
        _note_users([*deep.inputs, *dict.fromkeys(chain(deep.forward, deep.backward)), *unread])
        _check_order(deep.forward, deep.inputs)
        _check_order(deep.backward, (*deep.inputs, *deep.saved))
        return deep, self._grads(grads)

    def _repeated(self, values: Sequence[Value]) -> list[Value]:
        """The values in order, the template's at every place: in reverse where the block after comes first."""
        result: list[Value] = []
        rises = True
        for offset, run in groupby(values, self.offsets.get):
            if offset == 0:
                own = list(run)
                places = range(self.end) if rises else range(self.end)[::-1]
                result += [self.at[place][each] for place in places for each in own]
            else:
                result += run
                rises = offset == -1 if offset is not None else rises
        return result

    def _grads(self, grads: Mapping[str, Value]) -> dict[str, Value]:
        """Every parameter's gradient, in the order that backward produces them."""
        gap = self.gap
        found: dict[str, Value] = {}
        for is_pattern, names in groupby(grads, lambda name: gap.group_of(block_of(name)) == 0):
            if is_pattern:
                own = [(name, block_of(name) or 0) for name in names]
                found |= {
                    renamed(name, block, block + place * gap.period): self.at[place][self.pattern[grads[name]]]
                    for place in range(self.end)[::-1]
                    for name, block in own
                }
            else:
                found |= {name: grads[name] for name in names}
        return found

    def _wire(self) -> None:
        """Set every value's inputs to the counterparts at its own place or the neighbouring one."""
        at = self.at
        wired: list[tuple[Value, list[Value]]] = []
        for value in self.values:
            offset, reads = self.offsets.get(value), self._reads(value)
            for place in range(self.end) if offset == 0 else (self.end,) if offset == 1 else (-1,):
                inputs = [read if away is None else at[place + away][read] for read, away in reads]
                wired.append((at[place][value] if offset == 0 else value, inputs))
        for value, inputs in wired:
            value.inputs = tuple(inputs)

    def _reads(self, value: Value) -> list[tuple[Value, int | None]]:
        """A value's inputs: the template's value and its distance in places, or None if all places share it."""
        offset = self.offsets.get(value)
        result: list[tuple[Value, int | None]] = []
        for read in value.inputs:
            first = self.pattern.get(read)
            if first is None or (offset is None and first is not read):
                result.append((read, None))
            elif offset is None or abs(self.offsets[read] - offset) > 1:
                raise UnlikeBlocksError
            else:
                result.append((first, self.offsets[read] - offset))
        return result


def _note_users(values: Sequence[Value]) -> None:
    for value in values:
        value.users = []
    for value in values:
        for each in dict.fromkeys(value.inputs):
            each.users.append(value)


def _check_order(graph: Sequence[Value], given: Sequence[Value]) -> None:
    """Raises `UnlikeBlocksError` if a value reads something that is computed later."""
    known = set(given)
    for value in graph:
        for read in value.inputs:
            if read not in known and read.how is not How.TANGENT:
                raise UnlikeBlocksError
        known.add(value)
