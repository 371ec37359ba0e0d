"""Parquet files, row group by row group, and datasets of the Hugging Face hub, as they stream in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from oomph.data.failure import DataError
from oomph.data.needs import need
from oomph.data.pieces import BLOCK_BYTES, Block, Broken, Rows, State
from oomph.errors import InputError, Problem, nearest

MAX_ROWS = 64  # taken from a parquet file at once; fewer where they are large
STRINGS = ("string", "large_string")  # pyarrow's names


@dataclass(frozen=True)
class ParquetSource:
    """One parquet file."""

    name: str
    identity: State
    size_bytes: int | None
    path: Path
    key: str

    def blocks(self, at: State, val_fraction: float) -> Iterator[Block]:  # noqa: ARG002
        """Rows in order, from a row group and a row on."""
        try:
            yield from self._blocks(int(at.get("group", 0)), int(at.get("row", 0)))
        except Exception as error:  # pyarrow's own classes, known only where it is installed
            if isinstance(error, OSError) or type(error).__module__.startswith("pyarrow"):
                raise self._unreadable(error) from None
            raise

    def _blocks(self, group: int, row: int) -> Iterator[Block]:
        parquet = need("pyarrow.parquet", self.name)
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
                        yield Block((Rows(texts),), size, {"group": index, "row": first + stop}, read)

    def _rows_at_once(self, group: Any) -> int:
        """As many rows as make about a block, by the size that the file gives."""
        columns = [group.column(number) for number in range(group.num_columns)]
        size: int = sum(column.total_uncompressed_size for column in columns if column.path_in_schema == self.key)
        return max(1, min(MAX_ROWS, BLOCK_BYTES * int(group.num_rows) // max(1, size)))

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
        return InputError(Problem(self.name, "cannot be read", found=str(error), allowed="a whole parquet file"))


def _by_size(column: Any, start: int) -> Iterator[tuple[tuple[bytes | None, ...], int, int]]:
    """Texts from a row on, about a block at once: (as bytes, their size, the row after them).

    Bytes, since pyarrow takes a column's word for being UTF-8.
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
        if size >= BLOCK_BYTES or row == len(column) - 1:
            yield tuple(texts), size, row + 1
            texts, size = [], 0


@dataclass(frozen=True)
class HubSource:
    """A dataset of the hub, or a folder of one, read in streaming mode: `hf:NAME[:CONFIG[:SPLIT]]`."""

    name: str
    repository: str
    config: str | None
    split: str
    key: str
    size_bytes: int | None = None

    @cached_property
    def _dataset(self) -> Any:
        datasets = need("datasets", self.name)
        try:
            builder = datasets.load_dataset_builder(self.repository, self.config)
            stream = builder.as_streaming_dataset(split=self.split)
        except Exception as error:  # the hub's and the network's many classes
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise InputError(
                Problem(self.name, "cannot be opened", found=lines[0][:300], allowed="hf:NAME[:CONFIG[:SPLIT]]")
            ) from None
        return builder, stream

    @cached_property
    def identity(self) -> State:
        """The files behind the name: on the hub their addresses hold the revision, on disk size and date do."""
        import hashlib

        from oomph.data.streams import identity

        digest = hashlib.sha256()
        for names in (self._dataset[0].config.data_files or {}).values():
            for name in names:
                digest.update(f"{name}\n".encode())
                if Path(name).is_file():
                    digest.update(repr(sorted(identity(Path(name)).items())).encode())
        return {"files_sha256": digest.hexdigest()}

    def blocks(self, at: State, val_fraction: float) -> Iterator[Block]:  # noqa: ARG002
        """Documents as they arrive; the place is the library's own state."""
        import json

        stream = self._dataset[1]
        if "state" in at:
            stream.load_state_dict(json.loads(str(at["state"])))
        texts: list[str | bytes | Broken | None] = []
        size, number = 0, int(at.get("row", 0))
        for row in self._rows(stream):
            number += 1
            text = self._text(row, number)
            texts.append(text)
            size += len(text) if isinstance(text, str) else 0
            if size >= BLOCK_BYTES:
                place: State = {"state": json.dumps(stream.state_dict()), "row": number}
                yield Block((Rows(tuple(texts)),), size, place, 0)
                texts, size = [], 0
        if texts:
            yield Block((Rows(tuple(texts)),), size, {"state": json.dumps(stream.state_dict()), "row": number}, 0)

    def _rows(self, stream: Any) -> Iterator[dict[str, Any]]:
        try:
            yield from stream
        except Exception as error:  # the connection, in as many classes as there are layers below
            lines = str(error).strip().splitlines() or [""]
            raise DataError(
                f"{self.name}: reading stopped: {type(error).__name__}: {lines[0][:300]}. "
                "What was finished before is kept: call again to go on."
            ) from None

    def _text(self, row: dict[str, Any], number: int) -> str | Broken | None:
        text = row.get(self.key)
        if isinstance(text, str) or (text is None and self.key in row):
            return text
        if self.key in row:
            kind = type(text).__name__
            problem = Problem(f"{self.name}, row {number:,}", f"no text under '{self.key}'", found=kind)
            return Broken(problem)
        raise InputError(
            Problem(
                self.name,
                f"no text under '{self.key}'",
                found=", ".join(row),
                allowed="name the text's column with --text_key",
                nearest=nearest(self.key, list(row)),
            )
        )
