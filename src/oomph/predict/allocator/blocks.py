"""Blocks and the pools that keep the free ones: what PyTorch's caching allocator is built from.

The constants are those of torch 2.13's `c10/core/AllocatorConfig.h`; `large_segment_size_mb`,
`max_split_size_mb`, `roundup_power2_divisions` and garbage collection stay at their defaults
(20 MiB, unlimited, off, off).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from oomph.units import MIB

BLOCK_BYTES = 512  # kMinBlockSize: every size is rounded up to a multiple of it
SMALL_BYTES = 1 * MIB  # kSmallSize: requests up to here live in the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MIB  # large_segment_size: requests below 10 MiB share such segments
OWN_SEGMENT_FROM_BYTES = 10 * MIB  # kMinLargeAlloc: larger requests get their own segment
SEGMENT_ROUNDING_BYTES = 2 * MIB  # kRoundLarge

ADDRESS_BITS = 72  # a free block's key is its size above its address, so that keys sort by (size, address)

ALLOCATED = 0  # `MemoryBlock.key` of a block in use
UNMAPPED = -1  # key of unmapped address space in an expandable segment


class MemoryBlock:
    """A range of addresses in one segment, linked to its neighbours so that free ones can merge."""

    __slots__ = ("address", "key", "next", "prev", "size")

    def __init__(
        self, address: int, size: int, prev: MemoryBlock | None = None, following: MemoryBlock | None = None
    ) -> None:
        self.address = address
        self.size = size
        self.prev = prev
        self.next = following
        self.key = ALLOCATED  # while the block is free: positive, its sort key in the pool

    def chain(self) -> Iterator[MemoryBlock]:
        """This block and the later ones of its segment."""
        block: MemoryBlock | None = self
        while block is not None:
            yield block
            block = block.next


class BlockPool:
    """Free blocks of one pool, sorted by size, then address.

    Two parallel lists instead of one of tuples: bisecting plain ints takes half the time.
    """

    __slots__ = ("blocks", "keys", "min_rest_bytes", "name", "page_bytes", "unmapped")

    def __init__(self, name: str, min_rest_bytes: int, page_bytes: int) -> None:
        self.name = name  # "small", "large": as a memory snapshot names its segments
        self.keys: list[int] = []
        self.blocks: list[MemoryBlock] = []
        self.unmapped: list[MemoryBlock] = []  # expandable segments only, by address
        self.min_rest_bytes = min_rest_bytes  # a block is split if at least this much remains
        self.page_bytes = page_bytes  # expandable segments grow by multiples of it

    def insert(self, block: MemoryBlock) -> None:
        key = block.key = block.size << ADDRESS_BITS | block.address
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.blocks.insert(at, block)

    def remove(self, block: MemoryBlock) -> None:
        at = bisect_left(self.keys, block.key)
        del self.keys[at]
        del self.blocks[at]
        block.key = ALLOCATED


def segment_bytes(size_bytes: int) -> int:
    """The size of the segment that the allocator requests from the driver for a rounded request."""
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < OWN_SEGMENT_FROM_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
