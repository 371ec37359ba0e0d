"""The quick caching allocator against a slow, plain one, and what must hold of any allocator.

In the plain one each segment is a list of pieces in address order. Every question is answered by looking at
all of them, every change by rewriting a list, so that there is no bookkeeping to get wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomph.predict.allocator.blocks import ALLOCATED, MemoryBlock
from oomph.predict.allocator.caching import CachingAllocator, OutOfMemoryError

MIB = 2**20
USED, FREE, UNMAPPED = "used", "free", "unmapped"


class FullError(Exception):
    """The card has no room for a request."""


class Piece:
    """Part of a segment."""

    def __init__(self, size: int, state: str) -> None:
        self.size = size
        self.state = state


class OracleSegment:
    """What one cudaMalloc returned, or one expandable range of addresses."""

    def __init__(self, address: int, pool: str, pieces: list[Piece]) -> None:
        self.address = address
        self.pool = pool
        self.pieces = pieces

    def address_of(self, piece: Piece) -> int:
        return self.address + sum(other.size for other in self.pieces[: self.pieces.index(piece)])

    def tidy(self) -> None:
        """Merge neighbours of the same state, unless they are in use."""
        merged: list[Piece] = []
        for piece in self.pieces:
            if merged and piece.state != USED and merged[-1].state == piece.state:
                merged[-1].size += piece.size
            elif piece.size:
                merged.append(piece)
        self.pieces = merged

    def cut(self, piece: Piece, sizes_and_states: list[tuple[int, str]]) -> list[Piece]:
        at = self.pieces.index(piece)
        parts = [Piece(size, state) for size, state in sizes_and_states]
        self.pieces[at : at + 1] = parts
        return parts


class OracleAllocator:
    def __init__(self, capacity_bytes: int | None = None, expandable_segments: bool = False) -> None:
        self.capacity_bytes = capacity_bytes
        self.expandable = expandable_segments
        self.segments: list[OracleSegment] = []
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.retries = 0
        self.next_address = 2**40

    def bytes_in(self, *states: str) -> int:
        return sum(piece.size for segment in self.segments for piece in segment.pieces if piece.state in states)

    @property
    def allocated_bytes(self) -> int:
        return self.bytes_in(USED)

    @property
    def reserved_bytes(self) -> int:
        return self.bytes_in(USED, FREE)

    def allocate(self, requested_bytes: int) -> Piece | None:
        if requested_bytes == 0:
            return None
        size = -(-requested_bytes // 512) * 512
        pool = "small" if size <= 1 * MIB else "large"
        found = self.best_fit(pool, size) or self.from_driver(pool, size)
        if found is None:
            self.release_unused()
            self.retries += 1
            found = self.from_driver(pool, size)
        if found is None:
            raise FullError
        segment, piece = found
        rest = piece.size - size
        if rest >= 512 if pool == "small" or self.expandable else rest > 1 * MIB:
            piece = segment.cut(piece, [(size, USED), (rest, FREE)])[0]
        else:
            piece.state = USED
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return piece

    def free(self, piece: Piece | None) -> None:
        if piece is None:
            return
        piece.state = FREE
        for segment in self.segments:
            segment.tidy()

    def best_fit(self, pool: str, size: int) -> tuple[OracleSegment, Piece] | None:
        fits = [
            (piece.size, segment.address_of(piece), segment, piece)
            for segment in self.segments
            if segment.pool == pool
            for piece in segment.pieces
            if piece.state == FREE and piece.size >= size
        ]
        fits.sort(key=lambda fit: fit[:2])
        if not fits:
            return None
        chosen = 0
        while chosen + 1 < len(fits) and self.grown(*fits[chosen + 1][2:]) < self.grown(*fits[chosen][2:]):
            chosen += 1
        return fits[chosen][2:]

    def grown(self, segment: OracleSegment, piece: Piece) -> int:
        after = segment.pieces[segment.pieces.index(piece) + 1 :]
        return piece.size + (after[0].size if after and after[0].state == UNMAPPED else 0)

    def from_driver(self, pool: str, size: int) -> tuple[OracleSegment, Piece] | None:
        if self.expandable:
            return self.expand(pool, size)
        if size <= 1 * MIB:
            wanted = 2 * MIB
        elif size < 10 * MIB:
            wanted = 20 * MIB
        else:
            wanted = -(-size // (2 * MIB)) * 2 * MIB
        if not self.has_room(wanted):
            return None
        segment = self.new_segment(pool, wanted, FREE)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return segment, segment.pieces[0]

    def has_room(self, size: int) -> bool:
        return self.capacity_bytes is None or self.reserved_bytes + size <= self.capacity_bytes

    def new_segment(self, pool: str, size: int, state: str) -> OracleSegment:
        segment = OracleSegment(self.next_address, pool, [Piece(size, state)])
        self.next_address += size
        self.segments.append(segment)
        return segment

    def expand(self, pool: str, size: int) -> tuple[OracleSegment, Piece] | None:
        page = 2 * MIB if pool == "small" else 20 * MIB
        if self.capacity_bytes is not None and size > self.capacity_bytes:
            return None
        segment, first = self.lowest_room(pool, size, page)
        while True:
            here = segment.pieces[first]
            if here.state == FREE and here.size >= size:
                return segment, here
            have = here.size if here.state == FREE else 0
            hole = segment.pieces[first + 1] if here.state == FREE else here
            mapped = -(-min(hole.size, size - have) // page) * page
            if not self.has_room(mapped):
                return None
            segment.cut(hole, [(mapped, FREE), (hole.size - mapped, UNMAPPED)])
            segment.tidy()
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def lowest_room(self, pool: str, size: int, page: int) -> tuple[OracleSegment, int]:
        for segment in self.segments:
            if segment.pool != pool:
                continue
            for at, piece in enumerate(segment.pieces):
                if piece.state != UNMAPPED:
                    continue
                start = at - 1 if at and segment.pieces[at - 1].state == FREE else at
                run = 0
                for other in segment.pieces[start:]:
                    if other.state == USED:
                        break
                    run += other.size
                if run >= size:
                    return segment, start
        space = 2**44 if self.capacity_bytes is None else self.capacity_bytes + self.capacity_bytes // 8
        return self.new_segment(pool, -(-space // page) * page, UNMAPPED), 0

    def release_unused(self) -> None:
        for segment in list(self.segments):
            if self.expandable:
                self.unmap_pages(segment)
            elif [piece.state for piece in segment.pieces] == [FREE]:
                self.segments.remove(segment)

    def unmap_pages(self, segment: OracleSegment) -> None:
        page = 2 * MIB if segment.pool == "small" else 20 * MIB
        if all(piece.state == UNMAPPED for piece in segment.pieces):
            return  # never used: PyTorch keeps its address space
        for piece in list(segment.pieces):
            start = segment.address_of(piece) - segment.address
            begin, end = -(-start // page) * page, (start + piece.size) // page * page
            if piece.state == FREE and begin < end:
                sizes = [(begin - start, FREE), (end - begin, UNMAPPED), (start + piece.size - end, FREE)]
                segment.cut(piece, sizes)
        segment.tidy()
        if len(segment.pieces) == 1 and segment.pieces[0].state == UNMAPPED:
            self.segments.remove(segment)


# Sizes around every threshold, and a few that repeat, so that exact fits and splits both happen.
sizes = st.one_of(
    st.integers(0, 2048),
    st.integers(1, 30 * MIB),
    st.sampled_from([512, 1 * MIB, 1 * MIB + 1, 2 * MIB, 10 * MIB - 511, 10 * MIB, 19 * MIB, 20 * MIB, 21 * MIB]),
    st.sampled_from([3 * MIB + 512, 5 * MIB, 7 * MIB, 12 * MIB, 15 * MIB]),
)
# A program: allocate so many bytes, or free the n-th live allocation, or empty the cache.
moves = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), sizes),
        st.tuples(st.just("allocate"), sizes),
        st.tuples(st.just("free"), st.integers(0, 1000)),
        st.tuples(st.just("empty"), st.just(0)),
    ),
    max_size=60,
)
capacities = st.one_of(st.none(), st.integers(0, 120 * MIB), st.sampled_from([40 * MIB, 64 * MIB]))


def segments(allocator: CachingAllocator, live: list[MemoryBlock]) -> list[tuple[str, list[tuple[int, int, str]]]]:
    """Every segment with memory behind some of it: its pool, and (address, size, state) of its blocks."""
    found: dict[int, tuple[str, list[tuple[int, int, str]]]] = {}
    for pool in (allocator.small, allocator.large):
        in_pool = [block for block in live if block.size and allocator.pool_of(block.size) is pool]
        for block in [*in_pool, *pool.blocks, *pool.unmapped]:
            while block.prev is not None:
                block = block.prev
            blocks = [(b.address, b.size, state_of(b)) for b in block.chain()]
            found[block.address] = (pool.name, blocks)
    return [found[address] for address in sorted(found)]


def state_of(block: MemoryBlock) -> str:
    return FREE if block.key > 0 else USED if block.key == ALLOCATED else UNMAPPED


def play(
    program: list[tuple[str, int]],
    capacity: int | None,
    expandable: bool,
    check: Callable[[CachingAllocator, list[MemoryBlock], str], None],
) -> tuple[CachingAllocator, list[MemoryBlock]]:
    """Run a program, checking after every move."""
    allocator, live = CachingAllocator(capacity, expandable), list[MemoryBlock]()
    for move, amount in program:
        if move == "allocate":
            try:
                live.append(allocator.allocate(amount))
            except OutOfMemoryError:
                move = "failed"
        elif move == "free" and live:
            allocator.free(live.pop(amount % len(live)))
        elif move == "empty":
            allocator.empty_cache()
        check(allocator, live, move)
    return allocator, live


@settings(max_examples=300, deadline=None)
@given(moves, capacities, st.booleans())
def test_it_does_at_every_move_what_the_plain_allocator_does(
    program: list[tuple[str, int]], capacity: int | None, expandable: bool
) -> None:
    oracle, pieces = OracleAllocator(capacity, expandable), list[Piece | None]()
    todo = iter(program)

    def check(allocator: CachingAllocator, live: list[MemoryBlock], move: str) -> None:
        _, amount = next(todo)
        if move == "failed":
            with pytest.raises(FullError):
                oracle.allocate(amount)
        elif move == "allocate":
            pieces.append(oracle.allocate(amount))
        elif move == "free" and pieces:
            oracle.free(pieces.pop(amount % len(pieces)))
        elif move == "empty":
            oracle.release_unused()
        expected = [(s.pool, [(s.address_of(p), p.size, p.state) for p in s.pieces]) for s in oracle.segments]
        assert segments(allocator, live) == sorted(expected, key=lambda segment: segment[1][0])
        for counter in ("allocated_bytes", "peak_allocated_bytes", "reserved_bytes", "peak_reserved_bytes", "retries"):
            assert getattr(allocator, counter) == getattr(oracle, counter), counter

    play(program, capacity, expandable, check)


@settings(max_examples=150, deadline=None)
@given(moves, capacities, st.booleans())
def test_blocks_tile_their_segments_and_never_overlap(
    program: list[tuple[str, int]], capacity: int | None, expandable: bool
) -> None:
    def check(allocator: CachingAllocator, live: list[MemoryBlock], _: str) -> None:
        end_of_last_segment = 0
        for _, blocks in segments(allocator, live):
            assert blocks[0][0] >= end_of_last_segment
            for (address, size, _), (next_address, _, _) in pairwise(blocks):
                assert address + size == next_address
            end_of_last_segment = blocks[-1][0] + blocks[-1][1]
        free = [block for _, blocks in segments(allocator, live) for block in blocks if block[2] == "free"]
        assert sum(size for _, size, _ in free) == allocator.reserved_bytes - allocator.allocated_bytes
        for pool in (allocator.small, allocator.large):
            assert pool.keys == sorted(block.key for block in pool.blocks)

    play(program, capacity, expandable, check)


@settings(max_examples=150, deadline=None)
@given(moves, capacities, st.booleans())
def test_allocated_stays_within_reserved_and_reserved_within_capacity(
    program: list[tuple[str, int]], capacity: int | None, expandable: bool
) -> None:
    def check(allocator: CachingAllocator, live: list[MemoryBlock], _: str) -> None:
        assert 0 <= allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
        assert allocator.allocated_bytes == sum(block.size for block in live)
        assert capacity is None or allocator.peak_reserved_bytes <= capacity

    play(program, capacity, expandable, check)


@settings(max_examples=150, deadline=None)
@given(moves, capacities, st.booleans())
def test_it_never_asks_the_driver_while_a_free_block_fits(
    program: list[tuple[str, int]], capacity: int | None, expandable: bool
) -> None:
    allocator, live = CachingAllocator(capacity, expandable), list[MemoryBlock]()
    for move, amount in program:
        if move == "allocate":
            size = -(-amount // 512) * 512
            pool = allocator.small if size <= MIB else allocator.large
            fits, before = any(block.size >= size for block in pool.blocks), allocator.reserved_bytes
            try:
                live.append(allocator.allocate(amount))
            except OutOfMemoryError:
                assert not fits
            if fits:
                assert allocator.reserved_bytes == before
        elif move == "free" and live:
            allocator.free(live.pop(amount % len(live)))


@settings(max_examples=100, deadline=None)
@given(moves, capacities, st.booleans())
def test_when_all_is_freed_nothing_is_allocated_and_the_cache_can_be_emptied(
    program: list[tuple[str, int]], capacity: int | None, expandable: bool
) -> None:
    allocator, live = play(program, capacity, expandable, lambda *_: None)
    for block in live:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert not allocator.small.blocks + allocator.large.blocks
