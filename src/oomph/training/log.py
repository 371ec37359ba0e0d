"""What a run reports: lines for the terminal and log.txt, figures for metrics.jsonl, W&B, trackio and TensorBoard."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from oomph.config import TrainConfig
from oomph.data.errors import require
from oomph.errors import InputError, Problem
from oomph.units import duration

LOG_FILE = "log.txt"
_REDRAW_S = 0.1
_CLEAR = "\r\x1b[K"


class Log:
    """Lines for the terminal and the run's log.txt. Only the first rank prints.

    Neither a closed pipe nor a full disk stops the run: lines that cannot be written are dropped.
    """

    def __init__(
        self, folder: Path | None = None, out: IO[str] | None = None, quiet: bool = False, later: bool = False
    ) -> None:
        """`later`: keep lines until `open` provides a folder."""
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
        """Write the earlier lines, and all lines from now on, to the folder's log.txt."""
        early, self._early = self._early or [], None
        try:
            self._file = (folder / LOG_FILE).open("ab", buffering=0)
        except OSError as error:
            self._warn(error)
        for text in early:
            self.record(text)

    def line(self, text: str) -> None:
        """Print a line."""
        self.record(text)
        self._print(f"{_CLEAR}{text}\n" if self._live else f"{text}\n")

    def step(self, text: str) -> None:
        """Print a step's line: redrawn in place in a terminal, a normal line elsewhere."""
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
        """Write a line to log.txt only."""
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
            self._print(f"WARNING: {LOG_FILE} cannot be written: {error.strerror}; the run goes on\n")

    def _print(self, text: str) -> None:
        if self._quiet:
            return
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):  # closed pipe or terminal: log.txt has everything
            self._quiet, self._live = True, False
            with suppress(OSError, ValueError):  # so that Python's flush at exit does not fail
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
    """One step in one line, with the time to go at the measured pace and the planned time per step."""
    parts = [f"step {step}/{steps}", f"loss {loss:.4f}", f"{step_ms:,.0f} ms", f"{tokens_per_s:,.0f} tokens/s"]
    if mfu is not None:
        parts.append(f"mfu {100 * mfu:.1f} %")
    if memory_mib is not None:
        parts.append(f"{memory_mib:,.0f} MiB")
    planned = f" (planned: {planned_ms:,.0f} ms a step)" if planned_ms else ""
    return ", ".join([*parts, f"{duration(left_s)} to go{planned}"])


METRICS_FILE = "metrics.jsonl"
_MAX_WAITING_BYTES = 2**20
_LONGEST_LINE = 2**16


class Tracker(Protocol):
    """Another destination for the figures."""

    def write(self, step: int, figures: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """metrics.jsonl: one object per logged step, evaluation or event. A figure that is not finite becomes null.

    A full disk does not stop the run: lines wait in memory until there is space, and `warn` is called once.
    """

    def __init__(
        self, folder: Path, trackers: list[Tracker], kept_bytes: int = 0, warn: Callable[[str], None] | None = None
    ) -> None:
        """`kept_bytes` of an earlier file are kept: the steps after its checkpoint will be repeated."""
        path = folder / METRICS_FILE
        try:
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
            self._end = self._whole_lines(min(kept_bytes, self._file.seek(0, os.SEEK_END)))
            self._file.truncate(self._end)
            self._file.seek(self._end)
        except OSError as error:
            raise InputError(Problem(str(path), "cannot be written", found=error.strerror)) from None
        self._waiting = b""
        self._trackers = trackers
        self._warn, self._warned = warn, set[str]()

    def _whole_lines(self, size: int) -> int:
        """The end of the last complete line within `size` bytes: a killed process may have left half of one."""
        first = max(0, size - _LONGEST_LINE)
        self._file.seek(first)
        return first + self._file.read(size - first).rfind(b"\n") + 1

    def write(self, step: int, **figures: Any) -> None:
        """Write one line, without figures that are None."""
        present = {name: value for name, value in figures.items() if value is not None}
        self._waiting += msgspec.json.encode({"step": step, **present}) + b"\n"
        self._put()
        numbers = {name: float(value) for name, value in present.items() if isinstance(value, int | float)}
        for tracker in self._trackers:
            try:
                tracker.write(step, numbers)
            except Exception as error:  # a failing tracker must not stop the run
                self._warn_once(type(tracker).__name__, error)

    def _put(self) -> None:
        """Write the waiting lines, all or none."""
        try:
            written = self._file.write(self._waiting)
            if written != len(self._waiting):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._end)
                self._file.seek(self._end)
            if len(self._waiting) > _MAX_WAITING_BYTES:
                self._waiting = self._waiting[_MAX_WAITING_BYTES // 2 :].partition(b"\n")[2]
            self._warn_once(METRICS_FILE, error)
            return
        self._end += len(self._waiting)
        self._waiting = b""

    def _warn_once(self, what: str, error: Exception) -> None:
        if self._warn is not None and what not in self._warned:
            self._warned.add(what)
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)[:120]
            self._warn(f"WARNING: {what} cannot be written: {reason}; the run goes on")

    def position(self) -> int:
        """The file's length in bytes, after flushing it to disk."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._warn_once(METRICS_FILE, error)
        return self._end

    def close(self) -> None:
        if self._waiting:
            self._put()
        with suppress(OSError):
            self._file.close()
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:
                self._warn_once(type(tracker).__name__, error)


class RunTracker:
    """Weights & Biases, with `wandb_log`, or trackio, which has the same interface and keeps everything local."""

    def __init__(self, package: str, where: str, config: TrainConfig) -> None:
        try:
            library = import_module(package)
        except ImportError:
            what = f"needs {package}; try: pip install {package}"
            raise InputError(Problem(where, what, allowed=f"a run without {where}")) from None
        settings = msgspec.to_builtins(config)
        self._run = library.init(project=config.wandb_project, name=config.wandb_run_name, config=settings)

    def write(self, step: int, figures: dict[str, float]) -> None:
        self._run.log({"iter": step, **figures})

    def close(self) -> None:
        self._run.finish()


class TensorBoardTracker:
    """Event files in `folder` for `tensorboard --logdir`, created with the first figures."""

    def __init__(self, folder: Path) -> None:
        require("tensorboard", "--tensorboard")  # imported by torch's writer
        self._folder = folder
        self._writer: Any = None

    def write(self, step: int, figures: dict[str, float]) -> None:
        if self._writer is None:
            self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(self._folder))
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def make_trackers(config: TrainConfig, folder: Path, tensorboard: bool, trackio: bool) -> list[Tracker]:
    """The requested trackers. Raises `InputError` if their package is missing."""
    trackers: list[Tracker] = []
    if config.wandb_log:
        trackers.append(RunTracker("wandb", "--wandb_log", config))
    if trackio:
        trackers.append(RunTracker("trackio", "--trackio", config))
    if tensorboard:
        trackers.append(TensorBoardTracker(folder / "tensorboard"))
    return trackers
