"""What people look at while it runs: a live line in a terminal, plain lines elsewhere, all of it in log.txt."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import IO

from oomph.units import duration

_REDRAW_S = 0.1
_CLEAR = "\r\x1b[K"


class Log:
    """Lines for the terminal and the run's log.txt. Only the first rank has one that speaks."""

    def __init__(self, folder: Path | None = None, out: IO[str] | None = None, quiet: bool = False) -> None:
        self._out = out or sys.stdout
        self._quiet = quiet
        self._live = not quiet and self._out.isatty()
        self._file = (folder / "log.txt").open("a", encoding="utf-8") if folder is not None else None
        self._drawn_at = 0.0

    def line(self, text: str) -> None:
        """A line that stays."""
        if self._file is not None:
            self._file.write(text + "\n")
            self._file.flush()
        if not self._quiet:
            print(f"{_CLEAR}{text}" if self._live else text, file=self._out, flush=True)

    def step(self, text: str) -> None:
        """A step's line: the live line in a terminal, a line like any other elsewhere."""
        if not self._live:
            self.line(text)
            return
        if self._file is not None:
            self._file.write(text + "\n")
        now = time.monotonic()
        if now - self._drawn_at >= _REDRAW_S:
            self._drawn_at = now
            import shutil

            width = shutil.get_terminal_size().columns
            print(f"{_CLEAR}{text[: width - 1]}", end="", file=self._out, flush=True)

    def close(self) -> None:
        if self._live:
            print(_CLEAR, end="", file=self._out, flush=True)
        if self._file is not None:
            self._file.close()


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
