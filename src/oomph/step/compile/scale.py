"""A compiled model's programs for any batch size from those for a few: what a search looks at.

Nearly every size and every count of work is a multiple of the batch, or has nothing to do with it. With a batch that is
a prime the two are told apart by division. The result is nearly right: memory may serve again where two sizes happen to
be equal, and sums over many rows take one more kernel than sums over few. So batches are scaled from one that is not
far from them, and small models, whose time is that of launching kernels, not at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from oomph.config.schema import TrainConfig
from oomph.step.compile.model import CompiledModel, compiled_model
from oomph.step.ops import Buffer, Op

_PRIMES = (37, 131, 1031)  # larger than any divisor that sizes have in common by chance
_SMALL = 1 << 20  # numbers in the residual stream


def scaled_model(config: TrainConfig, cuda: bool, threads: int) -> CompiledModel:
    """Nearly what `compiled_model` says."""
    if config.batch_size * config.block_size * config.n_embd < _SMALL:
        return compiled_model(config, cuda, threads)
    prime = min(_PRIMES, key=lambda prime: max(prime / config.batch_size, config.batch_size / prime))
    large = compiled_model(msgspec.structs.replace(config, batch_size=prime), cuda, threads)
    return _Scaled(config.batch_size, prime).model(large)


class _Scaled:
    """A model of one batch, a prime, as one of another."""

    def __init__(self, batch_size: int, prime: int) -> None:
        self.batch_size, self.prime = batch_size, prime
        self.made: dict[Buffer, Buffer] = {}
        self.batched: frozenset[Buffer] = frozenset()

    def model(self, large: CompiledModel) -> CompiledModel:
        """The model with that batch."""
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
            still = large.scalable.still_bytes.get(op, 0)
            moved = still + self._number(op.bytes_moved - still)
            work = (op.kernel, shape, op.dtype, self._number(op.flops), moved, op.times, op.block)
            result.append(Op(op.name, op.phase, self._buffers(op.allocates), self._buffers(op.frees), *work))
        return tuple(result)
