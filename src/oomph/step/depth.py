"""A deep model from a shallow one: a repeating block is interpreted once and copied.

Of a run of equal blocks the first two and the last are interpreted. The second one's operations are then copied
for each block left out, on new buffers. Blocks may come in groups (Gemma's five windows and a full attention):
then the groups repeat. A reference to a buffer of the block before or after is translated by index: the n-th buffer
that one block makes corresponds to the n-th of any other.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache

from oomph.step.ops import Buffer, Op, Phase

_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")


@lru_cache(maxsize=4096)  # names recur in every program
def block_of(name: str) -> int | None:
    """The transformer block in a name: its first number."""
    found = _NUMBER.search(name)
    return int(found[0]) if found else None


@lru_cache(maxsize=4096)
def renamed(name: str, block: int, other: int) -> str:
    """A name with the number of one block replaced by another's."""
    parts = name.split(".")
    own = str(block)
    if own in parts:
        parts[parts.index(own)] = str(other)
    return ".".join(parts)


class Gap:
    """Blocks left out: their template, and the blocks around them."""

    def __init__(self, before: int, template: int, after: int, period: int) -> None:
        """`template` is the first block of the group that repeats until the block `after`."""
        self.before, self.template, self.after, self.period = before, template, after, period

    @property
    def copies(self) -> int:
        """The number of groups left out."""
        return (self.after - self.template) // self.period - 1

    def group_of(self, block: int | None) -> int | None:
        """Where a block stands: -1 before the template, 0 in it, 1 after it, None elsewhere."""
        if block is None:
            return None
        for offset, first in ((-1, self.before), (0, self.template), (1, self.after)):
            if first <= block < first + self.period:
                return offset
        return None


def sample(kinds: Sequence[Hashable]) -> tuple[tuple[int, ...], list[Gap]]:
    """The blocks to interpret in a model with these kinds of blocks, and the gaps between them."""
    period = next((p for p in (1, 2, 3, 4, 5, 6, 8) if _repeats(kinds, p)), 0)
    if period > 1:
        return _sampled_run(0, len(kinds), period)
    chosen: list[int] = []
    gaps: list[Gap] = []
    start = 0
    while start < len(kinds):
        end = start
        while end < len(kinds) and kinds[end] == kinds[start]:
            end += 1
        layers, found = _sampled_run(start, end, 1)
        chosen += layers
        gaps += found
        start = end
    return tuple(chosen), gaps


def _repeats(kinds: Sequence[Hashable], period: int) -> bool:
    return all(kind == kinds[index % period] for index, kind in enumerate(kinds))


def _sampled_run(start: int, end: int, period: int) -> tuple[tuple[int, ...], list[Gap]]:
    groups = (end - start) // period
    last = start + (groups - 1) * period  # the last whole group; an incomplete one may follow
    if groups < 4:
        return tuple(range(start, end)), []
    template = start + period
    layers = (*range(start, template + period), *range(last, end))
    return layers, [Gap(start, template, last, period)]


class UnlikeBlocksError(Exception):
    """Blocks assumed equal are not: the whole model has to be interpreted."""


def deepened(
    sections: Sequence[Sequence[Op]], named: Sequence[Mapping[str, Buffer]], gap: Gap
) -> tuple[list[tuple[Op, ...]], list[dict[str, Buffer]]]:
    """Sections and named buffers, such as the gradients, with a gap's blocks filled in."""
    copying = _Copying(sections, gap)
    result = [tuple(copying.section(ops)) for ops in sections]
    return result, [copying.more(each) for each in named]


class _Copying:
    def __init__(self, sections: Sequence[Sequence[Op]], gap: Gap) -> None:
        self.gap = gap
        self.names: dict[str, re.Match[str] | None] = {}  # the match of the block number in each name
        groups: dict[int, list[Buffer]] = {-1: [], 0: [], 1: []}
        self.places: dict[Buffer, tuple[int, int]] = {}
        for ops in sections:
            for op in ops:
                for buffer in op.allocates:
                    offset = gap.group_of(buffer.block)
                    if offset is not None:
                        self.places[buffer] = (offset, len(groups[offset]))
                        groups[offset].append(buffer)
        sizes = [[(b.bytes, b.kind) for b in groups[offset]] for offset in (-1, 0, 1)]
        if not sizes[0] == sizes[1] == sizes[2]:
            raise UnlikeBlocksError
        self.before, own, self.after = groups[-1], groups[0], groups[1]
        self.copies = [own]
        for copy in range(1, gap.copies + 1):
            shift = copy * gap.period
            self.copies.append(
                [Buffer(self.renamed(b.name, copy), b.bytes, b.kind, (b.block or 0) + shift) for b in own]
            )

    def renamed(self, name: str, copy: int) -> str:
        """The name with the block number of one of the copies."""
        if name not in self.names:
            self.names[name] = _NUMBER.search(name)
        found = self.names[name]
        gap = self.gap
        offset = gap.group_of(int(found[0])) if found else None
        if found is None or offset is None or copy + offset < 0:
            return name
        at = copy + offset
        first = gap.template + at * gap.period if at <= gap.copies else gap.after
        own = (gap.before, gap.template, gap.after)[offset + 1]
        return f"{name[: found.start()]}{first + int(found[0]) - own}{name[found.end() :]}"

    def of(self, buffer: Buffer, copy: int) -> Buffer:
        """The copy's counterpart of a buffer of the template or of a block next to it."""
        place = self.places.get(buffer)
        if place is None:
            return buffer
        offset, index = place
        at = copy + offset
        if at < 0:
            return self.before[index]
        return self.after[index] if at > self.gap.copies else self.copies[at][index]

    def more(self, named: Mapping[str, Buffer]) -> dict[str, Buffer]:
        """Named buffers, including those of the copies."""
        found: dict[str, Buffer] = {}
        for name, buffer in named.items():
            found[name] = buffer
            if self.places.get(buffer, (None, 0))[0] == 0:
                for copy in range(1, self.gap.copies + 1):
                    found[self.renamed(name, copy)] = self.of(buffer, copy)
        return found

    def section(self, ops: Sequence[Op]) -> list[Op]:
        result: list[Op] = []
        start = 0
        while start < len(ops):
            offset = self.gap.group_of(ops[start].block)
            end = start
            if offset != 0:
                result.append(self._outside(ops[start], offset))
                start += 1
                continue
            while end < len(ops) and self.gap.group_of(ops[end].block) == 0:
                end += 1
            order = range(self.gap.copies + 1)
            for copy in reversed(order) if ops[start].phase is Phase.BACKWARD else order:
                result += self._copy(ops[start:end], copy)
            start = end
        return result

    def _outside(self, op: Op, offset: int | None) -> Op:
        """An operation outside the template, with the buffers of the nearest copy in place of the template's."""
        if offset == -1 or not any(self.places.get(b, (1, 0))[0] == 0 for b in (*op.allocates, *op.frees)):
            return op
        last = self.gap.copies
        near = range(last, last + 1) if offset == 1 else range(last + 1)  # outside all blocks: every copy's
        allocates, frees = (self._near(buffers, near) for buffers in (op.allocates, op.frees))
        return op.on(allocates, frees)

    def _near(self, buffers: Sequence[Buffer], copies: Sequence[int]) -> tuple[Buffer, ...]:
        """The buffers, with the template's replaced by those of these copies."""
        found: list[Buffer] = []
        for buffer in buffers:
            own = self.places.get(buffer, (1, 0))[0] == 0
            found += [self.of(buffer, copy) for copy in copies] if own else [buffer]
        return tuple(found)

    def _copy(self, ops: Sequence[Op], copy: int) -> list[Op]:
        of = self.of
        result: list[Op] = []
        shift = copy * self.gap.period
        for op in ops:
            allocates = tuple([of(buffer, copy) for buffer in op.allocates])
            frees = tuple([of(buffer, copy) for buffer in op.frees])
            name = self.renamed(op.name, copy) if copy else op.name
            block = (op.block or 0) + shift
            work = (op.kernel, op.shape, op.dtype, op.flops, op.bytes_moved, op.times)
            result.append(Op(name, op.phase, allocates, frees, *work, block))
        return result
