"""Tensors without data, and the ledger of what a program allocates and frees.

PyTorch frees a tensor when the last reference to it goes: a Python frame's variable, a tensor saved for backward,
autocast's cache, a `.grad`. A simulated program holds its tensors in the same places, as ordinary Python objects, and
Python's own reference counts say when each storage is free. So a model written on these tensors reads like the model
itself, and an option that changes who holds what (no gradients, checkpointing, returned logits) needs no accounting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase
from oomph.step.tensor.layout import ITEM_BYTES, Shape, is_contiguous, numel

if TYPE_CHECKING:
    from oomph.step.tensor.autograd import Node
    from oomph.step.tensor.tape import Tape

OpRecord = tuple[str, Phase, tuple[Buffer, ...], list[Buffer], Kernel, Shape, str, int, int, int, int | None]


class Ledger:
    """Operations in the order they run. Storages released before the next operation count as the last one's frees."""

    __slots__ = ("block", "frees", "phase", "records", "times")

    def __init__(self) -> None:
        self.records: list[OpRecord] = []
        self.frees: list[Buffer] = []
        self.phase = Phase.FORWARD
        self.times = 1  # how often the operations being recorded run
        self.block: int | None = None  # the transformer block being run

    def note(
        self,
        name: str,
        allocated: tuple[Buffer, ...],
        kernel: Kernel = Kernel.POINTWISE,
        moved: int = 0,
        flops: int = 0,
        shape: Shape = (),
        dtype: str = "float32",
    ) -> None:
        """Record one operation and what it allocates."""
        frees: list[Buffer] = []
        self.frees = frees
        work = (kernel, shape, dtype, flops, moved, self.times, self.block)
        self.records.append((name, self.phase, allocated, frees, *work))

    def hold(self, name: str, size_bytes: int, kind: Kind) -> Storage:
        """A storage that is alive without an operation: it existed before, or the caller records its allocation."""
        return Storage(self, Buffer(name, size_bytes, kind, self.block))

    def make(
        self, name: str, size_bytes: int, kind: Kind, kernel: Kernel = Kernel.POINTWISE, moved: int = 0
    ) -> Storage:
        """Record an operation that moves memory and makes one buffer. Returns its storage."""
        made = self.hold(name, size_bytes, kind)
        self.note(name, (made.buffer,), kernel, moved)
        return made

    def ops(self) -> tuple[Op, ...]:
        """Everything recorded since the last call."""
        ops = tuple([Op(n, p, a, tuple(f), k, s, d, fl, m, t, b) for n, p, a, f, k, s, d, fl, m, t, b in self.records])
        self.records = []
        return ops


class Storage:
    """One live allocation. It tells the ledger when its last reference is gone."""

    __slots__ = ("buffer", "ledger")

    def __init__(self, ledger: Ledger, buffer: Buffer) -> None:
        self.ledger = ledger
        self.buffer = buffer

    def __del__(self) -> None:
        try:
            self.ledger.frees.append(self.buffer)
        except AttributeError:
            return  # interrupted before __init__ returned: nothing to free

    @property
    def bytes(self) -> int:
        """Bytes that the program requested."""
        return self.buffer.bytes

    @property
    def kind(self) -> Kind:
        """What the storage is for."""
        return self.buffer.kind


Edge = tuple["Node", int]


class Tensor:
    """A view on a storage, and the autograd node that made it."""

    __slots__ = ("dtype", "edge", "is_view", "shape", "storage", "strides", "tape")

    def __init__(
        self,
        tape: Tape,
        storage: Storage | None,  # None: a parameter or buffer that lives as long as the program
        shape: Shape,
        strides: Shape,
        dtype: str,
        edge: Edge | None = None,  # the node that its gradient goes to, and which of its outputs; None: needs none
        is_view: bool = False,  # shares the storage of a tensor that it keeps alive
    ) -> None:
        self.tape = tape
        self.storage = storage
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.edge = edge
        self.is_view = is_view

    @property
    def numel(self) -> int:
        return numel(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of its elements, without gaps."""
        return numel(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def requires_grad(self) -> bool:
        return self.edge is not None

    @property
    def is_contiguous(self) -> bool:
        return is_contiguous(self.shape, self.strides)

    def detach(self) -> Tensor:
        """The same memory, without autograd history."""
        return Tensor(self.tape, self.storage, self.shape, self.strides, self.dtype, None, self.is_view)

    def as_strided(self, shape: Shape, strides: Shape) -> Tensor:
        """Another view of the same memory, without autograd history."""
        return Tensor(self.tape, self.storage, shape, strides, self.dtype, None, True)
