"""Expandable segments (`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`).

Each pool has one segment with address space for the whole card. Memory is mapped into it page by page, so that free
neighbours merge across what would otherwise be separate segments, and unused pages return to the driver when the card
is full.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from oomph.predict.allocator.blocks import ALLOCATED, UNMAPPED, BlockPool, MemoryBlock

if TYPE_CHECKING:
    from oomph.predict.allocator.caching import CachingAllocator

UNBOUNDED_SPACE_BYTES = 2**44  # address space of a segment if no capacity is given


def best_fit(pool: BlockPool, at: int) -> int:
    """The index of the best fit; `at` is the smallest free block that is large enough.

    A block followed by unmapped space counts as large as it could grow, so that it is used last.
    """
    blocks = pool.blocks
    size = _size_when_grown(blocks[at])
    while at + 1 < len(blocks):
        next_size = _size_when_grown(blocks[at + 1])
        if next_size >= size:
            break
        at, size = at + 1, next_size
    return at


def grow(allocator: CachingAllocator, pool: BlockPool, size: int) -> MemoryBlock | None:
    """Map pages at the lowest address where `size` bytes fit. Returns the block; None if the card is full.

    Pages mapped before the card ran out stay mapped, as they do in PyTorch.
    """
    if allocator.capacity_bytes is not None and size > allocator.capacity_bytes:
        return None  # not even the address space of a new segment would hold it
    block = _lowest_room(allocator, pool, size)
    if block.key == UNMAPPED and not _map(allocator, pool, block, min(block.size, size)):
        return None
    while block.size < size:
        behind = block.next
        if behind is None:
            raise RuntimeError("an expandable segment ended inside the room that was found in it")
        if not _map(allocator, pool, behind, min(behind.size, size - block.size)):
            return None
        block = behind  # it absorbed the free block before it
    return block


def release_pages(allocator: CachingAllocator, pool: BlockPool) -> None:
    """Unmap every page that no allocated block touches, and drop segments that become empty."""
    for block in list(pool.blocks):
        _unmap(allocator, pool, block)
        if block.key == UNMAPPED and block.prev is None and block.next is None:
            pool.unmapped.remove(block)


def _size_when_grown(block: MemoryBlock) -> int:
    behind = block.next
    return block.size + behind.size if behind is not None and behind.key == UNMAPPED else block.size


def _lowest_room(allocator: CachingAllocator, pool: BlockPool, size: int) -> MemoryBlock:
    """The first block of the lowest run of free or unmapped blocks that holds `size` bytes; else of a new segment."""
    for unmapped in pool.unmapped:
        prev = unmapped.prev
        start = prev if prev is not None and prev.key != ALLOCATED else unmapped
        room = 0
        for block in start.chain():
            if block.key == ALLOCATED:
                break
            room += block.size
            if room >= size:
                return start
    return _new_segment(allocator, pool, size)


def _new_segment(allocator: CachingAllocator, pool: BlockPool, size: int) -> MemoryBlock:
    """New address space: 1 1/8 of the card, as in PyTorch; without a capacity, enough for the request."""
    capacity = allocator.capacity_bytes
    space = max(UNBOUNDED_SPACE_BYTES, size) if capacity is None else capacity + capacity // 8
    space = -(-space // pool.page_bytes) * pool.page_bytes
    block = MemoryBlock(allocator.take_addresses(space), space)
    _insert_unmapped(pool, block)
    return block


def _map(allocator: CachingAllocator, pool: BlockPool, block: MemoryBlock, size: int) -> bool:
    """Map whole pages at the start of an unmapped block and make it a free one, merged with its neighbours."""
    mapped = -(-size // pool.page_bytes) * pool.page_bytes
    if not allocator.take_from_driver(mapped):
        return False
    pool.unmapped.remove(block)
    block.key = ALLOCATED
    if mapped < block.size:
        rest = MemoryBlock(block.address + mapped, block.size - mapped, block, block.next)
        if rest.next is not None:
            rest.next.prev = rest
        block.next = rest
        block.size = mapped
        _insert_unmapped(pool, rest)
    allocator.segment_obtained(block.address, mapped)
    if block.prev is not None and block.prev.key > 0:
        pool.remove(block.prev)
        _absorb(block, block.prev)
    if block.next is not None and block.next.key > 0:
        pool.remove(block.next)
        _absorb(block, block.next)
    pool.insert(block)
    return True


def _unmap(allocator: CachingAllocator, pool: BlockPool, block: MemoryBlock) -> None:
    """Return the whole pages inside a free block to the driver; the rest before and after them stays free."""
    page = pool.page_bytes
    # Address space starts at multiples of 2 MiB only, so pages are counted from the segment's start.
    base = _segment_start(block)
    begin = base + -(-(block.address - base) // page) * page
    end = base + (block.address + block.size - base) // page * page
    if begin >= end:
        return
    pool.remove(block)
    before, after = begin - block.address, block.address + block.size - end
    if before:
        front = MemoryBlock(block.address, before, block.prev, block)
        if front.prev is not None:
            front.prev.next = front
        block.prev = front
        pool.insert(front)
    if after:
        back = MemoryBlock(end, after, block, block.next)
        if back.next is not None:
            back.next.prev = back
        block.next = back
        pool.insert(back)
    block.address, block.size = begin, end - begin
    allocator.reserved_bytes -= block.size
    allocator.segment_released(block.address, block.size)
    for neighbour in (block.prev, block.next):
        if neighbour is not None and neighbour.key == UNMAPPED:
            pool.unmapped.remove(neighbour)
            _absorb(block, neighbour)
    _insert_unmapped(pool, block)


def _insert_unmapped(pool: BlockPool, block: MemoryBlock) -> None:
    block.key = UNMAPPED
    pool.unmapped.insert(bisect_left(pool.unmapped, block.address, key=lambda other: other.address), block)


def _absorb(block: MemoryBlock, neighbour: MemoryBlock) -> None:
    """Merge the block directly before or after this one into it."""
    if neighbour is block.prev:
        block.address = neighbour.address
        block.prev = neighbour.prev
        if block.prev is not None:
            block.prev.next = block
    else:
        block.next = neighbour.next
        if block.next is not None:
            block.next.prev = block
    block.size += neighbour.size


def _segment_start(block: MemoryBlock) -> int:
    while block.prev is not None:
        block = block.prev
    return block.address
