"""Load a memory snapshot from an untrusted file without running any code in it.

A snapshot is a pickle, and a pickle can name functions to call. A snapshot needs none: it consists of plain
containers, so an unpickler that refuses every name reads all real snapshots and runs nothing.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec

from oomph.errors import InputError, Problem

Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
HOW_TO_MAKE_ONE = "a file that torch.cuda.memory._dump_snapshot wrote, after torch.cuda.memory._record_memory_history()"


class RawBlock(msgspec.Struct):
    """A block as PyTorch writes it. `frames` stays undecoded: many blocks share one list."""

    size: Size
    state: str  # active_allocated, active_pending_free (older: active_awaiting_free), inactive
    requested_size: Size | None = None  # absent in snapshots of torch 1
    frames: Any = ()


class RawSegment(msgspec.Struct):
    """A segment; its blocks are contiguous from its address on."""

    address: int
    total_size: Size
    blocks: list[RawBlock]
    device: int = 0


class RawEntry(msgspec.Struct):
    """One action in the history."""

    action: str
    size: Size = 0
    addr: int = 0
    device_free: int = 0
    frames: Any = ()
    category: str | None = None


class RawSnapshot(msgspec.Struct):
    """A whole snapshot. Older ones are a list of segments, without a history."""

    segments: list[RawSegment]
    device_traces: list[list[RawEntry]] = []


def load(path: str | os.PathLike[str]) -> RawSnapshot:
    """The snapshot in a file. Raises InputError with the reason if it has none."""
    where = os.fspath(path)
    plain = _unpickle(where)
    if isinstance(plain, list) and plain:
        plain = {"segments": plain}
    if not isinstance(plain, dict) or "segments" not in plain:
        _refuse(where, "this pickle is not a memory snapshot", _in_words(plain), HOW_TO_MAKE_ONE)
    try:
        return msgspec.convert(plain, RawSnapshot)
    except (msgspec.ValidationError, RecursionError) as error:
        _refuse(where, f"this is not a memory snapshot that PyTorch wrote: {error}", None, HOW_TO_MAKE_ONE)


class _CodeInPickleError(Exception):
    """A pickle that references a function or class."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise _CodeInPickleError(repr(f"{module}.{name}")[:80])


def _unpickle(where: str) -> object:
    try:
        data = Path(where).read_bytes()
    except OSError as error:
        _refuse(where, f"cannot be read: {error.strerror or error}")
    except ValueError as error:  # a path containing NUL
        _refuse(where, f"cannot be read: {error}")
    if not data:
        _refuse(where, "the file is empty", None, HOW_TO_MAKE_ONE)
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except _CodeInPickleError as error:
        what = "refused: it is not made of plain data alone, and nothing in it was run"
        _refuse(where, what, f"a pickle that asks for {error}", HOW_TO_MAKE_ONE)
    except Exception as error:  # damaged pickles raise almost anything: IndexError, KeyError, OverflowError, ...
        _refuse(where, f"not a whole pickle: {error or type(error).__name__}", None, HOW_TO_MAKE_ONE)


def _in_words(plain: object) -> str:
    if isinstance(plain, dict):
        keys = [repr(key)[:40] for key in list(plain)[:5]]
        return "a dict with " + ("the keys " + ", ".join(keys) if keys else "no keys")
    if isinstance(plain, list):
        return "an empty list"
    name = type(plain).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _refuse(where: str, what: str, found: str | None = None, allowed: str | None = None) -> NoReturn:
    raise InputError(Problem(where=where, what=what, found=found, allowed=allowed)) from None
