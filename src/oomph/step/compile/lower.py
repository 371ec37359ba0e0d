"""A graph as buffers and the tasks that write them: which results inductor writes to memory at all.

An elementwise result is computed where it is read, again for every reader, until there is a reason to write it: a
matrix product or a kernel reads it, it is returned, several readers would have to read more than four buffers for it,
or it has become too long (torch/_inductor/graph.py `run_node`, ir.py `StorageBox`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache

from oomph.step.compile.graph import How, Value
from oomph.step.compile.tasks import (
    LazyResult,
    LoopNest,
    Read,
    TaskBuffer,
    View,
    broadcast,
    merged,
    placed,
    through,
    without_unit_strides,
)
from oomph.step.ops import Kind
from oomph.step.tensor.layout import ITEM_BYTES, Shape, numel

_READS_ON_REUSE = 4  # torch._inductor.config.realize_reads_threshold
_READS = 8  # realize_acc_reads_threshold
_OPERATIONS = 30  # realize_opcount_threshold
_UNROLLED = 8  # unroll_reductions_threshold
_OPERANDS = dict.fromkeys(("add", "sub", "mul", "div", "eq", "ne", "le", "lt", "ge", "gt", "1"), 2) | {"where": 3}
_COPIES = ("clone", "contiguous", "emb")  # copies without arithmetic
_HEAVY = ("exp", "log", "sigmoid", "tanh")  # on a CPU, results of these are written out if several operations read them

_PADDED_FROM = 1024  # torch._inductor.config.padding_stride_threshold
_ALIGNED_BYTES = 128  # padding_alignment_bytes


@lru_cache(maxsize=1024)  # a program repeats a few layouts in every block
def padded_bytes(shape: Shape, strides: Shape, dtype: str) -> int:
    """Bytes of a buffer on a GPU, where long rows start at multiples of 128 bytes (ir.py `pad_strides`)."""
    item = ITEM_BYTES[dtype]
    align = _ALIGNED_BYTES // item
    if not any(stride > _PADDED_FROM and stride % align for stride in strides):
        return numel(shape) * item
    step = last = 1
    for _, size in sorted([(stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1]):
        if step > _PADDED_FROM and step % align:
            step += -step % align
        last += (size - 1) * step
        step *= size
    return last * item


class Lowering:
    """Turns a graph into tasks."""

    def __init__(
        self,
        graph: Sequence[Value],
        given: Mapping[Value, TaskBuffer],
        outputs: Iterable[Value],
        cuda: bool,
        visible: Iterable[Value] = (),  # values that the program's caller sees: their layout is not padded
        batch_size: int = 1,
    ) -> None:
        self.graph, self.cuda, self.batch_size = graph, cuda, batch_size
        self.visible = {base_of(value) for value in visible}
        self.inside = set(graph)
        self.outputs = set(outputs)
        self.tasks: list[LoopNest] = []
        self.views: dict[Value, View] = {}
        for value, source in given.items():
            lazy = LazyResult(value, value.shape, value.strides)
            lazy.source = source
            self.views[value] = View(lazy, value.shape, value.strides)
        self.items: dict[Value, dict[int, TaskBuffer]] = {}

    def run(self) -> dict[Value, TaskBuffer]:
        """Lower every value into `tasks`. Returns the buffer behind each output."""
        for value in self.graph:
            self._lower(value)
            if value.how is not How.CALL:
                self._maybe_write(value)
        found = {value: self._write(self.views[value].lazy) for value in self.outputs if value in self.views}
        for source in found.values():
            source.is_output = source.root.is_output = True
        return found

    # --- values -------------------------------------------------------------------------------------------------

    def _lower(self, value: Value) -> None:
        match value.how:  # the most frequent kind first
            case How.POINTWISE:
                self._pointwise(value)
            case How.VIEW:
                self._view(value)
            case How.ITEM:
                self._item(value)
            case How.CALL:
                if not value.facts.get("view") and not value.facts.get("reduction"):
                    self._kernel(value)
            case How.PRODUCT:
                task = self._extern(value)
                self.views[value] = self._result(task, value)
            case How.REDUCTION:
                self.views[value] = self._reduction(value)
            case How.SCATTER:
                self._scatter(value)
            case _:
                self._pointwise(value)

    def _view(self, value: Value) -> None:
        of = self.views[value.inputs[0]]
        self.views[value] = View(of.lazy, value.shape, value.strides, of.offset + value.offset)

    def _item(self, value: Value) -> None:
        call = value.inputs[0]
        if call.facts.get("view"):
            of = self.views[call.inputs[0]]
            self.views[value] = View(of.lazy, value.shape, value.strides, of.offset + value.offset)
            return
        if call.facts.get("reduction"):
            self._statistics(call)
        if value not in self.views:  # nothing reads it
            self.views[value] = View(LazyResult(value, value.shape, value.strides), value.shape, value.strides)

    def _statistics(self, call: Value) -> None:
        """Lower var_mean: two results of one pass."""
        if call in self.items:
            return
        self.items[call] = {}
        for item in call.users:
            if item in self.inside:
                self.views[item] = self._reduction(item, call.inputs[0])

    def _pointwise(self, value: Value) -> None:
        lazy = LazyResult(value, value.shape, value.strides)
        ops: dict[Hashable, frozenset[TaskBuffer]] = {}
        indirect = value.how is How.GATHER or bool(value.facts.get("gathers"))
        places: tuple[int, tuple[int, ...]] | None = value.facts.get("places")
        reads: dict[Read, None] = {}
        for index, operand in enumerate(value.inputs):
            view = self.views[operand]
            found = self._reads(view)
            if indirect:
                found = [(read[0], None, 0) for read in found]
            elif places is not None:
                found = [placed(read, places[0], places[1][index]) for read in found]
            elif view.shape != value.shape:
                found = [broadcast(read, view.shape, value.shape) for read in found]
            if 1 in value.shape:  # strides do not matter along dimensions of size 1
                found = [without_unit_strides(read, value.shape) for read in found]
            reads |= dict.fromkeys(found)
            ops |= _shifted(view.lazy, found, (view.offset, places[1][index] if places else 0))
        sources = frozenset([read[0] for read in reads])
        ops |= dict.fromkeys([(value.index, part) for part in range(_operations(value))], sources)
        lazy.reads, lazy.ops = list(reads), ops
        if not self.cuda:
            own = value.op.partition("_")[0] in _HEAVY
            lazy.is_heavy = own or any(self.views[operand].lazy.is_heavy for operand in value.inputs)
        self.views[value] = View(lazy, value.shape, value.strides)
        if value.how is How.RANDOM:
            self._write(lazy)

    def _reads(self, view: View) -> list[Read]:
        """The reads that compute a view. A constant is recomputed by every reader, even if it is also written."""
        lazy = view.lazy
        source = lazy.source
        if source is None:
            whole = view.strides == lazy.strides and view.shape == lazy.shape and not view.offset
            return lazy.reads if whole else [through(view, read) for read in lazy.reads]
        if source.task is not None and source.task.is_constant:
            return []
        return [(source, view.strides, view.offset)]

    def _reduction(self, value: Value, operand: Value | None = None) -> View:
        operand = operand or value.inputs[0]
        view, count = self.views[operand], max(1, numel(value.shape))
        reduced = numel(operand.shape) // count
        if 1 < reduced < _UNROLLED and count > 1 and self.cuda:
            return self._unrolled(value, view)
        inner = count == 1 or (len(value.shape) == len(operand.shape) and value.shape[-1] == 1)
        splits = split_factor(reduced, count, inner) if self.cuda and (count == 1 or self._reads_whole(view)) else 1
        rows = _rows_before(view.lazy) if splits > 1 and count == 1 else 0
        if rows and reduced % rows == 0:
            return self._by_rows(value, view, rows)
        task = self._task(value, count, -(-reduced // splits))
        task.shape, task.whole, task.rows_first = operand.shape, (count, reduced), inner
        loops = _loops(operand.shape, value.shape)
        shape = tuple([view.shape[dim] for dim in loops])
        for source, strides, start in self._reads(view):
            turned = None if strides is None else tuple([strides[dim] for dim in loops])
            task.read(source, merged(shape, turned, start if splits == 1 else -splits))
        if splits > 1:
            partial = self._source(task, value, count * splits * ITEM_BYTES["float32"], Kind.TEMPORARY)
            task.writes.append((partial, None))
            task = self._task(value, count, splits)
            task.read(partial, None)
        return self._result(task, value)

    def _reads_whole(self, view: View) -> bool:
        """Whether some buffer is read without broadcasting: otherwise inductor does not split the reduction."""
        dims = [dim for dim, size in enumerate(view.shape) if size > 1]
        reads = self._reads(view)
        return any(strides is None or all(strides[dim] for dim in dims) for _, strides, _ in reads)

    def _by_rows(self, value: Value, view: View, rows: int) -> View:
        """A full sum in two passes: each row first, split as the sums it depends on were, then over the rows."""
        task = self._task(value, rows, numel(view.shape) // rows)
        task.shape = view.shape
        for source, strides, start in self._reads(view):
            task.read(source, merged(view.shape, strides, start))
        partial = self._source(task, value, rows * ITEM_BYTES["float32"], Kind.TEMPORARY)
        task.writes.append((partial, ((rows,), (1,), 0)))
        task = self._task(value, 1, rows)
        task.read(partial, ((rows,), (1,), 0))
        return self._result(task, value)

    def _unrolled(self, value: Value, view: View) -> View:
        """A sum of a few numbers, unrolled into an elementwise result."""
        lazy = LazyResult(value, value.shape, value.strides)
        lazy.reads = list(dict.fromkeys([(source, None, 0) for source, _, _ in self._reads(view)]))
        lazy.ops = view.lazy.ops | {value.index: frozenset([read[0] for read in lazy.reads])}
        return View(lazy, value.shape, value.strides)

    def _kernel(self, value: Value) -> None:
        task = self._extern(value)
        for item in value.users:
            if item.how is How.ITEM:
                self.views[item] = self._result(task, item)

    def _extern(self, value: Value) -> LoopNest:
        """The task of an external kernel, which reads whole buffers."""
        sources = [self._operand(each, value) for each in value.inputs]
        task = self._task(value, 0, 1, is_extern=True)
        for source in sources:
            task.read(source, None)
        return task

    def _operand(self, operand: Value, kernel: Value) -> TaskBuffer:
        """The operand's buffer. An unwritten operand of attention is written for that kernel alone.

        A mask broadcast over the sequences is written once for forward, expanded for backward (`sdpa_constraint`).
        """
        view = self.views[operand]
        if view.lazy.source is not None or not kernel.op.startswith("attention"):
            return self._write(view.lazy)
        whole = kernel.op == "attention_backward" and 0 in operand.strides
        copy = LazyResult(operand, operand.shape, operand.strides) if whole else _fresh(view.lazy)
        copy.reads = self._reads(view) if whole else list(view.lazy.reads)
        return self._write(copy)

    def _scatter(self, value: Value) -> None:
        """Write zeros, then add the rows in place."""
        zeros, *rest = value.inputs
        lazy = LazyResult(value, value.shape, value.strides)
        lazy.source = source = self._write(_fresh(self.views[zeros].lazy))
        source.name, source.kind = value.name, value.kind
        rows = rest[-1]
        fallback = bool(value.facts.get("fallback"))
        for operand in rest if fallback else ():
            self._write(self.views[operand].lazy)
        task = self._task(value, numel(rows.shape), 1, fallback)
        for operand in rest:
            view = self.views[operand]
            for read in self._reads(view):
                wide = broadcast(read, view.shape, rows.shape) if operand is rows else (read[0], None, 0)
                task.read(wide[0], merged(rows.shape, wide[1], wide[2]))
        task.read(source, None)
        after = self._source(task, value, 0, value.kind)
        after.inside = source
        task.writes.append((after, None))
        lazy.source = after
        self.views[value] = View(lazy, value.shape, value.strides)

    # --- writing ------------------------------------------------------------------------------------------------

    def _maybe_write(self, value: Value) -> None:
        view = self.views[value]
        lazy = view.lazy
        if lazy.source is not None:
            return
        if value in self.outputs:
            self._write(lazy)
            return
        users = [user for user in value.users if user in self.inside] if len(value.users) > 1 else []
        if len(users) > 1:
            product, several = "mm" in [user.op for user in users], self._nontrivial(lazy) > 1
            if product or (any(map(_is_kernel, users)) and several):
                self._write(lazy, None if several else view.shape)  # a mere copy gets the layout the product reads
                return
            much = self._is_large(lazy) or len(lazy.reads) > _READS_ON_REUSE
            if much or (not self.cuda and lazy.is_heavy):
                self._write(lazy)
                return
        if (len(lazy.reads) > _READS or self._is_large(lazy)) and self._nontrivial(lazy) > 1:
            self._write(lazy)

    def _nontrivial(self, lazy: LazyResult) -> int:
        """The number of reads that are not of a single element."""
        return sum([strides is None or any(strides) for _, strides, _ in lazy.reads])

    def _is_large(self, lazy: LazyResult) -> bool:
        return len(lazy.ops) + len(lazy.reads) > _OPERATIONS

    def _write(self, lazy: LazyResult, shape: Shape | None = None) -> TaskBuffer:
        """The result's buffer; writes it first, in loops over `shape`, if nothing has yet."""
        if lazy.source is None:
            task = self._task(lazy.value, numel(lazy.shape), 1)
            task.shape = shape or lazy.shape
            for source, strides, start in lazy.reads:
                task.read(source, merged(lazy.shape, strides, start, lazy.strides))
            lazy.source = self._result(task, lazy.value).lazy.source
            lazy.reads, lazy.ops, lazy.is_heavy = [], {}, False
        assert lazy.source is not None
        return lazy.source

    def _task(self, value: Value, count: int, reduced: int, is_extern: bool = False) -> LoopNest:
        task = LoopNest(len(self.tasks), value, count, reduced, is_extern)
        self.tasks.append(task)
        return task

    def _source(self, task: LoopNest, value: Value, size_bytes: int, kind: Kind) -> TaskBuffer:
        source = TaskBuffer(value.name, size_bytes, value.dtype, kind, value.block, task)
        source.batched = size_bytes != value.bytes or value.bytes % self.batch_size == 0  # padded, or a partial sum
        return source

    def _result(self, task: LoopNest, value: Value) -> View:
        lazy = LazyResult(value, value.shape, value.strides)
        padded = self.cuda and value not in self.visible and value.how is not How.ITEM
        size = padded_bytes(value.shape, value.strides, value.dtype) if padded else value.bytes
        lazy.source = self._source(task, value, size, value.kind)
        task.writes.append((lazy.source, merged(value.shape, value.strides, laid=value.strides)))
        return View(lazy, value.shape, value.strides)


def _operations(value: Value) -> int:
    """The number of operations inductor counts in a value: a constant operand counts as one too."""
    count = len(value.inputs)
    if value.how is How.CAT:  # each part takes an index, comparisons with its bounds, and a mask
        return 5 * count + 1 + max(count - 2, 0)
    if value.op in _COPIES:
        return 0
    return 1 + (count < _OPERANDS.get(value.op.partition("_")[0].partition(".")[0], 0))


def _shifted(lazy: LazyResult, reads: Sequence[Read], shift: tuple[int, int]) -> dict[Hashable, frozenset[TaskBuffer]]:
    """The operations of an unwritten result; reading them at another offset makes them distinct operations."""
    if shift == (0, 0) or not lazy.ops:
        return lazy.ops
    moved = {before[0] for before, now in zip(lazy.reads, reads, strict=True) if before[2] != now[2]}
    return {(op, shift) if sources & moved else op: sources for op, sources in lazy.ops.items()}


def _rows_before(lazy: LazyResult) -> int:
    """The number of rows in the reductions that a result is computed from; 0 if they differ (ir.py `num_splits`)."""
    found: set[tuple[int, int]] = set()
    tasks = {source.task for source, _, _ in lazy.reads}
    while tasks and not found:
        computing = [task for task in tasks if task is not None and not task.is_extern]
        found = {(task.numel, task.reduced) for task in computing if task.is_reduction}
        tasks = {source.task for task in computing for source in task.reads}
    rows, reduced = found.pop() if len(found) == 1 else (0, 0)
    return rows if rows * reduced == numel(lazy.shape) else 0


def _is_kernel(value: Value) -> bool:
    """Whether an operation reads its operands from memory."""
    return value.op in ("bmm", "grouped_mm") or (
        value.how is How.CALL and not value.facts.get("view") and not value.facts.get("reduction")
    )


def _loops(shape: Shape, reduced: Shape) -> list[int]:
    """The operand's dimensions in the order its reduction loops over them: kept dimensions first, then reduced ones."""
    if len(shape) == len(reduced):
        stay = [size == kept for size, kept in zip(shape, reduced, strict=True)]
    else:
        stay = [place >= len(shape) - len(reduced) for place in range(len(shape))]
    return sorted(range(len(shape)), key=lambda dim: not stay[dim])


def base_of(value: Value) -> Value:
    """The value that a view, or a part of a split, is a view of."""
    while True:
        if value.how is How.ITEM and value.inputs[0].facts.get("view"):
            value = value.inputs[0]
        elif value.how is not How.VIEW:
            return value
        value = value.inputs[0]


def _fresh(lazy: LazyResult) -> LazyResult:
    """A copy of an unwritten result, to be written separately."""
    return LazyResult(lazy.value, lazy.shape, lazy.strides)


SMS, _THREADS = 108, 2048  # multiprocessors, and threads on each, of the card assumed: others change a few kilobytes
_LEAST, _MOST = 32 * SMS * _THREADS, 512 * SMS * _THREADS  # elements that fill the card


def split_factor(reduced: int, count: int, inner: bool) -> int:
    """How many parts inductor splits a reduction with few results into (choices.py `reduction_split_factor`)."""
    whole = reduced * count
    if inner:
        if count >= 2 * SMS or reduced <= 8192:
            return 1
        blocks = -(-(SMS * _THREADS // 512) // count)
        size = (
            32 if whole <= _LEAST else _even(reduced, -(-reduced // (256 * blocks)), 30, 32) if whole < _MOST else 512
        )
        return -(-reduced // (size * 256))
    if whole < _LEAST:
        size = 32
    elif whole < _MOST:
        blocks = -(-(SMS * _THREADS // 256) // -(-count // 128))
        size = _even(reduced, -(-reduced // (4 * blocks)), 20, 32)
    else:
        size = _even(reduced, 512, 50, 1)
    return -(-reduced // (4 * size))


def _even(whole: int, size: int, near: int, least: int) -> int:
    """A divisor of `whole` within `near` of `size`, or else `size`."""
    for away in range(near):
        for each in (size - away, size + away):
            if each > 0 and whole % each == 0:
                return max(each, least)
    return size
