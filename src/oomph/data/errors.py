"""Failures while a set is being made, and libraries that are not installed."""

from __future__ import annotations

import errno
from importlib import import_module
from typing import Any

from oomph.errors import InputError, Problem

# Which of our extras installs a library.
EXTRAS = {
    "datasets": "data",
    "numpy": "train",
    "pyarrow": "data",
    "safetensors": "train",
    "tensorboard": "track",
    "tiktoken": "train",
    "tiktoken_ext": "train",
    "tokenizers": "train",
    "zstandard": "data",
}


class DataError(Exception):
    """A full disk, a worker that died. The message says what is kept and what to do. The command exits with 3."""


def require(module: str, where: str) -> Any:
    """The imported module. Raises `InputError` at `where`, naming the extra, if its library is not installed."""
    try:
        return import_module(module)
    except ImportError:
        library = module.partition(".")[0]
        what = f"needs {library}, which is not installed; try: pip install 'oomph[{EXTRAS[library]}]'"
        raise InputError(Problem(where, what)) from None


def printable(name: object) -> str:
    """A file name that can be written anywhere: bytes that are not UTF-8 become \\xNN."""
    return str(name).encode(errors="surrogateescape").decode(errors="backslashreplace")


def is_full(error: OSError) -> bool:
    """Whether the disk or the user's quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def cannot_write(where: str, error: OSError) -> DataError:
    """The error for a failed write, with what to do about it."""
    cure = "free some disk space and run the same command again" if is_full(error) else "fix that and run it again"
    reason = error.strerror or type(error).__name__
    return DataError(f"{where}: cannot be written: {reason}. Finished work is kept: {cure}.")
