"""What goes wrong while the work is under way, though nothing was wrong with what was asked."""

from __future__ import annotations

import errno


class DataError(Exception):
    """A full disk, a worker that died: the message says what is kept and what to do. The command exits with 3."""


def printable(name: object) -> str:
    """A file's name as text that can be written anywhere: bytes that are not UTF-8 as \\xNN."""
    return str(name).encode(errors="surrogateescape").decode(errors="backslashreplace")


def is_full(error: OSError) -> bool:
    """Whether the disk, or the user's share of it, has no room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def cannot_write(where: str, error: OSError) -> DataError:
    """The failure of a write, with its cure."""
    cure = "free some room and call again" if is_full(error) else "mend that and call again"
    reason = error.strerror or type(error).__name__
    return DataError(f"{where}: cannot be written: {reason}. What was finished before is kept: {cure}.")
