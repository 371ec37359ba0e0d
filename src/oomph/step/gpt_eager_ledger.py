"""The ledger of a simulated eager program: what each operation allocates, and what is let go after it.

PyTorch frees a tensor when the last reference to it goes: a Python frame's variable, a tensor saved for backward,
autocast's cache, a `.grad`. The simulation holds its buffers in the same places, as ordinary Python objects, and
lets Python's own reference counts say when each is free. So the simulated layers read like the layers themselves,
and an option that changes who holds what (no gradients, checkpointing, returned logits) needs no second accounting.
"""

from __future__ import annotations

from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase

Record = tuple[str, Phase, tuple[Buffer, ...], list[Buffer], Kernel, tuple[int, ...], str, int, int, int]


class Ledger:
    """Operations in the order they run. What is let go after an operation, and before the next, is its to free."""

    __slots__ = ("block", "frees", "phase", "records", "times")

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.frees: list[Buffer] = []
        self.phase = Phase.FORWARD
        self.block: int | None = None
        self.times = 1  # how often the operations being written run

    def hold(self, name: str, size_bytes: int, kind: Kind) -> Held:
        """A buffer of the operation about to be noted."""
        return Held(self, Buffer(name, size_bytes, kind, self.block))

    def note(
        self,
        name: str,
        made: tuple[Held, ...],
        kernel: Kernel = Kernel.POINTWISE,
        moved: int = 0,
        flops: int = 0,
        shape: tuple[int, ...] = (),
        dtype: str = "float32",
    ) -> None:
        """Write down one operation and what it allocated."""
        frees: list[Buffer] = []
        self.frees = frees
        allocated = tuple([held.buffer for held in made])
        self.records.append((name, self.phase, allocated, frees, kernel, shape, dtype, flops, moved, self.times))

    def make(self, name: str, size_bytes: int, kind: Kind, kernel: Kernel = Kernel.POINTWISE, moved: int = 0) -> Held:
        """An operation that moves memory and makes one buffer."""
        buffer = Buffer(name, size_bytes, kind, self.block)
        frees: list[Buffer] = []
        self.frees = frees
        self.records.append((name, self.phase, (buffer,), frees, kernel, (), "float32", 0, moved, self.times))
        return Held(self, buffer)

    def ops(self) -> tuple[Op, ...]:
        """Everything noted since the last time it was asked for."""
        ops = tuple([Op(n, p, a, tuple(f), k, s, d, fl, m, t) for n, p, a, f, k, s, d, fl, m, t in self.records])
        self.records = []
        return ops


class Held:
    """One live allocation. The ledger learns that it is free when the last reference to it goes."""

    __slots__ = ("buffer", "ledger")

    def __init__(self, ledger: Ledger, buffer: Buffer) -> None:
        self.ledger = ledger
        self.buffer = buffer

    def __del__(self) -> None:
        try:
            self.ledger.frees.append(self.buffer)
        except AttributeError:
            return  # Ctrl-C came before __init__ was through: there is nothing to free

    @property
    def bytes(self) -> int:
        """What the program asked for."""
        return self.buffer.bytes
