"""Bytes of any origin as pieces of clean text that end at line ends, in constant memory.

Windows line ends, colour codes, UTF-16 (what PowerShell's `>` writes), bytes that are no text at all, and lines without
end all come out as text that the readers can go through. A carriage return stays: a progress bar writes several
"lines" over one another, and the readers take each.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import BinaryIO

PIECE_BYTES = 1 << 17
LONGEST_LINE = 1 << 16  # characters; what is longer is read in pieces of this size

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]{0,256}(?:\x07|\x1b\\)?|[@-Z\\-_])")


class Cutter:
    """Bytes as they come, cut into pieces. Each ends with a newline, but the last and those of an endless line."""

    def __init__(self) -> None:
        self._decoder: codecs.IncrementalDecoder | None = None
        self._rest = ""

    def feed(self, data: bytes) -> Iterator[str]:
        """More bytes; what stands after the last newline waits for the next."""
        if self._decoder is None:
            self._decoder = codecs.getincrementaldecoder(_encoding(data))(errors="replace")
        text = self._rest + self._decoder.decode(data)
        end = text.rfind("\n") + 1
        self._rest = text[end:]
        if end:
            yield _clean(text[:end])
        while len(self._rest) > LONGEST_LINE:
            cut = self._rest.rfind("\r", 0, LONGEST_LINE) + 1 or LONGEST_LINE
            piece, self._rest = self._rest[:cut], self._rest[cut:]
            yield _clean(piece)

    def finish(self) -> Iterator[str]:
        """What is left where the bytes end."""
        rest = self._rest + (self._decoder.decode(b"", True) if self._decoder is not None else "")
        self._rest = ""
        if rest:
            yield _clean(rest)


def pieces(stream: BinaryIO) -> Iterator[str]:
    """The stream's text in pieces."""
    cutter = Cutter()
    while data := stream.read(PIECE_BYTES):
        yield from cutter.feed(data)
    yield from cutter.finish()


def _encoding(start: bytes) -> str:
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if start[:64].count(0) * 3 > len(start[:64]) and b"\x00" in start[1:2]:
        return "utf-16-le"
    return "utf-8-sig"


def _clean(text: str) -> str:
    if "\x1b" in text:
        text = _ESCAPE.sub("", text)
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    return text
