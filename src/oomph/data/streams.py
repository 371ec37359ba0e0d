"""Bytes in order from a file, a compressed file or standard input, from any place on."""

from __future__ import annotations

import hashlib
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

from oomph.data.failure import printable
from oomph.data.needs import need
from oomph.data.pieces import State
from oomph.errors import InputError, Problem

SKIP_BYTES = 2**20
ZSTANDARD_BYTES = 2**10  # of input at once: four bytes of it may stand for 128 KiB, so no more than 32 MiB come out


class Stream(Protocol):
    """Bytes from where it was opened; `read` gives fewer than asked only at the end."""

    def read(self, size: int) -> bytes: ...

    def mark(self, used: bytes) -> State:
        """What else the journal should know once `used` bytes have become documents."""
        ...

    @property
    def read_bytes(self) -> int: ...

    def close(self) -> None: ...


Opener = Callable[[State], Stream]  # opens at the state's `offset`


class FileStream:
    """A file, decompressed where its name says that it is compressed."""

    def __init__(self, path: Path, at: State) -> None:
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
        while offset > 0:  # a compressed file has no places: go through it again, which is quick beside tokenizing
            skipped = len(self._file.read(min(offset, SKIP_BYTES)))
            if not skipped:
                raise InputError(Problem(printable(self.path), "is shorter than when the work on it began"))
            offset -= skipped

    def read(self, size: int) -> bytes:
        data: bytes = self._guard(lambda: _fully(self._file, size))
        return data

    def mark(self, used: bytes) -> State:  # noqa: ARG002 - the file's size and date stand for its content
        return {}

    @property
    def read_bytes(self) -> int:
        return self._raw.tell()

    def close(self) -> None:
        self._raw.close()

    def _guard(self, action: Callable[[], Any]) -> Any:
        """Turn what the system or a decompressor raises into a message about the file."""
        try:
            return action()
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
        except Exception as error:  # zstandard's own class, known only where it is installed
            if type(error).__name__ != "ZstdError":
                raise
            reason = str(error)
        raise InputError(
            Problem(printable(self.path), "cannot be read", found=reason, allowed="a whole, readable file")
        )


class StandardInput:
    """Standard input. To go on, it is read again from its beginning and must be the same up to where work stopped."""

    def __init__(self, at: State) -> None:
        if sys.stdin is None:  # a program may be started without one
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
                    "is not what the set was made from",
                    allowed="the same input again, or --overwrite to begin anew",
                )
            )

    def read(self, size: int) -> bytes:
        data = self._fully(size)
        self._count += len(data)
        return data

    def _fully(self, size: int) -> bytes:
        try:
            return _fully(self._file, size)
        except (OSError, ValueError) as error:  # ValueError: it was closed
            reason = getattr(error, "strerror", None) or str(error)
            raise InputError(Problem("-", "standard input cannot be read", found=reason)) from None

    def mark(self, used: bytes) -> State:
        self._digest.update(used)
        return {"sha256": self._digest.hexdigest()}

    @property
    def read_bytes(self) -> int:
        return self._count

    def close(self) -> None:
        """It is not ours to close."""


def _decompressed(path: Path, raw: IO[bytes]) -> Any:
    if path.suffix.lower() == ".gz":
        import gzip

        return gzip.GzipFile(fileobj=raw)
    if path.suffix.lower() == ".zst":
        return _Zstandard(raw, need("zstandard", str(path)).ZstdDecompressor())
    return raw


class _Zstandard:
    """Frames one after another. The library's own reader takes a file that was cut short for a whole one."""

    def __init__(self, raw: IO[bytes], context: Any) -> None:
        self._raw, self._context = raw, context
        self._frame: Any = None  # the one in work; None between two
        self._input = self._output = b""
        self._given = 0  # of the output

    def read(self, size: int) -> bytes:
        while self._given == len(self._output):
            if not self._input:
                self._input = self._raw.read(ZSTANDARD_BYTES)
                if not self._input:
                    if self._frame is not None:
                        raise EOFError("the compressed file ends in the middle")
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
    """Exactly `size` bytes, or fewer at the end: pipes and raw files may give less than asked."""
    parts: list[bytes] = []
    while size > 0:
        data = file.read(size)
        if not data:
            break
        parts.append(data)
        size -= len(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def identity(path: Path) -> dict[str, int]:
    """What must stay the same between two calls that work on the same set."""
    status = os.stat(path)  # noqa: PTH116 - one call for both
    return {"size_bytes": status.st_size, "modified_ns": status.st_mtime_ns}
