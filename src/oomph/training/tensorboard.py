"""Event files that TensorBoard reads: length, checksum, a protobuf message, checksum; nothing to install.

TFRecord frames: uint64 length, its masked CRC-32C, the bytes, their masked CRC-32C. A message is an `Event`
(1: wall time, 2: step, 3: file version, 5: summary); a summary holds values (1), each a tag (1) and a float (2).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from pathlib import Path
from typing import IO

_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """Castagnoli's CRC, as TFRecord files have it before masking."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def frame(message: bytes) -> bytes:
    """One record."""
    length = struct.pack("<Q", len(message))
    return length + _masked(length) + message + _masked(message)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _block(field: int, content: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(content)) + content


def event(step: int, figures: dict[str, float], wall_time: float) -> bytes:
    """The message of one step's figures."""
    values = b"".join(
        _block(1, _block(1, name.encode()) + b"\x15" + struct.pack("<f", value)) for name, value in figures.items()
    )
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step) + _block(5, values)


class TensorBoardTracker:
    """A file in `folder` for `tensorboard --logdir`, made with the first figures."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None

    def write(self, step: int, figures: dict[str, float]) -> None:
        now = time.time()
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"events.out.tfevents.{now:.6f}.{socket.gethostname()}"
            self._file = path.open("wb", buffering=0)
            self._append(frame(b"\x09" + struct.pack("<d", now) + _block(3, b"brain.Event:2")))
        self._append(frame(event(step, figures, now)))

    def _append(self, record: bytes) -> None:
        """A whole record or none: half of one would hide all that follow."""
        if self._file is None:
            return
        end = self._file.tell()
        try:
            written = self._file.write(record)
            if written != len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._file.truncate(end)
            self._file.seek(end)
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
