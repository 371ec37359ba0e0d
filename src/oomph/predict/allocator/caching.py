"""PyTorch's CUDA caching allocator, simulated: from what a program allocates to what it reserves.

Follows `c10/cuda/CUDACachingAllocator.cpp`: best fit over the free blocks of a small and a large pool per stream,
splitting, merging, and emptying the cache when the card is full. Two simplifications: memory fragments
only within segments, since the driver maps pages anywhere; and new segments get rising addresses, which only decides
between free blocks of equal size.
"""

from __future__ import annotations

from bisect import bisect_left

from oomph.predict.allocator import expandable
from oomph.predict.allocator.blocks import (
    ADDRESS_BITS,
    ALLOCATED,
    BLOCK_BYTES,
    LARGE_SEGMENT_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    BlockPool,
    MemoryBlock,
    segment_bytes,
)

FIRST_ADDRESS = 2**40


class OutOfMemoryError(Exception):
    """A request that failed even after every unused segment was given back."""

    def __init__(self, tried_bytes: int, free_bytes: int) -> None:
        self.tried_bytes = tried_bytes  # PyTorch's "Tried to allocate": rounded up to the segment it wanted
        self.free_bytes = free_bytes  # the part of the capacity that is not reserved
        super().__init__(f"tried to allocate {tried_bytes:,} bytes with {free_bytes:,} free")


class CachingAllocator:
    """The allocator's state: allocate and free as a PyTorch program does, and read how much is reserved.

    `capacity_bytes` is what the allocator may reserve in all: the card less contexts and other processes.
    """

    __slots__ = (
        "allocated_bytes",
        "capacity_bytes",
        "deferred",
        "expandable_segments",
        "large",
        "next_address",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "reserved_bytes",
        "retries",
        "small",
        "streams",
    )

    def __init__(self, capacity_bytes: int | None = None, expandable_segments: bool = False) -> None:
        self.capacity_bytes = capacity_bytes
        self.expandable_segments = expandable_segments
        self.allocated_bytes = 0  # rounded to blocks, as torch.cuda.memory_allocated counts
        self.peak_allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.retries = 0  # num_alloc_retries: how often the cache had to be emptied for a request
        self.streams: dict[int, tuple[BlockPool, BlockPool]] = {}
        self.next_address = FIRST_ADDRESS
        self.deferred: list[tuple[int, MemoryBlock, bool]] = []  # freed, but possibly still in use by another stream
        self.enter(0)

    def enter(self, stream: int) -> None:
        """Make the following requests and frees this stream's."""
        pools = self.streams.get(stream)
        if pools is None:
            large_rest_bytes = BLOCK_BYTES if self.expandable_segments else SMALL_BYTES + 1
            small = BlockPool("small", BLOCK_BYTES, SMALL_SEGMENT_BYTES)
            pools = self.streams[stream] = (small, BlockPool("large", large_rest_bytes, LARGE_SEGMENT_BYTES))
        self.small, self.large = pools

    def allocate(self, requested_bytes: int) -> MemoryBlock:
        """The block that serves a request. Raises OutOfMemoryError. An empty request takes no memory."""
        size = requested_bytes + (BLOCK_BYTES - 1) & -BLOCK_BYTES
        if size <= 0:
            if requested_bytes < 0:
                raise ValueError(f"a request for {requested_bytes} bytes")
            return MemoryBlock(0, 0)
        pool = self.small if size <= SMALL_BYTES else self.large
        keys, blocks = pool.keys, pool.blocks
        floor = size << ADDRESS_BITS
        at = bisect_left(keys, floor)
        if at == len(keys):
            at = self._obtain(pool, size)
        elif self.expandable_segments:
            at = expandable.best_fit(pool, at)
        block = blocks[at]
        rest = block.size - size
        if rest < pool.min_rest_bytes:
            del keys[at], blocks[at]
            block.key = ALLOCATED
        else:  # the front serves the request, the rest stays in the pool
            prev, address = block.prev, block.address
            taken = block.prev = MemoryBlock(address, size, prev, block)
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
            else:  # it usually keeps its place in the pool
                keys[at] = key
            block = taken
        allocated = self.allocated_bytes = self.allocated_bytes + block.size
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        return block

    def free(self, block: MemoryBlock) -> None:
        """Return a block to its pool, merged with free neighbours. Must be called once per block."""
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
        if at + 1 == len(keys) or key < keys[at + 1]:  # the merged block usually keeps its neighbour's place
            keys[at], blocks[at] = key, block
        else:
            del keys[at], blocks[at]
            at = bisect_left(keys, key, at)
            keys.insert(at, key)
            blocks.insert(at, block)

    def free_later(self, block: MemoryBlock, stream: int, marks: bool) -> None:
        """Free a block that another stream uses too: it counts as free, but is reused only after `catch_up`.

        `marks`: the program waits for its event (FSDP's _FreeEventQueue).
        """
        self.allocated_bytes -= block.size
        self.deferred.append((stream, block, marks))

    def catch_up(self, left: int) -> None:
        """Make deferred blocks reusable, up to all but the last `left` of those with `marks`."""
        marks = [at for at, (_, _, marked) in enumerate(self.deferred) if marked]
        until = marks[-left - 1] + 1 if len(marks) > left else 0
        self._reuse(until)

    def _reuse(self, until: int) -> None:
        done, self.deferred = self.deferred[:until], self.deferred[until:]
        for stream, block, _ in done:
            self.allocated_bytes += block.size
            self.enter(stream)
            self.free(block)
        self.enter(0)

    def empty_cache(self) -> None:
        """Return unused memory to the driver: whole segments, or whole pages of expandable ones."""
        self._reuse(len(self.deferred))  # it synchronizes all streams first
        for pool in [pool for small, large in self.streams.values() for pool in (large, small)]:
            if self.expandable_segments:
                expandable.release_pages(self, pool)
                continue
            for block in list(pool.blocks):
                if block.prev is None and block.next is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size
                    self.segment_released(block.address, block.size)

    def pool_of(self, size_bytes: int) -> BlockPool:
        """The pool that a block of this size belongs to."""
        return self.small if size_bytes <= SMALL_BYTES else self.large

    def take_from_driver(self, size_bytes: int) -> bool:
        """Reserve `size_bytes` more. Returns whether the card has them."""
        reserved = self.reserved_bytes + size_bytes
        if self.capacity_bytes is not None and reserved > self.capacity_bytes:
            return False
        self.reserved_bytes = reserved
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved)
        return True

    def take_addresses(self, size_bytes: int) -> int:
        """The start of new address space."""
        address = self.next_address
        self.next_address += size_bytes
        return address

    def segment_obtained(self, address: int, size_bytes: int) -> None:
        """Called for each segment or range of pages from the driver; recorders override it."""

    def segment_released(self, address: int, size_bytes: int) -> None:
        """Called for each segment or range of pages returned to the driver; recorders override it."""

    def _obtain(self, pool: BlockPool, size: int) -> int:
        """Get a block from the driver, emptying the cache if necessary. Returns its index in the pool."""
        block = self._ask_driver(pool, size)
        if block is None:
            small, large = self.small, self.large
            self.empty_cache()
            self.small, self.large = small, large
            self.retries += 1
            block = self._ask_driver(pool, size)
        if block is None:
            # Without a capacity the driver never refuses.
            raise OutOfMemoryError(segment_bytes(size), (self.capacity_bytes or 0) - self.reserved_bytes)
        return bisect_left(pool.keys, block.key)

    def _ask_driver(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """A free block of at least `size` bytes from newly reserved memory; None if the card is full."""
        if self.expandable_segments:
            return expandable.grow(self, pool, size)
        wanted_bytes = segment_bytes(size)
        if not self.take_from_driver(wanted_bytes):
            return None
        block = MemoryBlock(self.take_addresses(wanted_bytes), wanted_bytes)
        self.segment_obtained(block.address, wanted_bytes)
        pool.insert(block)
        return block
