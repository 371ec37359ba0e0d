"""PyTorch's CUDA caching allocator, simulated: from what a program allocates to what it reserves.

Follows `c10/cuda/CUDACachingAllocator.cpp` for one stream: best fit over the free blocks of a small and
a large pool, splitting, merging, and what happens on a full card. Two things a card decides are modelled:
memory fragments only inside segments (the driver maps whole pages wherever it likes), and new segments
get rising addresses (which only decides between free blocks of equal size).
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from oomph.predict import allocator_expandable as expandable
from oomph.predict.allocator_blocks import (
    ADDRESS_BITS,
    ALLOCATED,
    BLOCK_BYTES,
    LARGE_SEGMENT_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    Block,
    Pool,
    segment_bytes,
)

FIRST_ADDRESS = 2**40


class Shortage(msgspec.Struct, frozen=True):
    """The request that failed, with the numbers that PyTorch's out-of-memory message shows."""

    requested_bytes: int  # as the program asked
    tried_bytes: int  # "Tried to allocate": rounded up to the segment the allocator wanted
    capacity_bytes: int  # what the allocator could reserve at most
    free_bytes: int  # of which unreserved
    allocated_bytes: int  # "is allocated by PyTorch"
    unallocated_bytes: int  # "is reserved by PyTorch but unallocated": fragmentation
    largest_free_block_bytes: int

    @property
    def reserved_bytes(self) -> int:
        return self.allocated_bytes + self.unallocated_bytes

    def message(self, card_bytes: int, outside_bytes: int) -> str:
        """What PyTorch would print on a card of `card_bytes` whose process holds `outside_bytes` (its CUDA
        context) beside the allocator's memory."""
        used_bytes = self.reserved_bytes + outside_bytes
        return (
            f"CUDA out of memory. Tried to allocate {format_size(self.tried_bytes)}. GPU 0 has a total capacity of "
            f"{format_size(card_bytes)} of which {format_size(self.free_bytes)} is free. Including non-PyTorch "
            f"memory, this process has {format_size(used_bytes)} memory in use. Of the allocated memory "
            f"{format_size(self.allocated_bytes)} is allocated by PyTorch, and {format_size(self.unallocated_bytes)} "
            "is reserved by PyTorch but unallocated."
        )


class OutOfMemoryError(Exception):
    """The card is full, and letting go of every unused segment did not help."""

    def __init__(self, shortage: Shortage) -> None:
        self.shortage = shortage
        super().__init__(f"tried to allocate {format_size(shortage.tried_bytes)}")


class CachingAllocator:
    """Allocate and free as a PyTorch program does, and read how much is reserved.

    `capacity_bytes` is what the allocator may reserve in all: the card less contexts and other processes.
    """

    __slots__ = (
        "allocated_bytes",
        "capacity_bytes",
        "expandable_segments",
        "large",
        "next_address",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "reserved_bytes",
        "retries",
        "small",
    )

    def __init__(self, capacity_bytes: int | None = None, expandable_segments: bool = False) -> None:
        self.capacity_bytes = capacity_bytes
        self.expandable_segments = expandable_segments
        self.allocated_bytes = 0  # rounded to blocks, as torch.cuda.memory_allocated counts
        self.peak_allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.retries = 0  # num_alloc_retries: how often the cache had to be emptied for a request
        large_rest_bytes = BLOCK_BYTES if expandable_segments else SMALL_BYTES + 1
        self.small = Pool("small", BLOCK_BYTES, SMALL_SEGMENT_BYTES)
        self.large = Pool("large", large_rest_bytes, LARGE_SEGMENT_BYTES)
        self.next_address = FIRST_ADDRESS

    def allocate(self, requested_bytes: int) -> Block:
        """The block that serves a request. Raises OutOfMemoryError. An empty request takes no memory."""
        size = requested_bytes + (BLOCK_BYTES - 1) & -BLOCK_BYTES
        if size <= 0:
            if requested_bytes < 0:
                raise ValueError(f"a request for {requested_bytes} bytes")
            return Block(0, 0)
        pool = self.small if size <= SMALL_BYTES else self.large
        keys, blocks = pool.keys, pool.blocks
        floor = size << ADDRESS_BITS
        at = bisect_left(keys, floor)
        if at == len(keys):
            at = self._obtain(pool, size, requested_bytes)
        elif self.expandable_segments:
            at = expandable.best_fit(pool, at)
        block = blocks[at]
        rest = block.size - size
        if rest < pool.min_rest_bytes:
            del keys[at], blocks[at]
            block.key = ALLOCATED
        else:  # the front serves the request, the rest stays in the pool
            prev, address = block.prev, block.address
            taken = block.prev = Block(address, size, prev, block)
            if prev is not None:
                prev.next = taken
            block.address = address + size
            block.size = rest
            key = block.key = block.key - floor + size
            if at and key < keys[at - 1]:
                del keys[at], blocks[at]
                at = bisect_left(keys, key, 0, at)
                keys.insert(at, key)
                blocks.insert(at, block)
            else:  # most often it keeps its place among the others
                keys[at] = key
            block = taken
        allocated = self.allocated_bytes = self.allocated_bytes + block.size
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool, merged with the free blocks beside it. Each block once."""
        size = block.size
        if not size:
            return
        self.allocated_bytes -= size
        pool = self.small if size <= SMALL_BYTES else self.large
        keys, blocks = pool.keys, pool.blocks
        prev, after = block.prev, block.next
        if prev is not None and prev.key > 0:
            at = bisect_left(keys, prev.key)
            del keys[at], blocks[at]
            size += prev.size
            block.address = prev.address
            block.prev = prev = prev.prev
            if prev is not None:
                prev.next = block
        if after is None or after.key <= 0:
            block.size = size
            key = block.key = size << ADDRESS_BITS | block.address
            at = bisect_left(keys, key)
            keys.insert(at, key)
            blocks.insert(at, block)
            return
        at = bisect_left(keys, after.key)
        size = block.size = size + after.size
        block.next = following = after.next
        if following is not None:
            following.prev = block
        key = block.key = size << ADDRESS_BITS | block.address
        if at + 1 == len(keys) or key < keys[at + 1]:  # most often the merged block keeps its neighbour's place
            keys[at], blocks[at] = key, block
        else:
            del keys[at], blocks[at]
            at = bisect_left(keys, key, at)
            keys.insert(at, key)
            blocks.insert(at, block)

    def empty_cache(self) -> None:
        """Return to the driver what nothing uses: whole segments, or whole pages of expandable ones."""
        for pool in (self.large, self.small):
            if self.expandable_segments:
                expandable.release_pages(self, pool)
                continue
            for block in list(pool.blocks):
                if block.prev is None and block.next is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size
                    self.segment_released(block.address, block.size)

    @property
    def largest_free_block_bytes(self) -> int:
        """The largest cached block: what the next request can get without asking the driver."""
        return max(self.small.largest_free_bytes, self.large.largest_free_bytes)

    def pool_of(self, size_bytes: int) -> Pool:
        """The pool of a block in use, which its size tells."""
        return self.small if size_bytes <= SMALL_BYTES else self.large

    def take_from_driver(self, size_bytes: int) -> bool:
        """Reserve that much more, if the card has it."""
        reserved = self.reserved_bytes + size_bytes
        if self.capacity_bytes is not None and reserved > self.capacity_bytes:
            return False
        self.reserved_bytes = reserved
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved)
        return True

    def take_addresses(self, size_bytes: int) -> int:
        """The start of fresh address space."""
        address = self.next_address
        self.next_address += size_bytes
        return address

    def segment_obtained(self, address: int, size_bytes: int) -> None:
        """Called for each segment or range of pages that the driver gave: for those who record."""

    def segment_released(self, address: int, size_bytes: int) -> None:
        """Called for each segment or range of pages that went back to the driver."""

    def _obtain(self, pool: Pool, size: int, requested_bytes: int) -> int:
        """Get a block from the driver, if need be after emptying the cache: its place in the pool."""
        block = self._ask_driver(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._ask_driver(pool, size)
        if block is None:
            capacity_bytes = self.capacity_bytes or 0  # without a capacity the driver never refuses
            raise OutOfMemoryError(
                Shortage(
                    requested_bytes=requested_bytes,
                    tried_bytes=segment_bytes(size),
                    capacity_bytes=capacity_bytes,
                    free_bytes=capacity_bytes - self.reserved_bytes,
                    allocated_bytes=self.allocated_bytes,
                    unallocated_bytes=self.reserved_bytes - self.allocated_bytes,
                    largest_free_block_bytes=self.largest_free_block_bytes,
                )
            )
        return bisect_left(pool.keys, block.key)

    def _ask_driver(self, pool: Pool, size: int) -> Block | None:
        """A free block of at least `size` bytes in the pool, from fresh memory."""
        if self.expandable_segments:
            return expandable.grow(self, pool, size)
        wanted_bytes = segment_bytes(size)
        if not self.take_from_driver(wanted_bytes):
            return None
        block = Block(self.take_addresses(wanted_bytes), wanted_bytes)
        self.segment_obtained(block.address, wanted_bytes)
        pool.insert(block)
        return block


def format_size(size_bytes: int) -> str:
    """A size as PyTorch's out-of-memory message writes it."""
    for unit, unit_bytes in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes > unit_bytes:
            return f"{size_bytes / unit_bytes:.2f} {unit}"
    return f"{size_bytes} bytes"
