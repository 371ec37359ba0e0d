"""What people look at while it runs: a live line in a terminal, plain lines elsewhere, all of it in log.txt."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from oomph.units import duration

FILE = "log.txt"
_REDRAW_S = 0.1
_CLEAR = "\r\x1b[K"


class Log:
    """Lines for the terminal and the run's log.txt. Only the first rank has one that speaks.

    Neither a reader who has gone nor a full disk ends a run: what cannot be said here is left unsaid.
    """

    def __init__(
        self, folder: Path | None = None, out: IO[str] | None = None, quiet: bool = False, later: bool = False
    ) -> None:
        """`later`: a folder will come, and wants to have what was said before."""
        self._out = out or sys.stdout
        self._quiet = quiet
        self._live = not quiet and self._out.isatty()
        self._file: IO[bytes] | None = None
        self._early: list[str] | None = [] if later else None
        self._warned = False
        self._drawn_at = 0.0
        if folder is not None:
            self.open(folder)

    def open(self, folder: Path) -> None:
        """From here on everything goes into the folder's log.txt, what was said before it first."""
        early, self._early = self._early or [], None
        try:
            self._file = (folder / FILE).open("ab", buffering=0)
        except OSError as error:
            self._warn(error)
        for text in early:
            self.record(text)

    def line(self, text: str) -> None:
        """A line that stays."""
        self.record(text)
        self._print(f"{_CLEAR}{text}\n" if self._live else f"{text}\n")

    def step(self, text: str) -> None:
        """A step's line: the live line in a terminal, a line like any other elsewhere."""
        if not self._live:
            self.line(text)
            return
        self.record(text)
        now = time.monotonic()
        if now - self._drawn_at >= _REDRAW_S:
            self._drawn_at = now
            import shutil

            self._print(f"{_CLEAR}{text[: shutil.get_terminal_size().columns - 1]}")

    def record(self, text: str) -> None:
        """A line for log.txt alone."""
        if self._early is not None:
            self._early.append(text)
        if self._file is not None:
            try:
                self._file.write(f"{text}\n".encode(errors="replace"))
            except OSError as error:
                self._warn(error)

    def close(self) -> None:
        if self._live:
            self._print(_CLEAR)
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self._print(f"WARNING: {FILE} cannot be written: {error.strerror}; the run goes on\n")

    def _print(self, text: str) -> None:
        if self._quiet:
            return
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):  # the reader or the terminal has gone: log.txt has it all
            self._quiet, self._live = True, False
            with suppress(OSError, ValueError):  # Python flushes once more at its end: let that go nowhere
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())


def step_line(
    step: int,
    steps: int,
    loss: float,
    step_ms: float,
    tokens_per_s: float,
    mfu: float | None,
    memory_mib: float | None,
    left_s: float,
    planned_ms: float | None,
) -> str:
    """One step in one line; the time left is at the pace so far, held against the plan's."""
    parts = [f"step {step}/{steps}", f"loss {loss:.4f}", f"{step_ms:,.0f} ms", f"{tokens_per_s:,.0f} tokens/s"]
    if mfu is not None:
        parts.append(f"mfu {100 * mfu:.1f} %")
    if memory_mib is not None:
        parts.append(f"{memory_mib:,.0f} MiB")
    against = f" (plan {planned_ms:,.0f} ms a step)" if planned_ms else ""
    return ", ".join([*parts, f"{duration(left_s)} left{against}"])
