"""Which tasks inductor computes in one kernel (torch/_inductor/scheduler.py, choices.py, codegen/simd.py).

Two tasks may share a kernel if they access the same elements of a buffer in the same order and their loops have equal
extents. Pairs are tried in the order of the bytes they save, round after round until nothing more can be fused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter

from oomph.step.compile.lower import SMS
from oomph.step.compile.tasks import Access, LoopNest, TaskBuffer
from oomph.step.tensor.layout import ITEM_BYTES, numel

_MOST_TASKS = 64  # torch._inductor.config.max_fusion_size
_FAR = 64  # tasks this far apart are fused only if one feeds the other
_LEAST_BYTES = 10  # score_fusion_memory_threshold
_ROUNDS = 10
_PAIRS = 64  # max_fusion_buffer_group_pairwise_attempts
_OVERHEAD = 32  # a fusion is refused if it blocks the reuse of more than this many times the bytes it saves


_MIXED_NUMBERS, _MIXED_ROWS, _MIXED_COLUMNS = 5 << 20, 4096, 16384  # least elements, least rows, most columns
_MIXED_READS = 10  # buffers that a kernel mixing both reductions may read

_Score = tuple[int, int, int]


class FusedTasks:
    """Tasks that run as one kernel. A set of tasks is an integer with a bit for each."""

    __slots__ = (
        "ancestors", "buffers", "extents", "first", "is_extern", "last", "mixed", "names", "numel", "reads",
        "reduction", "shape", "size", "spare", "tasks", "touched", "writes",
    )  # fmt: skip

    def __init__(self, task: LoopNest, place: int) -> None:
        self.tasks, self.names, self.ancestors = [task], 1 << task.index, task.ancestors
        self.first = self.last = place
        self.is_extern = task.is_extern
        # The task whose loops a reduction kernel runs, and its loop extents before any are merged.
        self.reduction = task if task.is_reduction else None
        self.numel, self.shape = task.numel, task.shape
        self.size = task.whole[0] * task.whole[1]  # iterations of the largest loops, those of `shape`
        self.extents = {task.numel, task.numel * task.reduced, self.size} if task.is_reduction else {task.numel}
        self.reads: dict[TaskBuffer, set[Access]] = task.reads
        self.writes: dict[TaskBuffer, Access] = dict(task.writes)
        self.mixed: tuple[FusedTasks, FusedTasks] | None = (
            None  # the tasks that reduce along rows, and those along columns
        )
        self.buffers = {**self.reads, **self.writes}.keys()
        self.touched = {(source, access) for source, found in self.reads.items() for access in found if access}
        self.touched.update([(source, access) for source, access in task.writes if access])
        self.spare = _spare(self.reads)  # dtype and bytes of buffers that only this kernel reads: reusable memory

    def joined(self, other: FusedTasks) -> FusedTasks:
        """The two groups as one kernel."""
        both = FusedTasks.__new__(FusedTasks)
        both.is_extern, both.mixed = False, None
        both.tasks, both.names = [*self.tasks, *other.tasks], self.names | other.names
        both.ancestors = (self.ancestors | other.ancestors) & ~both.names
        both.first, both.last = min(self.first, other.first), max(self.last, other.last)
        largest = other if other.size > self.size else self
        both.shape, both.size, both.numel = largest.shape, largest.size, max(self.numel, other.numel)
        both.reduction = self.reduction or other.reduction
        both.extents = self.extents if self.reduction else other.extents if other.reduction else {both.numel}
        both.reads = dict(self.reads)
        for source, accesses in other.reads.items():
            both.reads[source] = both.reads[source] | accesses if source in both.reads else accesses
        both.writes = {**self.writes, **other.writes}
        both.buffers = {**both.reads, **both.writes}.keys()
        both.touched, both.spare = self.touched | other.touched, _spare(both.reads)
        if self.mixed is not None:
            rows, columns = self.mixed
            both.mixed = (
                (rows.joined(other), columns) if _joins_mixed(rows, other, columns) else (rows, columns.joined(other))
            )
        elif mixes(self, other):
            both.mixed = (self, other) if self.tasks[0].rows_first else (other, self)
            _share_workspace(both.mixed[1])
        return both


def _spare(reads: Iterable[TaskBuffer]) -> set[tuple[str, int]]:
    return {(source.dtype, source.bytes) for source in reads if source.task is not None and len(source.users) == 1}


def fused(tasks: Sequence[LoopNest], mixes: bool) -> list[FusedTasks]:
    """The kernels in a valid order. `mixes`: one kernel may reduce along both rows and columns."""
    return _Fusion(tasks, mixes).run()


class _Fusion:
    def __init__(self, tasks: Sequence[LoopNest], mixes: bool) -> None:
        self.mixes = mixes
        self.reorders = False
        self.scores: dict[tuple[FusedTasks, FusedTasks], _Score | None] = {}  # by pair, without regard to other groups
        groups: list[FusedTasks] = []
        self.group_of: dict[LoopNest, FusedTasks] = {}
        for task in tasks:
            mask = 0
            for source in task.reads:
                if source.task is not None and source.task is not task:
                    mask |= source.task.ancestors | 1 << source.task.index
            task.ancestors = mask
            group = self.group_of[task] = FusedTasks(task, len(groups))
            groups.append(group)
        self.groups = groups

    def run(self) -> list[FusedTasks]:
        for _ in range(_ROUNDS):
            if not self._round():
                break
        self.reorders = True  # one more round, in which loops may be reordered
        self.scores.clear()
        self._round()
        return self.groups

    def _round(self) -> bool:
        """Fuse what can be fused. Returns whether anything was."""
        alive = dict.fromkeys(self.groups)
        joined = {group: None for group in alive if len(group.tasks) > 1}
        for first, second in self._pairs():
            first, second = self.group_of[first.tasks[0]], self.group_of[second.tasks[0]]
            if first is second or self._score(first, second) is None or _makes_a_circle(first, second, joined):
                continue
            both = first.joined(second)
            del alive[first], alive[second]
            joined.pop(first, None)
            joined.pop(second, None)
            alive[both] = joined[both] = None
            for task in both.tasks:
                self.group_of[task] = both
        if len(alive) == len(self.groups):
            return False
        self.groups = self._sorted(sorted(alive, key=lambda group: group.first))
        return True

    def _pairs(self) -> list[tuple[FusedTasks, FusedTasks]]:
        """Every pair that may be fused, the best first."""
        sharing: dict[TaskBuffer, list[FusedTasks]] = {}
        for group in self.groups:
            if not group.is_extern:
                for source in group.buffers:
                    sharing.setdefault(source, []).append(group)
        found: dict[tuple[FusedTasks, FusedTasks], _Score | None] = {}
        for each in sharing.values():
            for place, first in enumerate(each[:-1]):
                for second in each[place + 1 : place + 1 + _PAIRS]:
                    if first.mixed is None and first.extents.isdisjoint(second.extents):
                        continue  # the loop extents differ
                    pair = (first, second)
                    if pair not in found:
                        found[pair] = self._score(first, second)
        possible = [(score, pair) for pair, score in found.items() if score is not None]
        return [pair for _, pair in sorted(possible, key=itemgetter(0), reverse=True)]

    def _score(self, first: FusedTasks, second: FusedTasks) -> _Score | None:
        """What fusing two kernels saves; None if they can never be fused."""
        pair = (first, second)
        if pair in self.scores and self.scores[pair] is None:
            return None
        if first.mixed is None and first.names & second.ancestors and not self._feeds(first, second):
            self.scores[pair] = None  # the kernel between them will stay there
        elif pair not in self.scores:
            self.scores[pair] = self._score_alone(first, second)
        return self.scores[pair]

    def _score_alone(self, first: FusedTasks, second: FusedTasks) -> _Score | None:
        """The same score without regard to other groups."""
        if second.names & first.ancestors or second.mixed is not None:
            return None
        saved = shared_bytes(first, second)
        if first.mixed is not None:
            rows, columns = first.mixed
            read = {**first.reads, **second.reads}
            if len(read) > _MIXED_READS or not _joins_mixed(rows, second, columns):
                return None
        elif not _loops_fit(first, second):
            if not self.mixes or not mixes(first, second):
                return None
        elif not self._pays(first, second, saved):
            return None
        if first.mixed is None and mixes(first, second):
            assert first.reduction is not None
            saved = first.reduction.whole[0] * first.reduction.whole[1]
        alike = (first.reduction is None) == (second.reduction is None)
        return int(alike and saved > 0), saved, -distance(first, second)

    def _pays(self, first: FusedTasks, second: FusedTasks, saved: int) -> bool:
        """Whether two kernels with matching loops are worth fusing."""
        if not saved or len(first.tasks) + len(second.tasks) > _MOST_TASKS:
            return False
        if not self.reorders and not _same_loops(first, second):
            return False
        if not first.names & second.ancestors and (saved < _LEAST_BYTES or distance(first, second) > _FAR):
            return False
        return not _may_raise_peak(first, second, saved)

    def _feeds(self, first: FusedTasks, second: FusedTasks) -> bool:
        """Whether the second reads the first's results exactly as they were written, with no kernel between the two."""
        for source, accesses in second.reads.items():
            if source in first.writes:
                if accesses != {first.writes[source]} or None in accesses:
                    return False
            elif source.task is not None:
                between = self.group_of[source.task]
                if between is not first and between is not second and first.names & between.ancestors:
                    return False
        return True

    def _sorted(self, groups: list[FusedTasks]) -> list[FusedTasks]:
        """The groups in the given order, but each after the groups it reads from."""
        done: dict[FusedTasks, None] = {}
        stack = groups[::-1]
        while stack:
            group = stack[-1]
            makers = [source.task for source in group.reads if source.task is not None]
            missing = [task for task in makers if self.group_of[task] is not group and self.group_of[task] not in done]
            if missing:  # topological_sort_schedule visits them by buffer name
                stack += [self.group_of[task] for task in sorted(missing, key=lambda task: -task.index)]
            else:
                done[group] = None
                stack.pop()
        return list(done)


def _makes_a_circle(first: FusedTasks, second: FusedTasks, joined: Iterable[FusedTasks]) -> bool:
    """Whether fusing two kernels would close a cycle through kernels that were fused before."""
    names = first.names | second.names
    seen = (first.ancestors | second.ancestors) & ~names
    # Only kernels that overlap [start, end] can lie on such a path.
    start, end = min(first.first, second.first), max(first.last, second.last)
    near = [g for g in joined if g.last > start and g.first < end and g is not first and g is not second]
    grown = True
    while grown:
        grown = False
        for group in near:
            if group.names & seen and (group.names & ~seen or group.ancestors & ~seen):
                if group.ancestors & names:
                    return True
                seen |= group.names | group.ancestors
                grown = True
    return False


def distance(first: FusedTasks, second: FusedTasks) -> int:
    """The distance between two groups, in tasks."""
    return max(abs(first.first - second.last), abs(second.first - first.last))


def mixes_rows(rows: int, columns: int) -> bool:
    """Whether a matrix is large and tall enough for one kernel to reduce both its rows and its columns."""
    tall = rows >= max(2 * columns, _MIXED_ROWS) and columns <= _MIXED_COLUMNS
    return tall and rows * columns >= _MIXED_NUMBERS


def mixes(first: FusedTasks, second: FusedTasks) -> bool:
    """Whether one reduces along rows and the other along columns of the same large matrix (MixOrderReduction)."""
    one, other = first.reduction, second.reduction
    if one is None or other is None or one.whole != other.whole[::-1] or one.rows_first == other.rows_first:
        return False
    if first.names & second.ancestors or second.names & first.ancestors:
        return False
    if not mixes_rows(*(one if one.rows_first else other).whole):
        return False
    return any(
        _reads_all(source, first) and _reads_all(source, second) for source in first.reads if source in second.reads
    )


def _share_workspace(columns: FusedTasks) -> None:
    """Size a mixed kernel's workspace: a row of partial column sums for every few rows."""
    for task in columns.tasks:
        count, rows = task.whole
        few = min(max(1 << max(rows // (8 * SMS), 1).bit_length() - 1, 16), 128)
        for source, _ in task.writes:
            source.bytes = 4 * count * -(-rows // few)


def _reads_all(source: TaskBuffer, group: FusedTasks) -> bool:
    """Whether a group's loops read a different element of the buffer in each iteration."""
    reducing = group.reduction
    assert reducing is not None
    return any(a is not None and numel(a[0]) == reducing.whole[0] * reducing.whole[1] for a in group.reads[source])


def _joins_mixed(rows: FusedTasks, other: FusedTasks, columns: FusedTasks) -> bool:
    """Whether a task can join the row part of a mixed kernel: its loops must be the same."""
    if other.reduction is not None or not shared_bytes(rows, other) or not _loops_fit(rows, other):
        return False
    if any(task.shape not in (rows.tasks[0].shape, (*rows.tasks[0].shape[:-1], 1)) for task in other.tasks):
        return False
    related = other.ancestors & columns.names or columns.ancestors & other.names
    return not related and all(
        a == rows.writes[s] for s, found in other.reads.items() if s in rows.writes for a in found
    )


def shared_bytes(first: FusedTasks, second: FusedTasks) -> int:
    """Bytes that both access in the same way."""
    return sum([numel(access[0]) * ITEM_BYTES[source.dtype] for source, access in first.touched & second.touched])


def _same_loops(first: FusedTasks, second: FusedTasks) -> bool:
    """Whether both loop over the same shape, or one over the rows of the other."""
    one, other = first.shape, second.shape
    return one == other or (one[:-1] == other[:-1] and 1 in (one[-1:] + other[-1:]))


def _loops_fit(first: FusedTasks, second: FusedTasks) -> bool:
    one, other = first.reduction, second.reduction
    if one is not None and other is not None:
        return one.numel == other.numel and one.reduced == other.reduced
    if one is None and other is None:
        return first.numel == second.numel
    reducing, plain = (one, second) if one is not None else (other, first)
    assert reducing is not None
    return all(task.numel in (reducing.numel * reducing.reduced, reducing.numel) for task in plain.tasks)


def _may_raise_peak(first: FusedTasks, second: FusedTasks, saved: int) -> bool:
    """Whether the memory that fusing keeps from being reused outweighs the bytes it saves."""
    both = first.spare & second.spare
    return sum([size // ITEM_BYTES[dtype] for dtype, size in both]) > _OVERHEAD * saved
