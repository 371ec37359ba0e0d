"""A compiled model's programs for any batch size, scaled from those of a few: what a search uses.

Nearly every size and amount of work is a multiple of the batch size, or independent of it. With a prime batch size,
divisibility tells the two apart. The result is approximate: memory may be reused where two sizes happen to be equal,
and sums over many rows take one more kernel than sums over few. So a batch is scaled from a prime that is not far
from it, and small models, whose time is kernel launches, are not scaled.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from oomph.config.schema import TrainConfig
from oomph.step.compile.model import CompiledModel, compiled_model
from oomph.step.ops import Buffer, Op

_PRIMES = (37, 131, 1031)  # larger than any factor that sizes share by chance
_SMALL = 1 << 20  # elements of the residual stream


def scaled_model(config: TrainConfig, cuda: bool, threads: int) -> CompiledModel:
    """An approximation of `compiled_model`."""
    if config.batch_size * config.block_size * config.n_embd < _SMALL:
        return compiled_model(config, cuda, threads)
    prime = min(_PRIMES, key=lambda prime: max(prime / config.batch_size, config.batch_size / prime))
    large = compiled_model(msgspec.structs.replace(config, batch_size=prime), cuda, threads)
    return _Scaled(config.batch_size, prime).model(large)


class _Scaled:
    """Scales a model of one batch size, a prime, to another."""

    def __init__(self, batch_size: int, prime: int) -> None:
        self.batch_size, self.prime = batch_size, prime
        self.made: dict[Buffer, Buffer] = {}
        self.batched: frozenset[Buffer] = frozenset()

    def model(self, large: CompiledModel) -> CompiledModel:
        """The model with the new batch size."""
        self.batched = large.scalable.batched
        return CompiledModel(
            batch=self._buffers(large.batch),
            forward=self._ops(large.forward, large),
            returned=self._buffers(large.returned),
            tangents=self._buffers(large.tangents),
            backward=self._ops(large.backward, large),
            grads={name: self._buffer(buffer) for name, buffer in large.grads.items()},
            scalable=large.scalable,
        )

    def _number(self, large: int) -> int:
        return large // self.prime * self.batch_size if large % self.prime == 0 else large

    def _buffers(self, large: Sequence[Buffer]) -> tuple[Buffer, ...]:
        return tuple([self._buffer(buffer) for buffer in large])

    def _buffer(self, large: Buffer) -> Buffer:
        found = self.made.get(large)
        if found is None:
            batched = large in self.batched or large.bytes % self.prime == 0
            size = round(large.bytes * self.batch_size / self.prime) if batched else large.bytes
            found = self.made[large] = Buffer(large.name, size, large.kind, large.block)
        return found

    def _ops(self, ops: Sequence[Op], large: CompiledModel) -> tuple[Op, ...]:
        result: list[Op] = []
        for op in ops:
            shape = tuple([self._number(size) for size in op.shape])
            fixed = large.scalable.fixed_bytes.get(op, 0)
            moved = fixed + self._number(op.bytes_moved - fixed)
            work = (op.kernel, shape, op.dtype, self._number(op.flops), moved, op.times, op.block)
            result.append(Op(op.name, op.phase, self._buffers(op.allocates), self._buffers(op.frees), *work))
        return tuple(result)
