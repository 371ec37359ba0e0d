"""The order of kernels: of a few candidates inductor takes the one with the lowest estimated peak (memory.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from oomph.step.compile.fuse import Group
from oomph.step.compile.graph import How
from oomph.step.compile.lower import Source


class _Facts:
    """What the candidates are judged by."""

    def __init__(self, groups: Sequence[Group], inputs: Iterable[Source]) -> None:
        self.groups = list(groups)
        self.place = {group: index for index, group in enumerate(groups)}
        self.inputs = [source for source in inputs if source.freeable and source.users]
        of = {task: group for group in groups for task in group.tasks}
        self.readers: dict[Source, list[Group]] = {}
        self.before: dict[Group, list[Group]] = {group: [] for group in groups}
        self.following: dict[Group, list[Group]] = {group: [] for group in groups}
        self.reads: dict[Group, list[Source]] = {group: [] for group in groups}
        self.made = {group: [s for s in group.writes if s.root is s] for group in groups}
        self.size = {group: sum([s.bytes for s in made]) for group, made in self.made.items()}
        for group in groups:
            for source in group.writes:
                self.readers.setdefault(source.root, [])
        for group in groups:
            own = set(group.writes)
            for source in group.reads:
                if source.task is not None and of[source.task] is not group:
                    maker = of[source.task]
                    if group not in self.following[maker]:
                        self.following[maker].append(group)
                        self.before[group].append(maker)
                root = source.root
                if source in own or (root.task is None and not root.freeable):
                    continue
                if root.task is not None and of[root.task] is group:
                    continue
                readers = self.readers.setdefault(root, [])
                if not readers or readers[-1] is not group:
                    readers.append(group)
                    self.reads[group].append(root)

    def peak(self, order: Sequence[Group]) -> int:
        """estimate_peak_memory."""
        return max(self.live(order), default=0)

    def live(self, order: Sequence[Group]) -> list[int]:
        """Bytes alive while each kernel runs, as inductor estimates them."""
        place = {group: index for index, group in enumerate(order)}
        change = [0] * (len(order) + 1)
        for source in self.inputs:
            change[0] += source.bytes
            if not source.is_output:
                change[max([place[group] for group in self.readers[source]]) + 1] -= source.bytes
        for group in order:
            for source in self.made[group]:
                change[place[group]] += source.bytes
                if not source.is_output:
                    change[max([place[group], *(place[each] for each in self.readers[source])]) + 1] -= source.bytes
        now, found = 0, []
        for each in change[:-1]:
            now += each
            found.append(now)
        return found


def ordered(groups: Sequence[Group], inputs: Iterable[Source]) -> tuple[list[Group], list[int]]:
    """The kernels in the order they run, and the bytes that inductor takes to be alive while each does."""
    facts = _Facts(groups, inputs)
    candidates = [list(groups), _least_peak_first(facts), _breadth_first(facts), _depth_first(facts)]
    best = min(candidates, key=facts.peak)
    return best, facts.live(best)


def _least_peak_first(facts: _Facts) -> list[Group]:
    """topological_sort_lpmf: what does not raise the peak and lets most go."""
    waits = {group: len(facts.before[group]) for group in facts.groups}
    uses = {source: len(readers) + source.is_output for source, readers in facts.readers.items()}
    frees = dict.fromkeys(facts.groups, 0)
    for group in facts.groups:
        frees[group] += sum([source.bytes for source in facts.reads[group] if uses[source] == 1])
        frees[group] += sum([source.bytes for source in facts.made[group] if uses[source] == 0])
    live = sum([source.bytes for source in facts.inputs])
    kept = sum([source.bytes for source in facts.readers if source.is_output and (source.task or source.freeable)])
    most = max(live, kept)
    ready = [group for group in facts.groups if not waits[group]]
    result: list[Group] = []
    while ready:
        gap = most - live
        chosen = min(
            ready,
            key=lambda g: (facts.size[g] if facts.size[g] > gap else 0, facts.size[g] - frees[g], facts.place[g]),
        )
        ready.remove(chosen)
        result.append(chosen)
        live += facts.size[chosen]
        most = max(most, live)
        live -= frees[chosen]
        for group in facts.following[chosen]:
            waits[group] -= 1
            if not waits[group]:
                ready.append(group)
        for source in facts.reads[chosen]:
            uses[source] -= 1
            if uses[source] == 1:
                for group in facts.readers[source]:
                    frees[group] += source.bytes
    return result


def _breadth_first(facts: _Facts) -> list[Group]:
    """topological_sort_bfs: first what reads the oldest."""
    waits = {group: len(facts.before[group]) for group in facts.groups}
    at: dict[Group, int] = {}
    heap: list[tuple[list[int], int, Group]] = []
    for group in facts.groups:
        if not waits[group]:
            heappush(heap, ([], facts.place[group], group))
    result: list[Group] = []
    while heap:
        chosen = heappop(heap)[2]
        at[chosen] = len(result)
        result.append(chosen)
        for group in facts.following[chosen]:
            waits[group] -= 1
            if not waits[group]:
                heappush(heap, (sorted([at[each] for each in facts.before[group]]), facts.place[group], group))
    return result


def _depth_first(facts: _Facts) -> list[Group]:
    """topological_sort_dfs: the smallest first, each after what it reads.

    Of a kernel with several results each is a node of its own there, that takes nothing.
    """
    weight = {
        g: (0 if _has_results(g) else facts.size[g] + sum([s.bytes for s in facts.reads[g]]), facts.place[g])
        for g in facts.groups
    }
    done: dict[Group, None] = {}
    for start in sorted(facts.groups, key=weight.__getitem__):
        stack = [start]
        while stack:
            group = stack[-1]
            if group in done:
                stack.pop()
                continue
            missing = [each for each in facts.before[group] if each not in done]
            if missing:
                stack += sorted(missing, key=weight.__getitem__, reverse=True)
            else:
                done[group] = None
                stack.pop()
    return list(done)


def _has_results(group: Group) -> bool:
    return group.is_extern and group.tasks[0].value.how is How.CALL
