"""A slow and plain caching allocator: what the quick one is held against.

Each segment is a list of [size, state] pieces in address order. Every question is answered by looking at
all of them, every change by rewriting a list, so that there is no bookkeeping to get wrong.
"""

from __future__ import annotations

MIB = 2**20
USED, FREE, UNMAPPED = "used", "free", "unmapped"


class Full(Exception):
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

    @property
    def largest_free_block_bytes(self) -> int:
        return max((p.size for s in self.segments for p in s.pieces if p.state == FREE), default=0)

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
            raise Full
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
        for segment in self.segments:
            page = 2 * MIB if segment.pool == "small" else 20 * MIB
            for piece in list(segment.pieces):
                if self.expandable and piece.state == FREE:
                    start = segment.address_of(piece) - segment.address
                    begin = -(-start // page) * page
                    end = (start + piece.size) // page * page
                    if begin < end:
                        parts = [(begin - start, FREE), (end - begin, UNMAPPED), (start + piece.size - end, FREE)]
                        segment.cut(piece, parts)
            segment.tidy()
        gone = UNMAPPED if self.expandable else FREE
        self.segments = [s for s in self.segments if not (len(s.pieces) == 1 and s.pieces[0].state == gone)]
