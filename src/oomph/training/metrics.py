"""`metrics.jsonl`: one object a logged step, an evaluation or an event; and the trackers that want the same figures."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import msgspec

from oomph.config import TrainConfig
from oomph.errors import InputError, Problem

FILE = "metrics.jsonl"


class Tracker(Protocol):
    """Whatever else wants to see the figures."""

    def write(self, step: int, figures: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """The run's figures, written as they come. A figure that is not finite is written as null."""

    def __init__(self, folder: Path, trackers: list[Tracker], kept_bytes: int = 0) -> None:
        """`kept_bytes` is how much of an earlier file still holds: what came after its checkpoint happens again."""
        path = folder / FILE
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(min(kept_bytes, self._file.seek(0, os.SEEK_END)))
        self._file.seek(0, os.SEEK_END)
        self._trackers = trackers

    def write(self, step: int, **figures: Any) -> None:
        """One line. Figures that are None are left out."""
        present = {name: value for name, value in figures.items() if value is not None}
        self._file.write(msgspec.json.encode({"step": step, **present}) + b"\n")
        self._file.flush()
        numbers = {name: float(value) for name, value in present.items() if isinstance(value, int | float)}
        for tracker in self._trackers:
            tracker.write(step, numbers)

    def position(self) -> int:
        """How long the file is, once all of it is on the disk."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


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
