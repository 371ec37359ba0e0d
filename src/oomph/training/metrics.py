"""`metrics.jsonl`: one object a logged step, an evaluation or an event; and the trackers that want the same figures."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import msgspec

from oomph.config import TrainConfig
from oomph.errors import InputError, Problem

FILE = "metrics.jsonl"
_MAX_WAITING_BYTES = 2**20


class Tracker(Protocol):
    """Whatever else wants to see the figures."""

    def write(self, step: int, figures: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """The run's figures, written as they come. A figure that is not finite is written as null.

    A full disk costs no run: lines wait in memory until there is room again, and `warn` is told once.
    """

    def __init__(
        self, folder: Path, trackers: list[Tracker], kept_bytes: int = 0, warn: Callable[[str], None] | None = None
    ) -> None:
        """`kept_bytes` is how much of an earlier file still holds: what came after its checkpoint happens again."""
        path = folder / FILE
        try:
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
            self._end = min(kept_bytes, self._file.seek(0, os.SEEK_END))
            self._file.truncate(self._end)
            self._file.seek(self._end)
        except OSError as error:
            raise InputError(Problem(str(path), "cannot be written", found=error.strerror)) from None
        self._waiting = b""
        self._trackers = trackers
        self._warn, self._warned = warn, set[str]()

    def write(self, step: int, **figures: Any) -> None:
        """One line. Figures that are None are left out."""
        present = {name: value for name, value in figures.items() if value is not None}
        self._waiting += msgspec.json.encode({"step": step, **present}) + b"\n"
        self._put()
        numbers = {name: float(value) for name, value in present.items() if isinstance(value, int | float)}
        for tracker in self._trackers:
            try:
                tracker.write(step, numbers)
            except Exception as error:  # whatever a tracker dies of, the run does not
                self._trouble(type(tracker).__name__, error)

    def _put(self) -> None:
        """Write what waits, whole lines or nothing."""
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
            self._trouble(FILE, error)
            return
        self._end += len(self._waiting)
        self._waiting = b""

    def _trouble(self, what: str, error: Exception) -> None:
        if self._warn is not None and what not in self._warned:
            self._warned.add(what)
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)[:120]
            self._warn(f"WARNING: {what} cannot be written: {reason}; the run goes on")

    def position(self) -> int:
        """How long the file is, once all of it is on the disk."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._trouble(FILE, error)
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
                self._trouble(type(tracker).__name__, error)


class WandbTracker:
    """Weights & Biases, where the config says wandb_log."""

    def __init__(self, config: TrainConfig) -> None:
        try:
            wandb = import_module("wandb")
        except ImportError:
            raise InputError(
                Problem("wandb_log", "needs wandb", allowed="after: pip install wandb; or --wandb_log=False")
            ) from None
        settings = msgspec.to_builtins(config)
        self._run = wandb.init(project=config.wandb_project, name=config.wandb_run_name, config=settings)

    def write(self, step: int, figures: dict[str, float]) -> None:
        self._run.log({"iter": step, **figures})

    def close(self) -> None:
        self._run.finish()


def make_trackers(config: TrainConfig, folder: Path, tensorboard: bool) -> list[Tracker]:
    """Those that were asked for."""
    trackers: list[Tracker] = []
    if config.wandb_log:
        trackers.append(WandbTracker(config))
    if tensorboard:
        from oomph.training.tensorboard import TensorBoardTracker

        trackers.append(TensorBoardTracker(folder / "tensorboard"))
    return trackers
