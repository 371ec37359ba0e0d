"""A lowered program: buffers, the tasks that write them, and the elements that tasks read.

A `Value` of the graph becomes a `LazyResult`, computed wherever it is read, until a `LoopNest` writes it to a
`TaskBuffer`. A `View` is a value's window on it. `emit` gives task buffers that leave their kernel an `ops.Buffer`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache

from oomph.step.compile.graph import How, Value
from oomph.step.ops import Kind
from oomph.step.tensor.layout import Shape

Place = tuple[tuple[int, ...], tuple[int, ...], int]  # sizes, strides, offset
Access = Place | None  # None: indices known only at run time, as in a gather


class TaskBuffer:
    """A buffer: an input of the program, or a task's result."""

    __slots__ = (
        "batched",
        "block",
        "bytes",
        "donated",
        "dtype",
        "freeable",
        "inside",
        "is_output",
        "kind",
        "name",
        "strides",
        "task",
        "users",
    )

    def __init__(
        self, name: str, size_bytes: int, dtype: str, kind: Kind, block: int | None, task: LoopNest | None
    ) -> None:
        self.name, self.bytes, self.dtype, self.kind, self.block = name, size_bytes, dtype, kind, block
        self.task = task
        self.users: list[LoopNest] = []
        self.is_output = False
        self.freeable = task is not None  # for inputs: whether forward saved it
        self.donated = task is not None  # whether it may be overwritten
        self.inside: TaskBuffer | None = None  # the buffer whose memory it lives in, if not its own
        self.batched = False  # its size grows with the batch
        self.strides: Shape = ()

    @property
    def root(self) -> TaskBuffer:
        """The buffer whose memory this one uses."""
        return self.inside or self

    def __repr__(self) -> str:
        return f"<{self.name} {self.bytes}>"


class LoopNest:
    """One operation of the program: a loop over `numel` results of `reduced` elements each, or an external kernel."""

    __slots__ = (
        "ancestors", "index", "is_extern", "is_reduction", "numel", "reads", "reduced", "rows_first", "shape", "value",
        "whole", "writes",
    )  # fmt: skip

    def __init__(self, index: int, value: Value, count: int, reduced: int, is_extern: bool = False) -> None:
        self.index, self.value = index, value
        self.numel, self.reduced = count, reduced
        self.is_reduction = reduced > 1
        self.is_extern = is_extern
        self.reads: dict[TaskBuffer, set[Access]] = {}
        self.writes: list[tuple[TaskBuffer, Access]] = []
        self.ancestors = 0  # the tasks it depends on, as a bit set
        self.shape: Shape = value.shape  # its loop extents, before any are merged
        self.whole = (count, reduced)  # the extents of the whole reduction, if it is split
        self.rows_first = True  # whether it reduces along the contiguous dimension

    @property
    def is_constant(self) -> bool:
        """Whether it has no inputs (ir.py `ComputedBuffer.make_loader` recomputes such results)."""
        return not self.reads and not self.is_extern and self.value.how not in (How.RANDOM, How.REDUCTION)

    def read(self, source: TaskBuffer, access: Access) -> None:
        if source not in self.reads:
            self.reads[source] = set()
            source.users.append(self)
        self.reads[source].add(access)


Read = tuple[TaskBuffer, Shape | None, int]  # the buffer, its strides over the reader's shape, the offset


class LazyResult:
    """A result: the buffer it is in, or how to compute it."""

    __slots__ = ("is_heavy", "ops", "reads", "shape", "source", "strides", "value")

    def __init__(self, value: Value, shape: Shape, strides: Shape) -> None:
        self.value, self.shape, self.strides = value, shape, strides
        self.is_heavy = False  # whether it includes an exponential or the like
        self.source: TaskBuffer | None = None
        self.reads: list[Read] = []
        self.ops: dict[Hashable, frozenset[TaskBuffer]] = {}  # if unwritten: each operation, and what it reads


class View:
    """A value's window on a result."""

    __slots__ = ("lazy", "offset", "shape", "strides")

    def __init__(self, lazy: LazyResult, shape: Shape, strides: Shape, offset: int = 0) -> None:
        self.lazy, self.shape, self.strides, self.offset = lazy, shape, strides, offset


@lru_cache(maxsize=1024)  # a program repeats a few layouts in every block
def merged(shape: Shape, strides: Shape | None, offset: int = 0, laid: Shape | None = None) -> Access:
    """An access with contiguous loops merged; `laid`: the strides of the memory that the loops run through."""
    if strides is None:
        return None
    if laid is not None:
        dims = sorted(range(len(shape)), key=lambda dim: -laid[dim])
        shape, strides = tuple([shape[dim] for dim in dims]), tuple([strides[dim] for dim in dims])
    sizes: list[int] = []
    steps: list[int] = []
    for size, step in zip(shape, strides, strict=True):
        if size == 1 or step == 0:  # it reads the same element again
            continue
        if sizes and steps[-1] == step * size:
            sizes[-1] *= size
            steps[-1] = step
        else:
            sizes.append(size)
            steps.append(step)
    return tuple(sizes), tuple(steps), offset


def through(view: View, read: Read) -> Read:
    """The part of a buffer that a view of a result reads, given what the whole result reads."""
    source, strides, start = read
    if strides is None:
        return read
    lazy = view.lazy
    found, first = _composed(view.shape, view.strides, view.offset, lazy.shape, lazy.strides, strides)
    return (source, None, 0) if found is None else (source, found, start + first)


@lru_cache(maxsize=1024)
def _composed(
    shape: Shape, steps: Shape, offset: int, base_shape: Shape, base: Shape, strides: Shape
) -> tuple[Shape | None, int]:
    """A view's strides and offset in the buffer underneath its result; None if no strides describe it."""
    dims = sorted([(base[d], base_shape[d], strides[d]) for d in range(len(base)) if base_shape[d] > 1], reverse=True)
    result: list[int] = []
    for size, step in zip(shape, steps, strict=True):
        found = 0 if size == 1 or step == 0 else _along(dims, size, step)
        if found is None:
            return None, 0
        result.append(found)
    first = 0
    for outer, _, own in dims:
        first += offset // outer * own
        offset %= outer
    return tuple(result), first


def _along(dims: Sequence[tuple[int, int, int]], size: int, step: int) -> int | None:
    """The stride in the buffer for a stride in the result; None if there is none."""
    for place in range(len(dims) - 1, -1, -1):
        outer, count, own = dims[place]
        if outer <= step < outer * count:
            if step % outer:
                return None
            reach = size * (step // outer)
            while reach > count:  # the view spans the next dimension too
                if (
                    reach % count
                    or place == 0
                    or dims[place - 1][2] != own * count
                    or dims[place - 1][0] != outer * count
                ):
                    return None
                place -= 1
                count *= dims[place][1]
            return own * (step // outer)
    return None


def broadcast(read: Read, shape: Shape, wide: Shape) -> Read:
    source, strides, start = read
    if strides is None or shape == wide:
        return read
    missing = len(wide) - len(shape)
    own = [0 if size == 1 != wide[place + missing] else strides[place] for place, size in enumerate(shape)]
    return source, (*([0] * missing), *own), start


def without_unit_strides(read: Read, shape: Shape) -> Read:
    """A read with stride 0 along dimensions of size 1."""
    source, strides, start = read
    if strides is None:
        return read
    return source, tuple([0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]), start


def placed(read: Read, dim: int, start: int) -> Read:
    """A read of an operand that starts at `start` in the result, for loops over the whole result."""
    source, strides, offset = read
    return read if strides is None else (source, strides, offset - start * strides[dim])
