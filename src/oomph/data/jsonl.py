"""JSON lines: one object a line, the text under one key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from oomph.data.pieces import BLOCK_BYTES, Block, Broken, Part, Piece, State, whole
from oomph.data.streams import Opener, Stream
from oomph.errors import Problem, nearest

BOM = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 2**26  # memory stays bounded whatever the file holds


@dataclass(frozen=True, slots=True)
class JsonPart:
    """Whole lines of a file."""

    data: bytes
    key: str
    file: str
    first_line: int

    def pieces(self, val_fraction: float) -> Iterator[Piece | Broken]:
        decode = _decoder(self.key)
        for number, line in enumerate(self.data.split(b"\n"), start=self.first_line):
            if not line or line.isspace():
                continue
            try:
                text = decode(line).text
            except Exception:  # msgspec's own classes, or a lone surrogate: ask the slower, more patient parser
                text = _patiently(line, self.key, f"{self.file}:{number}")
            if isinstance(text, Broken):
                yield text
            elif isinstance(text, str):
                yield whole(text, val_fraction)
            else:
                yield _why_no_text(_row(line, self.key, f"{self.file}:{number}"), self.key, f"{self.file}:{number}")


@dataclass(frozen=True, slots=True)
class BrokenPart:
    """A line too long to be taken into memory."""

    problem: Problem

    def pieces(self, val_fraction: float) -> Iterator[Piece | Broken]:  # noqa: ARG002
        yield Broken(self.problem)


@dataclass(frozen=True)
class JsonSource:
    """One stream of JSON lines."""

    name: str
    identity: State
    size_bytes: int | None
    opener: Opener
    key: str

    def blocks(self, at: State, val_fraction: float) -> Iterator[Block]:  # noqa: ARG002
        """Blocks of whole lines, from a place on."""
        offset, line = int(at.get("offset", 0)), int(at.get("line", 1))
        with closing(self.opener({**at, "offset": offset})) as stream:
            yield from self._blocks(stream, offset, line, bool(at.get("skipping")))

    def _blocks(self, stream: Stream, offset: int, line: int, skipping: bool) -> Iterator[Block]:
        data = b""
        while True:
            data, at_end = _with_a_newline(stream, data)
            place = len(data) if at_end else data.rfind(b"\n") + 1
            parts: tuple[Part, ...]
            if skipping:  # the rest of a line that was too long
                place = data.find(b"\n") + 1 or len(data)
                parts, skipping = (), not data[:place].endswith(b"\n") and not at_end
            elif not place and not at_end:
                problem = Problem(
                    f"{self.name}:{line}", f"a line of more than {MAX_LINE_BYTES >> 20} MiB", allowed="shorter lines"
                )
                parts, place, skipping = (BrokenPart(problem),), len(data), True
            else:
                parts = (JsonPart(data[:place], self.key, self.name, line),)
            mark = stream.mark(data[:place])
            line += data.count(b"\n", 0, place)
            offset += place
            finished = at_end and place == len(data)
            data = data[place:]
            state: State = {"offset": offset, "line": line, **mark}
            if skipping:
                state["skipping"] = 1
            yield Block(parts, place, state, stream.read_bytes)
            if finished:
                return


def _with_a_newline(stream: Stream, data: bytes) -> tuple[bytes, bool]:
    """More of the stream, until there is a newline in it, or the end, or too much; and whether it is the end."""
    size = BLOCK_BYTES
    while True:
        data += stream.read(size - len(data))
        if len(data) < size:
            return data, True
        if size >= MAX_LINE_BYTES or b"\n" in data:
            return data, False
        size *= 2


@lru_cache
def _decoder(key: str) -> Any:
    """A parser that keeps the one key and skips over everything else."""
    import msgspec

    try:
        row = msgspec.defstruct("Row", [("text", str | None, None)], rename={"text": key})
    except ValueError:  # it takes no name with quotes or backslashes
        return _nothing
    return msgspec.json.Decoder(row).decode


def _nothing(line: bytes) -> Any:
    raise ValueError(line)


def _row(line: bytes, key: str, where: str) -> dict[str, Any] | Broken:
    """A line as Python's own parser reads it: byte order marks, broken UTF-8 and numbers of any length may be in it."""
    import json

    try:
        row = json.loads(line.removeprefix(BOM).decode(errors="replace"), parse_int=_whole_number)
    except (ValueError, RecursionError) as error:
        return Broken(Problem(where, "not JSON", found=str(error), allowed="one JSON object a line"))
    if not isinstance(row, dict):
        return Broken(Problem(where, "not an object", found=f"a {type(row).__name__}", allowed=f'{{"{key}": "..."}}'))
    return row


def _whole_number(digits: str) -> int:
    """Its value matters to nobody, and Python refuses to read a very long one."""
    return int(digits[:20])


def _patiently(line: bytes, key: str, where: str) -> str | Broken | None:
    row = _row(line, key, where)
    if isinstance(row, Broken):
        return row
    text = row.get(key)
    return text if isinstance(text, str) else None


def _why_no_text(row: dict[str, Any] | Broken, key: str, where: str) -> Piece | Broken:
    """An object without the text: an empty document where it is null, else broken."""
    if isinstance(row, Broken):
        return row
    if key in row and row[key] is None:
        return whole("", 0.0)
    if key in row:
        found = f"a {type(row[key]).__name__}"
        return Broken(Problem(where, f"'{key}' is not text", found=found, allowed="a string"))
    keys = [str(name) for name in row]
    return Broken(
        Problem(
            where,
            f"no '{key}' in it",
            found=", ".join(keys[:8]) or "an empty object",
            allowed="name the text's key with --text_key",
            nearest=nearest(key, keys),
        )
    )
