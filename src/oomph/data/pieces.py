"""Documents, and what of them goes to a worker at once.

A source yields blocks of about `BLOCK_BYTES`. A block holds parts, a part becomes pieces of documents in the worker,
and a block says where in the source the next one begins. A document larger than a block is cut where no tokenizer of
the GPT-2 kind would join the two sides, so that the tokens are those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Protocol

from oomph.errors import Problem

BLOCK_BYTES = 2**18  # about 30 ms of work: small enough that the last ones keep all cores busy
SPLIT_HEAD_BYTES = 2**16  # of a document, which decide its split: a document may be far larger than memory

State = dict[str, int | str]  # a place in a source: plain values, for the journal


class Piece(NamedTuple):
    """A document, or a stretch of one."""

    text: str
    is_val: bool
    begins: bool
    ends: bool
    end_of_text: bool  # the token follows
    repaired: bool  # broken UTF-8 was replaced


class Broken(NamedTuple):
    """What stands where a document should."""

    problem: Problem


class Part(Protocol):
    """What a source hands over; taken apart in the worker, so that parsing is shared out too."""

    def pieces(self, val_fraction: float) -> Iterator[Piece | Broken]: ...


@dataclass(frozen=True, slots=True)
class Block:
    """Parts for one worker at once."""

    parts: tuple[Part, ...]
    size_bytes: int
    at: State  # where the next block begins
    read_bytes: int  # of the source as it lies on the disk, up to here: for the progress


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text as it stood in a file: documents between separators, of which the first and the last may be cut."""

    data: bytes
    separator: bytes | None = None
    continues: bool = False  # the first document began in an earlier block
    ends: bool = True  # the last document ends here
    is_val: bool | None = None  # of the first document, where it is decided already
    end_of_text: bool = True

    def pieces(self, val_fraction: float) -> Iterator[Piece | Broken]:
        documents = [self.data] if self.separator is None else self.data.split(self.separator)
        last = len(documents) - 1
        for index, raw in enumerate(documents):
            continued, ends = self.continues and index == 0, self.ends or index < last
            text, repaired = decode(raw)
            decided = self.is_val if index == 0 else None
            is_val = in_val(raw, val_fraction) if decided is None else decided
            yield Piece(text, is_val, not continued, ends, ends and self.end_of_text, repaired)


@dataclass(frozen=True, slots=True)
class Rows:
    """Documents that were read as text already."""

    texts: tuple[str | bytes | Broken | None, ...]  # bytes where a format calls them text and does not see to it

    def pieces(self, val_fraction: float) -> Iterator[Piece | Broken]:
        for text in self.texts:
            if isinstance(text, Broken):
                yield text
            elif isinstance(text, bytes):
                decoded, repaired = decode(text)
                yield whole(decoded, val_fraction)._replace(repaired=repaired)
            else:
                yield whole(text or "", val_fraction)


def whole(text: str, val_fraction: float) -> Piece:
    """A document that came as one string."""
    head = text[:SPLIT_HEAD_BYTES]
    try:
        raw, repaired = head.encode(), False
        if len(text) > SPLIT_HEAD_BYTES:
            text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can carry and UTF-8 cannot
        text, repaired = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), True
        raw = text[:SPLIT_HEAD_BYTES].encode()
    return Piece(text, in_val(raw, val_fraction), True, True, True, repaired)


def decode(raw: bytes) -> tuple[str, bool]:
    """The text, with U+FFFD for what is not UTF-8, and whether there was any such."""
    try:
        return raw.decode(), False
    except UnicodeDecodeError:
        return raw.decode(errors="replace"), True


def cut(piece: Piece) -> Iterator[Piece]:
    """A piece as pieces of about a block: tokenizers' patterns fail on a run of a million spaces."""
    if len(piece.text) <= BLOCK_BYTES:
        yield piece
        return
    data = piece.text.encode()
    start, begins = 0, piece.begins
    while start < len(data):
        block = data[start : start + BLOCK_BYTES]
        last = start + len(block) == len(data)
        block = block if last else block[: cut_place(block, len(block))]
        start += len(block)
        yield Piece(
            text=block.decode(),
            is_val=piece.is_val,
            begins=begins,
            ends=last and piece.ends,
            end_of_text=last and piece.end_of_text,
            repaired=begins and piece.repaired,  # counted once a document
        )
        begins = False


def in_val(document: bytes, val_fraction: float) -> bool:
    """Whether a document belongs to the validation split: a fixed hash of its beginning, and of nothing else.

    The same document is on the same side in every set, whatever stands beside it; copies of it are never on both.
    """
    digest = blake2b(document[:SPLIT_HEAD_BYTES], digest_size=8, person=b"oomph split").digest()
    return int.from_bytes(digest, "big") < val_fraction * 2**64


def cut_place(data: bytes, limit: int) -> int:
    """Where to cut at or before `limit`: best between a letter or digit and a space or newline.

    No piece of GPT-2's pattern, nor of its successors', joins those. Failing that, between any other character and
    white space, which is exact for GPT-2's pattern; failing that, between two characters.
    """
    lowest = limit // 2
    fallback = 0
    space, newline = data.rfind(b" ", lowest, limit), data.rfind(b"\n", lowest, limit)
    while (place := max(space, newline)) > 0:
        if place == space:  # the next one back, of that kind alone: a run of either is walked through once
            space = data.rfind(b" ", lowest, place)
        else:
            newline = data.rfind(b"\n", lowest, place)
        if data[place - 1 : place].isalnum():
            return place
        if not fallback and not _ends_in_space(data[max(0, place - 4) : place]):
            fallback = place
        if fallback and limit - place > 2**14:  # text that has no such places: do not look through all of it
            break
    return fallback or _character_boundary(data, limit)


def _ends_in_space(data: bytes) -> bool:
    text = data.decode(errors="ignore")
    return not text or text[-1].isspace()


def _character_boundary(data: bytes, limit: int) -> int:
    """The last place at or before `limit` that is not inside a UTF-8 sequence."""
    for place in range(limit, max(limit - 4, 0), -1):
        if place >= len(data) or data[place] & 0xC0 != 0x80:
            break
    else:
        return limit  # four continuation bytes in a row: not UTF-8
    if place < len(data):
        return place
    # The data ends here, so the byte that would follow is not known: look back for a sequence that is not complete.
    for back in range(1, min(4, place) + 1):
        byte = data[place - back]
        if byte & 0xC0 != 0x80:
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return place - back if needed > back and place > back else place
    return place
