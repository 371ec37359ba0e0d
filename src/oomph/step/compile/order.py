"""The order of kernels: of a few candidates inductor takes the one with the lowest estimated peak (memory.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import accumulate

from oomph.step.compile.fuse import Group
from oomph.step.compile.graph import How
from oomph.step.compile.tasks import TaskBuffer


class _Unit:
    """What is put in order: a kernel, or one result that is taken from the tuple that a kernel returns."""

    __slots__ = ("before", "group", "index", "made", "place", "reads", "roots", "size", "writes")

    def __init__(
        self, index: int, group: Group | None, reads: Iterable[TaskBuffer], writes: Iterable[TaskBuffer]
    ) -> None:
        self.index, self.group = index, group
        self.place = index  # in the order that is looked at
        self.reads, self.writes = tuple(reads), tuple(writes)
        self.made = [source for source in self.writes if source.root is source]
        self.size = sum([source.bytes for source in self.made])  # bytes that it allocates
        self.roots: list[TaskBuffer] = []  # whose memory it reads
        self.before: list[_Unit] = []


class _Facts:
    """What the candidates are judged by."""

    def __init__(self, groups: Sequence[Group], inputs: Iterable[TaskBuffer]) -> None:
        self.units: list[_Unit] = []
        self.following: dict[_Unit, list[_Unit]] = {}
        for group in groups:
            self._add(group)
        self.inputs = [source for source in inputs if source.freeable and source.users]
        self.maker = {source: unit for unit in self.units for source in unit.writes}
        self.readers: dict[TaskBuffer, list[_Unit]] = {source.root: [] for source in self.maker}
        for unit in self.units:
            for source in unit.reads:
                self._read(unit, source)
        made = [(source, self.readers[source] or [unit]) for unit in self.units for source in unit.made]
        lives = [*((source, self.readers[source]) for source in self.inputs), *made]
        # Bytes that are freed, and the units that read them: the last one frees.
        self.ends = [(source.bytes, units) for source, units in lives if not source.is_output]

    def _add(self, group: Group) -> None:
        """A kernel that returns several results allocates them all; each lives as if it were made by its own unit."""
        if group.tasks[0].value.how is not How.CALL:
            self._put(group, group.reads, group.writes)
            return
        kernel = self._put(group, group.reads, ())
        for source in group.writes:
            item = self._put(None, (), (source,))
            kernel.size, item.size = kernel.size + item.size, 0
            item.before.append(kernel)
            self.following[kernel].append(item)

    def _put(self, group: Group | None, reads: Iterable[TaskBuffer], writes: Iterable[TaskBuffer]) -> _Unit:
        unit = _Unit(len(self.units), group, reads, writes)
        self.units.append(unit)
        self.following[unit] = []
        return unit

    def _read(self, unit: _Unit, source: TaskBuffer) -> None:
        maker, root = self.maker.get(source), source.root
        if maker is not None and maker is not unit and maker not in unit.before:
            self.following[maker].append(unit)
            unit.before.append(maker)
        if source in unit.writes or (root.task is None and not root.freeable) or self.maker.get(root) is unit:
            return
        readers = self.readers.setdefault(root, [])
        if not readers or readers[-1] is not unit:
            readers.append(unit)
            unit.roots.append(root)

    def live(self, order: Sequence[_Unit]) -> list[int]:
        """Bytes alive while each kernel runs, as inductor's estimate_peak_memory has them."""
        for place, unit in enumerate(order):
            unit.place = place
        change = [*(unit.size for unit in order), 0]
        change[0] += sum([source.bytes for source in self.inputs])
        for size, units in self.ends:
            change[max([unit.place for unit in units]) + 1] -= size
        return list(accumulate(change[:-1]))


def ordered(groups: Sequence[Group], inputs: Iterable[TaskBuffer]) -> tuple[list[Group], list[int]]:
    """The kernels in the order they run, and the bytes that inductor takes to be alive while each does."""
    facts = _Facts(groups, inputs)
    candidates = [facts.units, _least_peak_first(facts), _breadth_first(facts), _depth_first(facts)]
    judged = [(facts.live(candidate), candidate) for candidate in candidates]
    lives, best = min(judged, key=lambda each: max(each[0], default=0))
    found = [(unit.group, live) for unit, live in zip(best, lives, strict=True) if unit.group is not None]
    return [group for group, _ in found], [live for _, live in found]


def _least_peak_first(facts: _Facts) -> list[_Unit]:
    """topological_sort_lpmf: what does not raise the peak and lets most go."""
    waits = {unit: len(unit.before) for unit in facts.units}
    uses = {source: len(readers) + source.is_output for source, readers in facts.readers.items()}
    frees = dict.fromkeys(facts.units, 0)
    for unit in facts.units:
        frees[unit] += sum([source.bytes for source in unit.roots if uses[source] == 1])
        frees[unit] += sum([source.bytes for source in unit.made if uses[source] == 0])
    live = sum([source.bytes for source in facts.inputs])
    kept = sum([source.bytes for source in facts.readers if source.is_output and (source.task or source.freeable)])
    most = max(live, kept)
    ready = [unit for unit in facts.units if not waits[unit]]
    result: list[_Unit] = []
    while ready:
        gap = most - live
        chosen = min(
            ready,
            key=lambda g: (g.size if g.size > gap else 0, g.size - frees[g], g.index),
        )
        ready.remove(chosen)
        result.append(chosen)
        live += chosen.size
        most = max(most, live)
        live -= frees[chosen]
        for unit in facts.following[chosen]:
            waits[unit] -= 1
            if not waits[unit]:
                ready.append(unit)
        for source in chosen.roots:
            uses[source] -= 1
            if uses[source] == 1:
                for unit in facts.readers[source]:
                    frees[unit] += source.bytes
    return result


def _breadth_first(facts: _Facts) -> list[_Unit]:
    """topological_sort_bfs: first what reads the oldest."""
    waits = {unit: len(unit.before) for unit in facts.units}
    at: dict[_Unit, int] = {}
    heap: list[tuple[list[int], int, _Unit]] = []
    for unit in facts.units:
        if not waits[unit]:
            heappush(heap, ([], unit.index, unit))
    result: list[_Unit] = []
    while heap:
        chosen = heappop(heap)[2]
        at[chosen] = len(result)
        result.append(chosen)
        for unit in facts.following[chosen]:
            waits[unit] -= 1
            if not waits[unit]:
                heappush(heap, (sorted([at[each] for each in unit.before]), unit.index, unit))
    return result


def _depth_first(facts: _Facts) -> list[_Unit]:
    """topological_sort_dfs: the smallest first, each after what it reads."""
    weight = {g: (g.size + sum([s.bytes for s in g.roots]), g.index) for g in facts.units}
    done: dict[_Unit, None] = {}
    for start in sorted(facts.units, key=weight.__getitem__):
        stack = [start]
        while stack:
            unit = stack[-1]
            if unit in done:
                stack.pop()
                continue
            missing = [each for each in unit.before if each not in done]
            if missing:
                stack += sorted(missing, key=weight.__getitem__, reverse=True)
            else:
                done[unit] = None
                stack.pop()
    return list(done)
