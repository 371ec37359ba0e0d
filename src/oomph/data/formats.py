"""The formats of documents: plain text, JSON lines, parquet files, datasets on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from oomph.data.errors import DataError, require
from oomph.data.pieces import (
    CHUNK_BYTES,
    BrokenRow,
    Chunk,
    ChunkPart,
    Identity,
    Piece,
    Rows,
    SourcePosition,
    TextPart,
    cut_place,
    in_val,
    whole,
)
from oomph.data.streams import ByteStream, Opener
from oomph.errors import InputError, Problem, nearest


@dataclass(frozen=True)
class TextSource:
    """Plain text: one document, or many between separators. `start`, `end` and `is_val` split a single text in two."""

    name: str
    identity: Identity
    size_bytes: int | None
    opener: Opener
    separator: bytes | None = None
    start: int = 0
    end: int | None = None
    is_val: bool | None = None

    def chunks(self, at: SourcePosition, val_fraction: float) -> Iterator[Chunk]:
        """Chunks from a position. Each depends only on its position, so a resumed run cuts in the same places."""
        offset = int(at.get("offset", self.start))
        open_split: bool | None = bool(at["val"]) if "val" in at else None  # for a document begun in an earlier chunk
        with closing(self.opener({**at, "offset": offset})) as stream:
            yield from self._chunks(stream, offset, open_split, val_fraction)

    def _chunks(self, stream: ByteStream, offset: int, open_split: bool | None, val_fraction: float) -> Iterator[Chunk]:
        data = b""
        while True:
            wanted = CHUNK_BYTES if self.end is None else min(CHUNK_BYTES, self.end - offset)
            data += stream.read(wanted - len(data))
            at_end = len(data) < CHUNK_BYTES
            part, used, open_split = self._part(data, at_end, open_split, val_fraction)
            mark = stream.mark(data[:used])
            offset += used
            data = data[used:]
            place: SourcePosition = {"offset": offset, **mark}
            if open_split is not None:
                place["val"] = int(open_split)
            yield Chunk((part,), used, place, stream.read_bytes)
            if at_end:
                return

    def _part(
        self, data: bytes, at_end: bool, open_split: bool | None, val_fraction: float
    ) -> tuple[TextPart, int, bool | None]:
        """The next part, how many bytes it uses, and the split of a document it leaves unfinished."""
        continues = open_split is not None
        split = self.is_val if open_split is None else open_split
        eot = self.is_val is None
        if at_end:
            return TextPart(data, self.separator, continues, True, split, eot), len(data), None
        if self.separator is not None and self.separator in data:
            # Not rfind: of three newlines the first two are the separator, not the last two.
            place = len(data) - len(data.split(self.separator)[-1])
            part = TextPart(data[: place - len(self.separator)], self.separator, continues, True, split, eot)
            return part, place, None
        # A separator may begin in the last bytes: cut before it.
        place = cut_place(data, len(data) - len(self.separator or b" ") + 1)
        if split is None:
            split = in_val(data, val_fraction)
        return TextPart(data[:place], None, continues, False, split, eot), place, split


BOM = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 2**26  # bounds memory whatever the file holds


@dataclass(frozen=True, slots=True)
class JsonPart:
    """Whole lines of a JSON lines file."""

    data: bytes
    key: str
    file: str
    first_line: int

    def pieces(self, val_fraction: float) -> Iterator[Piece | BrokenRow]:
        decode = _decoder(self.key)
        for number, line in enumerate(self.data.split(b"\n"), start=self.first_line):
            if not line or line.isspace():
                continue
            try:
                text = decode(line).text
            except Exception:  # msgspec's errors, or a lone surrogate: try Python's slower, more lenient parser
                text = _leniently(line, self.key, f"{self.file}:{number}")
            if isinstance(text, BrokenRow):
                yield text
            elif isinstance(text, str):
                yield whole(text, val_fraction)
            else:
                yield _why_no_text(_row(line, self.key, f"{self.file}:{number}"), self.key, f"{self.file}:{number}")


@dataclass(frozen=True, slots=True)
class BrokenPart:
    """A line too long to read into memory."""

    problem: Problem

    def pieces(self, val_fraction: float) -> Iterator[Piece | BrokenRow]:  # noqa: ARG002
        yield BrokenRow(self.problem)


@dataclass(frozen=True)
class JsonSource:
    """JSON lines: one object per line, the text under one key."""

    name: str
    identity: Identity
    size_bytes: int | None
    opener: Opener
    key: str

    def chunks(self, at: SourcePosition, val_fraction: float) -> Iterator[Chunk]:  # noqa: ARG002
        """Chunks of whole lines, from a position."""
        offset, line = int(at.get("offset", 0)), int(at.get("line", 1))
        with closing(self.opener({**at, "offset": offset})) as stream:
            yield from self._chunks(stream, offset, line, bool(at.get("skipping")))

    def _chunks(self, stream: ByteStream, offset: int, line: int, skipping: bool) -> Iterator[Chunk]:
        data = b""
        while True:
            data, at_end = _with_a_newline(stream, data)
            place = len(data) if at_end else data.rfind(b"\n") + 1
            parts: tuple[ChunkPart, ...]
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
            state: SourcePosition = {"offset": offset, "line": line, **mark}
            if skipping:
                state["skipping"] = 1
            yield Chunk(parts, place, state, stream.read_bytes)
            if finished:
                return


def _with_a_newline(stream: ByteStream, data: bytes) -> tuple[bytes, bool]:
    """`data` and more of the stream up to a newline, the end or the limit; and whether the stream has ended."""
    size = CHUNK_BYTES
    while True:
        data += stream.read(size - len(data))
        if len(data) < size:
            return data, True
        if size >= MAX_LINE_BYTES or b"\n" in data:
            return data, False
        size *= 2


@lru_cache
def _decoder(key: str) -> Any:
    """A parser that keeps one key and skips everything else."""
    import msgspec

    try:
        row = msgspec.defstruct("Row", [("text", str | None, None)], rename={"text": key})
    except ValueError:  # msgspec accepts no name with quotes or backslashes
        return _decode_nothing
    return msgspec.json.Decoder(row).decode


def _decode_nothing(line: bytes) -> Any:
    raise ValueError(line)


def _row(line: bytes, key: str, where: str) -> dict[str, Any] | BrokenRow:
    """A line parsed by Python's json, which allows byte order marks, invalid UTF-8 and numbers of any length."""
    import json

    try:
        row = json.loads(line.removeprefix(BOM).decode(errors="replace"), parse_int=_whole_number)
    except (ValueError, RecursionError) as error:
        return BrokenRow(Problem(where, "not JSON", found=str(error), allowed="one JSON object a line"))
    if not isinstance(row, dict):
        return BrokenRow(
            Problem(where, "not an object", found=f"a {type(row).__name__}", allowed=f'{{"{key}": "..."}}')
        )
    return row


def _whole_number(digits: str) -> int:
    """The first 20 digits' value: the number is not used, and Python refuses to parse very long ones."""
    return int(digits[:20])


def _leniently(line: bytes, key: str, where: str) -> str | BrokenRow | None:
    row = _row(line, key, where)
    if isinstance(row, BrokenRow):
        return row
    text = row.get(key)
    return text if isinstance(text, str) else None


def _why_no_text(row: dict[str, Any] | BrokenRow, key: str, where: str) -> Piece | BrokenRow:
    """The piece for an object without text under the key: an empty document if it is null, else a broken row."""
    if isinstance(row, BrokenRow):
        return row
    if key in row and row[key] is None:
        return whole("", 0.0)
    if key in row:
        found = f"a {type(row[key]).__name__}"
        return BrokenRow(Problem(where, f"'{key}' is not text", found=found, allowed="a string"))
    keys = [str(name) for name in row]
    return BrokenRow(
        Problem(
            where,
            f"no key '{key}'",
            found=", ".join(keys[:8]) or "an empty object",
            allowed="name the text's key with --text_key",
            nearest=nearest(key, keys),
        )
    )


MAX_ROWS = 64  # read from a parquet file at a time; fewer if they are large
STRINGS = ("string", "large_string")  # pyarrow's names


@dataclass(frozen=True)
class ParquetSource:
    """A parquet file, read row group by row group."""

    name: str
    identity: Identity
    size_bytes: int | None
    path: Path
    key: str

    def chunks(self, at: SourcePosition, val_fraction: float) -> Iterator[Chunk]:  # noqa: ARG002
        """Rows in order, from a row group and a row."""
        try:
            yield from self._chunks(int(at.get("group", 0)), int(at.get("row", 0)))
        except Exception as error:  # pyarrow's own classes, known only if it is installed
            if isinstance(error, OSError) or type(error).__module__.startswith("pyarrow"):
                raise self._unreadable(error) from None
            raise

    def _chunks(self, group: int, row: int) -> Iterator[Chunk]:
        parquet = require("pyarrow.parquet", self.name)
        with parquet.ParquetFile(self.path, buffer_size=2**20, pre_buffer=False) as file:
            self._check_column(file)
            groups = file.num_row_groups
            for index in range(group, groups):
                seen = 0
                rows = self._rows_at_once(file.metadata.row_group(index))
                read = (self.size_bytes or 0) * index // groups
                for batch in file.iter_batches(rows, row_groups=[index], columns=[self.key], use_threads=False):
                    first, seen = seen, seen + batch.num_rows
                    done = row - first if index == group else 0
                    for texts, size, stop in _by_size(batch.column(0), max(0, done)):
                        yield Chunk((Rows(texts),), size, {"group": index, "row": first + stop}, read)

    def _rows_at_once(self, group: Any) -> int:
        """How many rows make about one chunk, by the sizes that the file states."""
        columns = [group.column(number) for number in range(group.num_columns)]
        size: int = sum(column.total_uncompressed_size for column in columns if column.path_in_schema == self.key)
        return max(1, min(MAX_ROWS, CHUNK_BYTES * int(group.num_rows) // max(1, size)))

    def _check_column(self, file: Any) -> None:
        names: list[str] = file.schema_arrow.names
        if self.key not in names:
            raise InputError(
                Problem(
                    self.name,
                    f"no column '{self.key}'",
                    found=", ".join(names),
                    allowed="name the text's column with --text_key",
                    nearest=nearest(self.key, names),
                )
            )
        if names.count(self.key) > 1:
            raise InputError(Problem(self.name, f"more than one column '{self.key}'", allowed="one"))
        kind = str(file.schema_arrow.field(self.key).type)
        if kind not in STRINGS and not kind.startswith(tuple(f"dictionary<values={name}," for name in STRINGS)):
            raise InputError(Problem(self.name, f"column '{self.key}' is not text", found=kind, allowed="string"))

    def _unreadable(self, error: Exception) -> InputError:
        return InputError(Problem(self.name, "cannot be read", found=str(error), allowed="a complete parquet file"))


def _by_size(column: Any, start: int) -> Iterator[tuple[tuple[bytes | None, ...], int, int]]:
    """Texts from row `start`, about a chunk at a time: (as bytes, their size, the row after them).

    As bytes, because pyarrow does not check that a string column is UTF-8.
    """
    if hasattr(column, "dictionary_decode"):
        column = column.dictionary_decode()
    column = column.cast("large_binary" if str(column.type) == "large_string" else "binary")
    texts: list[bytes | None] = []
    size = 0
    for row in range(start, len(column)):
        text = column[row].as_py()
        texts.append(text)
        size += len(text or b"")
        if size >= CHUNK_BYTES or row == len(column) - 1:
            yield tuple(texts), size, row + 1
            texts, size = [], 0


@dataclass(frozen=True)
class HubSource:
    """A dataset on the Hugging Face hub, or a local copy, streamed: `hf:NAME[:CONFIG[:SPLIT]]`."""

    name: str
    repository: str
    config: str | None
    split: str
    key: str
    size_bytes: int | None = None

    @cached_property
    def _dataset(self) -> Any:
        datasets = require("datasets", self.name)
        try:
            builder = datasets.load_dataset_builder(self.repository, self.config)
            stream = builder.as_streaming_dataset(split=self.split)
        except Exception as error:  # the hub and the network raise many classes
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise InputError(
                Problem(self.name, "cannot be opened", found=lines[0][:300], allowed="hf:NAME[:CONFIG[:SPLIT]]")
            ) from None
        return builder, stream

    @cached_property
    def identity(self) -> Identity:
        """The files behind the name: hub URLs contain the revision, local files have size and date."""
        import hashlib

        from oomph.data.streams import identity

        digest = hashlib.sha256()
        for names in (self._dataset[0].config.data_files or {}).values():
            for name in names:
                digest.update(f"{name}\n".encode())
                if Path(name).is_file():
                    digest.update(repr(sorted(identity(Path(name)).items())).encode())
        return {"files_sha256": digest.hexdigest()}

    def chunks(self, at: SourcePosition, val_fraction: float) -> Iterator[Chunk]:  # noqa: ARG002
        """Documents as they stream in; the position is the library's own state."""
        import json

        stream = self._dataset[1]
        if "state" in at:
            stream.load_state_dict(json.loads(str(at["state"])))
        texts: list[str | bytes | BrokenRow | None] = []
        size, number = 0, int(at.get("row", 0))
        for row in self._rows(stream):
            number += 1
            text = self._text(row, number)
            texts.append(text)
            size += len(text) if isinstance(text, str) else 0
            if size >= CHUNK_BYTES:
                place: SourcePosition = {"state": json.dumps(stream.state_dict()), "row": number}
                yield Chunk((Rows(tuple(texts)),), size, place, 0)
                texts, size = [], 0
        if texts:
            yield Chunk((Rows(tuple(texts)),), size, {"state": json.dumps(stream.state_dict()), "row": number}, 0)

    def _rows(self, stream: Any) -> Iterator[dict[str, Any]]:
        try:
            yield from stream
        except Exception as error:  # every layer below raises its own classes
            lines = str(error).strip().splitlines() or [""]
            raise DataError(
                f"{self.name}: reading stopped: {type(error).__name__}: {lines[0][:300]}. "
                "Finished work is kept: run the same command again to go on."
            ) from None

    def _text(self, row: dict[str, Any], number: int) -> str | BrokenRow | None:
        text = row.get(self.key)
        if isinstance(text, str) or (text is None and self.key in row):
            return text
        if self.key in row:
            kind = type(text).__name__
            problem = Problem(f"{self.name}, row {number:,}", f"no text under '{self.key}'", found=kind)
            return BrokenRow(problem)
        raise InputError(
            Problem(
                self.name,
                f"no text under '{self.key}'",
                found=", ".join(row),
                allowed="name the text's column with --text_key",
                nearest=nearest(self.key, list(row)),
            )
        )
