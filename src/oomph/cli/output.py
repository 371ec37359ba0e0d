"""Printing an answer, in the requested form and into a pipe that may be closed; collecting input errors; exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from oomph.errors import InputError, Problem

if TYPE_CHECKING:
    from oomph.report.document import Document, Picture

T = TypeVar("T")
DONE, NO, WRONG_INPUT, FAILED, INTERRUPTED = 0, 1, 2, 3, 130  # exit codes


def emit(text: str) -> None:
    """Print to standard output. A closed pipe (`oomph gpus | head`) is not an error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at exit: send that to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def emit_json(value: object) -> None:
    """Print a result as indented JSON."""
    import msgspec

    emit(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def show(
    options: argparse.Namespace,
    as_json: Callable[[], object],
    document: Callable[[], Document],
    then: tuple[str, str] | None = None,
) -> None:
    """Print an answer as requested: JSON, Markdown, everything, or one screen. `then`: the command to type next, and
    what it does."""
    if options.json:
        emit_json(as_json())
    elif getattr(options, "markdown", False):
        from oomph.report.markdown import to_markdown

        emit(to_markdown(document()))
    else:
        from oomph.report.terminal import to_text

        report = document()
        more = [] if options.all else [("--all", report.more)]
        emit(to_text(report.then(*([then] if then is not None else []), *more), options.all))


def draw(file: str, pictures: Iterable[Picture]) -> None:
    """Write pictures to a file, and say so."""
    from oomph.files import write_whole
    from oomph.report.svg import to_svg

    write_whole(Path(file), to_svg(*pictures).encode())
    print(f"wrote {file}", file=sys.stderr)


def gather(problems: list[Problem], work: Callable[[], T]) -> T | None:
    """What `work` returns, or None with its problems added to the others."""
    try:
        return work()
    except InputError as error:
        problems.extend(error.problems)
        return None


class StatusLine:
    """A progress line on standard error, only on a terminal."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Replace the line."""
        if self._live:
            from shutil import get_terminal_size  # with compression libraries, needed only on a terminal

            width = get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Erase the line."""
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
