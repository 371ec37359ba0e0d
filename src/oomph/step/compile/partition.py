"""What forward saves for backward: inductor's min-cut partitioner (torch/_functorch/partitioners.py, torch 2.13).

Saving a value costs its bytes, more the farther it is from backward, twice as much if nothing else would write it.
Some values are never recomputed: matrix products and kernels, results much smaller than their operands, values that
backward would have to write to memory. The minimum cut between these and backward is the set of saved values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter

import msgspec

from oomph.step.compile.graph import FUSIBLE, How, Value

_LONG_CHAIN = 100  # longer chains of fusible operations are not recomputed
_FAR = 100  # distance from backward beyond which values weigh no more
_INFINITE = 1 << 62
_NEVER = 10**9  # the distance of a value that backward does not need


class Graphs(msgspec.Struct, frozen=True):
    """The forward and the backward graph that inductor compiles."""

    inputs: tuple[Value, ...]  # parameters, buffers and the batch
    forward: tuple[Value, ...]  # in the order they were recorded
    backward: tuple[Value, ...]  # without the saved values
    saved: tuple[Value, ...]


def _is_fusible_alone(value: Value) -> bool:
    if value.how is How.CALL:
        return bool(value.facts.get("reduction") or value.facts.get("view"))
    return value.how in FUSIBLE


def _is_view(value: Value) -> bool:
    return value.how is How.VIEW or bool(value.how is How.CALL and value.facts.get("view"))


def partition(values: Sequence[Value], outputs: Iterable[Value], grads: Iterable[Value]) -> Graphs:
    """Both graphs: `outputs` are forward's results for the caller, `grads` backward's."""
    outputs, grads = list(outputs), list(grads)
    problem = _Partitioner(values, outputs, grads)
    saved = problem.saved()
    kept = set(saved)
    forward = _needed(values, [*outputs, *saved], set())
    late = _needed(values, grads, kept)
    backward = _in_engines_order(values, late, kept)
    inputs = [value for value in values if value.how is How.INPUT]
    return Graphs(tuple(inputs), tuple(forward), tuple(backward), tuple(saved))


def _needed(values: Sequence[Value], wanted: Iterable[Value], given: set[Value]) -> list[Value]:
    """The values computed to get from the given ones to the wanted ones, in order."""
    found: set[Value] = set()
    todo = list(wanted)
    while todo:
        value = todo.pop()
        if value not in found and value not in given:
            found.add(value)
            todo += value.inputs
    return [value for value in values if value in found and value.how not in (How.INPUT, How.TANGENT)]


def _in_engines_order(values: Sequence[Value], late: Sequence[Value], saved: set[Value]) -> list[Value]:
    """reordering_to_mimic_autograd_engine: what backward recomputes is recomputed just before it is needed."""
    wanted = set(late)
    start = next(v.index for v in values if v.how is not How.TANGENT and any(i.how is How.TANGENT for i in v.inputs))
    done: set[Value] = set()
    result: list[Value] = []
    for value in late:
        if value.index < start or value in done:
            continue
        found: set[Value] = set()
        todo = [value]
        while todo:
            each = todo.pop()
            if each in wanted and each not in done and each not in found and each not in saved:
                found.add(each)
                todo += each.inputs
        result += sorted(found, key=attrgetter("index"))
        done |= found
    return result


class _Partitioner:
    def __init__(self, values: Sequence[Value], outputs: Sequence[Value], grads: Sequence[Value]) -> None:
        self.values = values
        self.fusible = [_is_fusible_alone(value) for value in values]
        self.forward = self._forward(outputs)
        self.closure, self.late = self._backward(grads)
        self.order: dict[int, int] = {}
        for value in values:
            if self.forward[value.index]:
                self.order[value.index] = len(self.order)
        self.distance = self._distances()
        self.banned = [False] * len(values)

    def saved(self) -> list[Value]:
        """The values on the cut, in order."""
        flow = _Flow(2 * len(self.values) + 2)
        source, sink = 2 * len(self.values), 2 * len(self.values) + 1
        for value in self.values:
            index = value.index
            if self.closure[index]:
                continue
            if self.late[index]:
                flow.edge(2 * index + 1, sink, _INFINITE)
            if self._is_computed_again(value):
                flow.edge(2 * index, sink, _INFINITE)
                continue
            if value.how is How.INPUT or (self.forward[index] and self._is_expensive(value)):
                self._ban(value)
            flow.edge(2 * index, 2 * index + 1, self._weight(value))
            for user in value.users:
                flow.edge(2 * index + 1, sink if self.closure[user.index] else 2 * user.index, _INFINITE)
        self._ban_uses_far_apart()
        self._ban_long_chains()
        for index, banned in enumerate(self.banned):
            if banned:
                flow.edge(source, 2 * index, _INFINITE)
        near_sink = flow.cut(source, sink)
        return [v for v in self.values if not near_sink[2 * v.index] and near_sink[2 * v.index + 1]]

    def _is_computed_again(self, value: Value) -> bool:
        """Whether a value is in a checkpointed region, and is no later region's input."""
        region = value.checkpoint
        if region is None or not self.forward[value.index]:
            return False
        return not any(user.checkpoint is not None and user.checkpoint > region for user in value.users)

    def _forward(self, outputs: Sequence[Value]) -> list[bool]:
        """Whether forward computes each value, or gets it as an input."""
        found = [value.how is How.INPUT for value in self.values]
        todo = list(outputs)
        while todo:
            value = todo.pop()
            if not found[value.index] or value.how is How.INPUT:
                found[value.index] = True
                todo += value.inputs
        return found

    def _backward(self, grads: Sequence[Value]) -> tuple[list[bool], list[bool]]:
        """Whether each value depends on the loss's gradient, and whether backward has to produce it."""
        closure = [False] * len(self.values)
        for value in self.values:
            closure[value.index] = value.how is How.TANGENT or any(closure[i.index] for i in value.inputs)
        late = list(closure)
        for value in grads:
            late[value.index] = True
        return closure, late

    def _distances(self) -> list[int]:
        """The number of operations from each value to backward."""
        found = [0] * len(self.values)
        for value in reversed(self.values):
            if self.forward[value.index]:
                found[value.index] = min([_NEVER, *(found[user.index] + 1 for user in value.users)])
        return found

    def _fuses(self, first: Value, second: Value) -> bool:
        """Whether inductor may fuse the two."""
        return second.how is How.CAT or (self.fusible[first.index] and self.fusible[second.index])

    def _ban(self, value: Value) -> None:
        if not _is_view(value) and not self._is_computed_again(value):
            self.banned[value.index] = True

    def _is_expensive(self, value: Value) -> bool:
        """Whether recomputing a value costs more than saving it (should_ban_recomputation)."""
        if value.how in (How.ITEM, How.INPUT, How.TANGENT):
            return False
        if value.checkpoint is not None:  # the input of a later region
            return True
        if not self.fusible[value.index] or value.how is How.RANDOM:
            return True
        if not _is_view(value) and self._is_written_late(value):
            return True
        size = value.bytes if value.how is not How.CALL else sum(user.bytes for user in value.users)
        return 4 * size < sum([each.bytes for each in value.inputs])

    def _is_written_late(self, value: Value) -> bool:
        """is_materialized_backwards: whether an operation of backward that cannot be fused reads it."""
        todo = [value]
        while todo:
            each = todo.pop()
            for user in each.users:
                if not self.forward[user.index] and not self._fuses(each, user):
                    return True
                if _is_view(user):
                    todo.append(user)
        return False

    def _weight(self, value: Value) -> int:
        if value.how is How.CALL:
            return _INFINITE
        size = int(value.bytes * 1.1 ** max(min(self.distance[value.index], _FAR), 1))
        written = value.how is How.INPUT or not all(self._fuses(value, user) for user in value.users)
        return size if written else 2 * size

    def _ban_uses_far_apart(self) -> None:
        """Ban recomputing the later users of a value where an operation that cannot be fused lies between its users."""
        for used in self.values:
            if not self.forward[used.index]:
                continue
            users = [user for user in used.users if self.forward[user.index]]
            if len(users) < 2:
                continue
            first = self._first_unfusible(users, max(self.order[user.index] for user in users))
            for user in users:
                if self.order[user.index] > first and self._fuses(used, user):
                    self._ban(user)

    def _first_unfusible(self, users: Sequence[Value], last: int) -> int:
        order, seen = self.order, set[tuple[int, bool]]()
        heap = [(order[user.index], user, True) for user in users]
        heapify(heap)
        while heap:
            at, value, fuses = heappop(heap)
            if not fuses:
                return at
            for user in value.users:
                if self.forward[user.index] and order[user.index] <= last:
                    found = (user.index, self._fuses(value, user))
                    if found not in seen:
                        seen.add(found)
                        heappush(heap, (order[user.index], user, found[1]))
        return last

    def _ban_long_chains(self) -> None:
        visited: set[Value] = set()
        for start in self.values:
            if not self.forward[start.index]:
                continue
            begun = self.order[start.index]
            heap = [(begun, start)]
            while heap:
                at, value = heappop(heap)
                if value in visited:
                    continue
                visited.add(value)
                if at > begun + _LONG_CHAIN and not heap:
                    self._ban(value)
                    break
                for user in value.users:
                    if self.forward[user.index] and self._fuses(value, user) and not self.banned[user.index]:
                        heappush(heap, (self.order[user.index], user))


class _Flow:
    """A flow network, and its minimum cut by Dinic's algorithm."""

    def __init__(self, nodes: int) -> None:
        self.out: list[list[int]] = [[] for _ in range(nodes)]  # indices of edges; edge ^ 1 is the reverse of edge
        self.to: list[int] = []
        self.left: list[int] = []

    def edge(self, start: int, end: int, capacity: int) -> None:
        """Add an edge and its reverse."""
        self.out[start].append(len(self.to))
        self.out[end].append(len(self.to) + 1)
        self.to += (end, start)
        self.left += (capacity, 0)

    def cut(self, source: int, sink: int) -> list[bool]:
        """Whether each node is on the sink's side. Of equally cheap cuts, the one nearest the sink."""
        while (levels := self._levels(source, sink))[source] >= 0:
            self._augment(source, sink, levels)
        return [level >= 0 for level in levels]

    def _levels(self, source: int, sink: int) -> list[int]:
        """Each node's distance from the sink, in edges, up to the source's; -1 if no path is left."""
        levels = [-1] * len(self.out)
        levels[sink] = 0
        todo = deque([sink])
        while todo and levels[source] < 0:
            node = todo.popleft()
            for edge in self.out[node]:
                other = self.to[edge]
                if levels[other] < 0 and self.left[edge ^ 1] > 0:
                    levels[other] = levels[node] + 1
                    todo.append(other)
        return levels

    def _augment(self, source: int, sink: int, levels: list[int]) -> None:
        """Push flow along paths of falling levels until none is left."""
        out, to, left = self.out, self.to, self.left
        tried = [0] * len(out)
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                amount = min([left[edge] for edge in path])
                for edge in path:
                    left[edge] -= amount
                    left[edge ^ 1] += amount
                first = next(at for at, edge in enumerate(path) if not left[edge])
                node = to[path[first] ^ 1]
                del path[first:]
                continue
            edges = out[node]
            while tried[node] < len(edges):
                edge = edges[tried[node]]
                if left[edge] > 0 and levels[to[edge]] == levels[node] - 1:
                    path.append(edge)
                    node = to[edge]
                    break
                tried[node] += 1
            else:
                if node == source:
                    return
                levels[node] = len(out)  # a dead end
                node = to[path.pop() ^ 1]
