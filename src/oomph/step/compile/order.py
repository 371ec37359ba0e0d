"""The order of kernels: inductor takes the candidate with the lowest estimated peak (memory.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import accumulate

from oomph.step.compile.fuse import FusedTasks
from oomph.step.compile.graph import How
from oomph.step.compile.tasks import TaskBuffer


class _Scheduled:
    """One item to be ordered: a kernel, or one result unpacked from the tuple that a kernel returns."""

    __slots__ = ("before", "group", "index", "made", "place", "reads", "roots", "size", "writes")

    def __init__(
        self, index: int, group: FusedTasks | None, reads: Iterable[TaskBuffer], writes: Iterable[TaskBuffer]
    ) -> None:
        self.index, self.group = index, group
        self.place = index  # in the candidate order
        self.reads, self.writes = tuple(reads), tuple(writes)
        self.made = [source for source in self.writes if source.root is source]
        self.size = sum([source.bytes for source in self.made])  # bytes it allocates
        self.roots: list[TaskBuffer] = []  # the buffers whose memory it reads
        self.before: list[_Scheduled] = []


class _Lifetimes:
    """Live ranges of buffers, by which the candidates are judged."""

    def __init__(self, groups: Sequence[FusedTasks], inputs: Iterable[TaskBuffer]) -> None:
        self.units: list[_Scheduled] = []
        self.following: dict[_Scheduled, list[_Scheduled]] = {}
        for group in groups:
            self._add(group)
        self.inputs = [source for source in inputs if source.freeable and source.users]
        self.maker = {source: unit for unit in self.units for source in unit.writes}
        self.readers: dict[TaskBuffer, list[_Scheduled]] = {source.root: [] for source in self.maker}
        for unit in self.units:
            for source in unit.reads:
                self._read(unit, source)
        made = [(source, self.readers[source] or [unit]) for unit in self.units for source in unit.made]
        lives = [*((source, self.readers[source]) for source in self.inputs), *made]
        # Bytes, and the units that read them, of which the last frees them.
        self.ends = [(source.bytes, units) for source, units in lives if not source.is_output]

    def _add(self, group: FusedTasks) -> None:
        """Add a kernel; one with several results allocates them all, and each gets a unit of its own."""
        if group.tasks[0].value.how is not How.CALL:
            self._put(group, group.reads, group.writes)
            return
        kernel = self._put(group, group.reads, ())
        for source in group.writes:
            item = self._put(None, (), (source,))
            kernel.size, item.size = kernel.size + item.size, 0
            item.before.append(kernel)
            self.following[kernel].append(item)

    def _put(self, group: FusedTasks | None, reads: Iterable[TaskBuffer], writes: Iterable[TaskBuffer]) -> _Scheduled:
        unit = _Scheduled(len(self.units), group, reads, writes)
        self.units.append(unit)
        self.following[unit] = []
        return unit

    def _read(self, unit: _Scheduled, source: TaskBuffer) -> None:
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

    def live(self, order: Sequence[_Scheduled]) -> list[int]:
        """Bytes alive while each kernel runs, by inductor's estimate_peak_memory."""
        for place, unit in enumerate(order):
            unit.place = place
        change = [*(unit.size for unit in order), 0]
        change[0] += sum([source.bytes for source in self.inputs])
        for size, units in self.ends:
            change[max([unit.place for unit in units]) + 1] -= size
        return list(accumulate(change[:-1]))


def ordered(groups: Sequence[FusedTasks], inputs: Iterable[TaskBuffer]) -> tuple[list[FusedTasks], list[int]]:
    """The kernels in the order they run, and the bytes that inductor believes are alive during each."""
    facts = _Lifetimes(groups, inputs)
    candidates = [facts.units, _least_peak_first(facts), _breadth_first(facts), _depth_first(facts)]
    judged = [(facts.live(candidate), candidate) for candidate in candidates]
    lives, best = min(judged, key=lambda each: max(each[0], default=0))
    found = [(unit.group, live) for unit, live in zip(best, lives, strict=True) if unit.group is not None]
    return [group for group, _ in found], [live for _, live in found]


def _least_peak_first(facts: _Lifetimes) -> list[_Scheduled]:
    """topological_sort_lpmf: first kernels that do not raise the peak, of them the one that frees most."""
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
    result: list[_Scheduled] = []
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


def _breadth_first(facts: _Lifetimes) -> list[_Scheduled]:
    """topological_sort_bfs: first the kernel whose inputs are oldest."""
    waits = {unit: len(unit.before) for unit in facts.units}
    at: dict[_Scheduled, int] = {}
    heap: list[tuple[list[int], int, _Scheduled]] = []
    for unit in facts.units:
        if not waits[unit]:
            heappush(heap, ([], unit.index, unit))
    result: list[_Scheduled] = []
    while heap:
        chosen = heappop(heap)[2]
        at[chosen] = len(result)
        result.append(chosen)
        for unit in facts.following[chosen]:
            waits[unit] -= 1
            if not waits[unit]:
                heappush(heap, (sorted([at[each] for each in unit.before]), unit.index, unit))
    return result


def _depth_first(facts: _Lifetimes) -> list[_Scheduled]:
    """topological_sort_dfs: the smallest first, each after its inputs."""
    weight = {g: (g.size + sum([s.bytes for s in g.roots]), g.index) for g in facts.units}
    done: dict[_Scheduled, None] = {}
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
