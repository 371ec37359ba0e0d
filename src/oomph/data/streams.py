"""Bytes in order from a file, a compressed file or standard input, from any offset."""

from __future__ import annotations

import hashlib
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

from oomph.data.errors import printable, require
from oomph.data.pieces import SourcePosition
from oomph.errors import InputError, Problem

SKIP_BYTES = 2**20
ZSTANDARD_BYTES = 2**10  # of input at a time: four bytes may expand to 128 KiB, so at most 32 MiB come out


class ByteStream(Protocol):
    """Bytes from where it was opened. `read` returns fewer than requested only at the end."""

    def read(self, size: int) -> bytes: ...

    def mark(self, used: bytes) -> SourcePosition:
        """The position for the journal to record once `used` bytes have become documents."""
        ...

    @property
    def read_bytes(self) -> int: ...

    def close(self) -> None: ...


Opener = Callable[[SourcePosition], ByteStream]  # opens at the position's `offset`


class FileStream:
    """A file, decompressed if its name ends in .gz or .zst."""

    def __init__(self, path: Path, at: SourcePosition) -> None:
        self.path = path
        self._raw: IO[bytes] = self._guard(lambda: path.open("rb", buffering=0))
        try:
            self._guard(lambda: self._go_to(int(at.get("offset", 0))))
        except BaseException:
            self._raw.close()
            raise

    def _go_to(self, offset: int) -> None:
        self._file: Any = _decompressed(self.path, self._raw)
        if self._file is self._raw:
            self._raw.seek(offset)
            return
        while offset > 0:  # a compressed file cannot seek: read it again, which is quick compared to tokenizing
            skipped = len(self._file.read(min(offset, SKIP_BYTES)))
            if not skipped:
                raise InputError(Problem(printable(self.path), "is shorter than when work on it began"))
            offset -= skipped

    def read(self, size: int) -> bytes:
        data: bytes = self._guard(lambda: _fully(self._file, size))
        return data

    def mark(self, used: bytes) -> SourcePosition:  # noqa: ARG002 - size and date identify the file
        return {}

    @property
    def read_bytes(self) -> int:
        return self._raw.tell()

    def close(self) -> None:
        self._raw.close()

    def _guard(self, action: Callable[[], Any]) -> Any:
        """Turn errors of the system or a decompressor into an `InputError` about the file."""
        try:
            return action()
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
        except Exception as error:  # zstandard's own class, known only if it is installed
            if type(error).__name__ != "ZstdError":
                raise
            reason = str(error)
        raise InputError(
            Problem(printable(self.path), "cannot be read", found=reason, allowed="a complete, readable file")
        )


class StandardInput:
    """Standard input. On resuming, it is read again from the start and must be the same up to where work stopped."""

    def __init__(self, at: SourcePosition) -> None:
        if sys.stdin is None:  # a program can be started without standard input
            raise InputError(Problem("-", "standard input is closed", allowed="text from a pipe or a file"))
        self._file = sys.stdin.buffer
        self._digest = hashlib.sha256()
        self._count = 0
        left = int(at.get("offset", 0))
        while left > 0:
            data = self._fully(min(left, SKIP_BYTES))
            if not data:
                break
            self._digest.update(data)
            left -= len(data)
            self._count += len(data)
        if "sha256" in at and self._digest.hexdigest() != at["sha256"]:
            raise InputError(
                Problem(
                    "standard input",
                    "is not the input the set was made from",
                    allowed="the same input again, or --overwrite to start over",
                )
            )

    def read(self, size: int) -> bytes:
        data = self._fully(size)
        self._count += len(data)
        return data

    def _fully(self, size: int) -> bytes:
        try:
            return _fully(self._file, size)
        except (OSError, ValueError) as error:  # ValueError: closed
            reason = getattr(error, "strerror", None) or str(error)
            raise InputError(Problem("-", "standard input cannot be read", found=reason)) from None

    def mark(self, used: bytes) -> SourcePosition:
        self._digest.update(used)
        return {"sha256": self._digest.hexdigest()}

    @property
    def read_bytes(self) -> int:
        return self._count

    def close(self) -> None:
        """Leave standard input open."""


def _decompressed(path: Path, raw: IO[bytes]) -> Any:
    if path.suffix.lower() == ".gz":
        import gzip

        return gzip.GzipFile(fileobj=raw)
    if path.suffix.lower() == ".zst":
        return _Zstandard(raw, require("zstandard", str(path)).ZstdDecompressor())
    return raw


class _Zstandard:
    """A reader of zstandard frames: unlike the library's own, it notices a truncated file."""

    def __init__(self, raw: IO[bytes], context: Any) -> None:
        self._raw, self._context = raw, context
        self._frame: Any = None  # the current frame; None between two
        self._input = self._output = b""
        self._given = 0  # bytes of the output already returned

    def read(self, size: int) -> bytes:
        while self._given == len(self._output):
            if not self._input:
                self._input = self._raw.read(ZSTANDARD_BYTES)
                if not self._input:
                    if self._frame is not None:
                        raise EOFError("the compressed file is truncated")
                    return b""
            self._frame = self._frame or self._context.decompressobj()
            self._output, self._given = self._frame.decompress(self._input), 0
            self._input = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        data = self._output[self._given : self._given + size]
        self._given += len(data)
        return data


def _fully(file: Any, size: int) -> bytes:
    """Exactly `size` bytes, or fewer at the end: one read of a pipe or raw file may return less."""
    parts: list[bytes] = []
    while size > 0:
        data = file.read(size)
        if not data:
            break
        parts.append(data)
        size -= len(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def identity(path: Path) -> dict[str, int]:
    """The file's size and modification time, which must stay the same between two runs on one set."""
    status = os.stat(path)  # noqa: PTH116 - one call for both
    return {"size_bytes": status.st_size, "modified_ns": status.st_mtime_ns}
