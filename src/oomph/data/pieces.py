"""Documents, and the chunks of them that go to a worker.

A source yields chunks of about `CHUNK_BYTES`. A chunk holds parts; the worker turns each part into pieces of documents.
A chunk also says where in the source the next one begins. A document larger than a chunk is cut where GPT-2's pattern
and its successors never join the two sides, so the tokens are those of the uncut document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Protocol

from oomph.errors import Problem

CHUNK_BYTES = 2**18  # about 30 ms of work: small enough that all cores stay busy to the end
SPLIT_HEAD_BYTES = 2**16  # the start of a document, which decides its split: the rest may not fit in memory

SourcePosition = dict[str, int | str]  # a position in a source, as plain values for the journal
Identity = dict[str, int | str]  # properties of a source that must not change between two runs on one set


class Piece(NamedTuple):
    """A document, or a part of one."""

    text: str
    is_val: bool
    begins: bool
    ends: bool
    end_of_text: bool  # the end-of-text token follows
    repaired: bool  # invalid UTF-8 was replaced


class BrokenRow(NamedTuple):
    """A row that is not a document, and why."""

    problem: Problem


class ChunkPart(Protocol):
    """A part of a chunk, parsed in the worker, so that parsing is parallel too."""

    def pieces(self, val_fraction: float) -> Iterator[Piece | BrokenRow]: ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """Work for one worker."""

    parts: tuple[ChunkPart, ...]
    size_bytes: int
    at: SourcePosition  # where the next chunk begins
    read_bytes: int  # of the source file so far, as stored on disk; for the progress line


@dataclass(frozen=True, slots=True)
class TextPart:
    """Raw text from a file: documents between separators, of which the first and last may be cut."""

    data: bytes
    separator: bytes | None = None
    continues: bool = False  # the first document began in an earlier chunk
    ends: bool = True  # the last document ends here
    is_val: bool | None = None  # split of the first document, if already decided
    end_of_text: bool = True

    def pieces(self, val_fraction: float) -> Iterator[Piece | BrokenRow]:
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
    """Documents that were already read as text."""

    texts: tuple[str | bytes | BrokenRow | None, ...]  # bytes: a format's strings that may not be UTF-8

    def pieces(self, val_fraction: float) -> Iterator[Piece | BrokenRow]:
        for text in self.texts:
            if isinstance(text, BrokenRow):
                yield text
            elif isinstance(text, bytes):
                decoded, repaired = decode(text)
                yield whole(decoded, val_fraction)._replace(repaired=repaired)
            else:
                yield whole(text or "", val_fraction)


def whole(text: str, val_fraction: float) -> Piece:
    """A whole document as one piece."""
    head = text[:SPLIT_HEAD_BYTES]
    try:
        raw, repaired = head.encode(), False
        if len(text) > SPLIT_HEAD_BYTES:
            text.encode()
    except UnicodeEncodeError:  # half a surrogate pair: valid in JSON, not in UTF-8
        text, repaired = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), True
        raw = text[:SPLIT_HEAD_BYTES].encode()
    return Piece(text, in_val(raw, val_fraction), True, True, True, repaired)


def decode(raw: bytes) -> tuple[str, bool]:
    """The text with U+FFFD for invalid UTF-8, and whether there was any."""
    try:
        return raw.decode(), False
    except UnicodeDecodeError:
        return raw.decode(errors="replace"), True


def cut(piece: Piece) -> Iterator[Piece]:
    """The piece cut into pieces of about a chunk at most: tokenizers' patterns fail on a million spaces in a row."""
    if len(piece.text) <= CHUNK_BYTES:
        yield piece
        return
    data = piece.text.encode()
    start, begins = 0, piece.begins
    while start < len(data):
        chunk = data[start : start + CHUNK_BYTES]
        last = start + len(chunk) == len(data)
        chunk = chunk if last else chunk[: cut_place(chunk, len(chunk))]
        start += len(chunk)
        yield Piece(
            text=chunk.decode(),
            is_val=piece.is_val,
            begins=begins,
            ends=last and piece.ends,
            end_of_text=last and piece.end_of_text,
            repaired=begins and piece.repaired,  # counted once per document
        )
        begins = False


def in_val(document: bytes, val_fraction: float) -> bool:
    """Whether a document belongs to the validation split: decided only by a fixed hash of its beginning.

    So a document is on the same side in every set, and its copies are never on both.
    """
    digest = blake2b(document[:SPLIT_HEAD_BYTES], digest_size=8, person=b"oomph split").digest()
    return int.from_bytes(digest, "big") < val_fraction * 2**64


def cut_place(data: bytes, limit: int) -> int:
    """Where to cut, at or before `limit`: preferably between a letter or digit and a space or newline.

    Neither GPT-2's pattern nor its successors' join those. Failing that, between any other character and white space,
    which is exact for GPT-2's pattern; failing that, between two characters.
    """
    lowest = limit // 2
    fallback = 0
    space, newline = data.rfind(b" ", lowest, limit), data.rfind(b"\n", lowest, limit)
    while (place := max(space, newline)) > 0:
        if place == space:  # look further back for that kind only, so a run of either is scanned once
            space = data.rfind(b" ", lowest, place)
        else:
            newline = data.rfind(b"\n", lowest, place)
        if data[place - 1 : place].isalnum():
            return place
        if not fallback and not _ends_in_space(data[max(0, place - 4) : place]):
            fallback = place
        if fallback and limit - place > 2**14:  # text without a good place: do not scan all of it
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
    # The data ends here and the next byte is unknown: look back for an incomplete sequence.
    for back in range(1, min(4, place) + 1):
        byte = data[place - back]
        if byte & 0xC0 != 0x80:
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return place - back if needed > back and place > back else place
    return place
