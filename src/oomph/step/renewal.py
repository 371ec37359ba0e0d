"""The same operations on other buffers: a micro-step is like the one before it, but for its batch and its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oomph.step.ops import Buffer, Op


def copied(buffer: Buffer) -> Buffer:
    """Another buffer like this one."""
    return Buffer(buffer.name, buffer.bytes, buffer.kind, buffer.block)


def exchanged(ops: Sequence[Op], new: Mapping[Buffer, Buffer | None]) -> list[Op]:
    """The operations with these buffers in place of those; what becomes None is gone."""
    result: list[Op] = []
    keys = new.keys()
    for op in ops:
        if not (keys.isdisjoint(op.allocates) and keys.isdisjoint(op.frees)):
            allocates, frees = _replaced(op.allocates, new), _replaced(op.frees, new)
            work = (op.kernel, op.shape, op.dtype, op.flops, op.bytes_moved, op.times)
            op = Op(op.name, op.phase, allocates, frees, *work)
        result.append(op)
    return result


def _replaced(buffers: Sequence[Buffer], new: Mapping[Buffer, Buffer | None]) -> tuple[Buffer, ...]:
    found = [new.get(buffer, buffer) for buffer in buffers]
    return tuple([buffer for buffer in found if buffer is not None])
