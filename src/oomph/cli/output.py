"""Printing an answer so that a reader who has left does not change it, and gathering what is wrong with a question."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from shutil import get_terminal_size
from typing import TypeVar

from oomph.errors import InputError, Problem

T = TypeVar("T")


def emit(text: str) -> None:
    """Print to standard output. Where its reader has gone (`oomph gpus | head`), go on without it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at its end: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def emit_json(value: object) -> None:
    """Print a result as indented JSON."""
    import msgspec

    emit(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def gather(problems: list[Problem], work: Callable[[], T]) -> T | None:
    """What `work` returns, or None with its problems added to the others."""
    try:
        return work()
    except InputError as error:
        problems.extend(error.problems)
        return None


class Line:
    """One line of standard error that says what goes on; nothing where nobody looks."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Say this in place of what was said before, on no more than one line."""
        if self._live:
            width = get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave the line clean."""
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
