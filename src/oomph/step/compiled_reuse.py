"""Buffers as inductor's generated program handles them: a dead buffer's memory serves the next one of its size.

Inductor frees a buffer after its last use, unless a later buffer of the same type and size will take it over; then
it is not freed in between. So which frees happen is known only at the end. It does not let a dead buffer wait for the
next where that would raise the program's peak.
"""

from __future__ import annotations

from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase

Record = tuple[str, tuple[Buffer, ...], list[Buffer], Kernel, tuple[int, ...], str, int, int, int]


class Generated:
    """A generated program while it is written: operations in order, and dead buffers that may serve again."""

    __slots__ = (
        "block", "dead", "dtype", "frees", "fresh", "highest", "limit", "live", "phase", "records", "times", "tops",
    )  # fmt: skip

    def __init__(self, phase: Phase, dtype: str, limit: int | None = None) -> None:
        self.phase = phase
        self.dtype = dtype  # of the matrix products
        self.limit = limit  # the program's peak, as far as it is known before; None: certainly elsewhere
        self.block: int | None = None
        self.times = 1  # how often the operations being written run
        self.records: list[Record] = []
        self.frees: list[Buffer] = []  # of the operation written last
        self.fresh: list[Buffer] = []  # for the operation about to be written
        self.dead: dict[tuple[int, int], list[tuple[int, list[Buffer], Buffer]]] = {}
        self.live = 0  # bytes alive, from the program's beginning: what it lets go of its inputs counts as negative
        self.highest = 0  # of `live`, up to now
        self.tops: list[int] = []  # `live` while each operation ran

    def new(self, name: str, count: int, item_bytes: int, kind: Kind) -> Buffer:
        """A buffer that the next operation writes: a dead one of its type and size, or a fresh one."""
        waiting = self.dead.get((item_bytes, count))
        if waiting and self._may_wait(waiting[-1][0], count * item_bytes):
            since, frees, buffer = waiting.pop()
            frees.remove(buffer)
            if self.limit is not None:
                for place in range(since + 1, len(self.tops)):  # it was there all the while
                    self.tops[place] += buffer.bytes
            self.live += buffer.bytes
            return buffer
        return self.made(name, count * item_bytes, kind)

    def _may_wait(self, since: int, size_bytes: int) -> bool:
        """Whether a buffer dead after operation `since` could have stayed until now without a higher peak."""
        if self.limit is None or since == len(self.records) - 1:
            return True
        return max(self.tops[since + 1 :]) + size_bytes <= max(self.limit, self.highest)

    def made(self, name: str, size_bytes: int, kind: Kind) -> Buffer:
        """A buffer that the next operation allocates itself: never a reused one."""
        buffer = Buffer(name, size_bytes, kind, self.block)
        self.fresh.append(buffer)
        self.live += size_bytes
        return buffer

    def run(
        self,
        name: str,
        kernel: Kernel,
        moved: int,
        flops: int = 0,
        shape: tuple[int, ...] = (),
        temporaries: tuple[Buffer, ...] = (),
        in_place: int = 0,
    ) -> None:
        """Write the operation that fills the buffers asked for since the last one.

        `in_place` are the bytes it overwrites: inductor's estimate of its peak still counts them twice.
        """
        self.frees = frees = list(temporaries)
        dtype = self.dtype if flops else "float32"
        self.records.append((name, (*self.fresh, *temporaries), frees, kernel, shape, dtype, flops, moved, self.times))
        self.fresh = []
        top = self.live + in_place
        self.tops.append(top)  # without an operation's own temporaries: inductor does not know of them
        if top > self.highest:
            self.highest = top

    def product(self, name: str, m: int, n: int, k: int, item_bytes: int) -> None:
        """A matrix product (m × k) · (k × n)."""
        self.run(name, Kernel.GEMM, (m * k + k * n + m * n) * item_bytes, 2 * m * n * k, (1, m, n, k))

    def drop(self, item_bytes: int, *buffers: Buffer) -> None:
        """The program's own buffers are dead after the last operation: freed, or taken over by a later buffer."""
        last = len(self.records) - 1
        for buffer in buffers:
            self.frees.append(buffer)
            self.live -= buffer.bytes
            self.dead.setdefault((item_bytes, buffer.bytes // item_bytes), []).append((last, self.frees, buffer))

    def release(self, *buffers: Buffer) -> None:
        """Inputs of the program are let go after the last operation. Their memory is not its to use again."""
        self.frees.extend(buffers)
        for buffer in buffers:
            self.live -= buffer.bytes

    def leave(self, buffer: Buffer) -> None:
        """The program lets go of an input that somebody else still holds: gone from its estimate alone."""
        self.live -= buffer.bytes

    def ops(self) -> tuple[Op, ...]:
        """The finished program."""
        phase = self.phase
        return tuple([Op(n, phase, a, tuple(f), k, s, d, fl, m, t) for n, a, f, k, s, d, fl, m, t in self.records])
