"""A lowered program: buffers, the tasks that write them, and at which places tasks read buffers.

A `Value` of the graph becomes a `LazyResult`, computed wherever it is read, until a `LoopNest` writes it to a
`TaskBuffer`. A `View` is what a value sees of it. `emit` gives those that leave their kernel memory, an `ops.Buffer`.
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
    """A buffer: an input of the program, or what a task writes."""

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
        self.freeable = task is not None  # of inputs: those that forward saved
        self.donated = task is not None  # it may be overwritten
        self.inside: TaskBuffer | None = None  # in whose memory it is, where that is not its own
        self.batched = False  # its size grows with the batch
        self.strides: Shape = ()

    @property
    def root(self) -> TaskBuffer:
        """Whose memory it is."""
        return self.inside or self

    def __repr__(self) -> str:
        return f"<{self.name} {self.bytes}>"


class LoopNest:
    """One operation of the program: a loop over `numel` results of `reduced` numbers each, or a kernel from outside."""

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
        self.ancestors = 0  # the tasks it depends on, each a bit
        self.shape: Shape = value.shape  # its loops, before any is joined
        self.whole = (count, reduced)  # of a reduction that is split: what it is part of
        self.rows_first = True  # a reduction along rows, as memory has them

    @property
    def is_constant(self) -> bool:
        """Whether it computes its results from nothing (ir.py `ComputedBuffer.make_loader` computes them again)."""
        return not self.reads and not self.is_extern and self.value.how not in (How.RANDOM, How.REDUCTION)

    def read(self, source: TaskBuffer, access: Access) -> None:
        if source not in self.reads:
            self.reads[source] = set()
            source.users.append(self)
        self.reads[source].add(access)


Read = tuple[TaskBuffer, Shape | None, int]  # the buffer, its strides over the reader's shape, where it begins


class LazyResult:
    """A result: where it is, or how it is computed."""

    __slots__ = ("ops", "reads", "shape", "source", "strides", "value")

    def __init__(self, value: Value, shape: Shape, strides: Shape) -> None:
        self.value, self.shape, self.strides = value, shape, strides
        self.source: TaskBuffer | None = None
        self.reads: list[Read] = []
        self.ops: dict[Hashable, frozenset[TaskBuffer]] = {}  # if it is not written: each operation, and what it reads


class View:
    """A result as a value sees it."""

    __slots__ = ("lazy", "offset", "shape", "strides")

    def __init__(self, lazy: LazyResult, shape: Shape, strides: Shape, offset: int = 0) -> None:
        self.lazy, self.shape, self.strides, self.offset = lazy, shape, strides, offset


@lru_cache(maxsize=1024)  # blocks are alike: a program has few
def merged(shape: Shape, strides: Shape | None, offset: int = 0, laid: Shape | None = None) -> Access:
    """An access with its loops joined where they run on; the loops go through memory that is `laid` out so."""
    if strides is None:
        return None
    if laid is not None:
        dims = sorted(range(len(shape)), key=lambda dim: -laid[dim])
        shape, strides = tuple([shape[dim] for dim in dims]), tuple([strides[dim] for dim in dims])
    sizes: list[int] = []
    steps: list[int] = []
    for size, step in zip(shape, strides, strict=True):
        if size == 1 or step == 0:  # read again where it was
            continue
        if sizes and steps[-1] == step * size:
            sizes[-1] *= size
            steps[-1] = step
        else:
            sizes.append(size)
            steps.append(step)
    return tuple(sizes), tuple(steps), offset


def through(view: View, read: Read) -> Read:
    """What a view of a result reads of a buffer that the result reads."""
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
    """Strides in a buffer, and the first place, of a view of what has these strides there; None where it has none."""
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
    """The stride in a buffer of what has this stride in the result; None where it has none."""
    for place in range(len(dims) - 1, -1, -1):
        outer, count, own = dims[place]
        if outer <= step < outer * count:
            if step % outer:
                return None
            reach = size * (step // outer)
            while reach > count:  # it runs on into the next dimension
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


def still(read: Read, shape: Shape) -> Read:
    """A read without strides along dimensions of one number."""
    source, strides, start = read
    if strides is None:
        return read
    return source, tuple([0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]), start


def placed(read: Read, dim: int, start: int) -> Read:
    """What is read of an operand that begins at a place of the result: the loops run over the whole result."""
    source, strides, offset = read
    return read if strides is None else (source, strides, offset - start * strides[dim])
