"""A run's status: whether it is running, how far it is, and why it ended."""

from __future__ import annotations

import os
import re
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec

from oomph.web.metrics import METRICS, Figures

PLAN, RESULT, LOCK = "plan.json", "result.json", ".lock"
CHECKPOINTS = "checkpoints"
_CHECKPOINT = re.compile(r"step_(\d{8,15})\.pt")
IDLE_S = 300.0  # a run without a result or a lock that has not written for this long counts as stopped
FATAL = ("not finite", "failed")  # events in metrics.jsonl that end a run
SMALLER = "out of memory"  # an event after which a run may continue with a smaller batch

State = Literal["planned", "running", "finished", "stopped", "failed"]


class Standing(msgspec.Struct, frozen=True):
    """A run's state, and the reason if it ended early."""

    state: State
    reason: str | None = None


def standing(path: Path, result: Any, last: Figures) -> Standing:
    """The status of the run in that folder, from its result, its lock and its last lines."""
    if isinstance(result, dict) and not _resumed(path):
        reason = result.get("reason")
        told = reason[:500] if isinstance(reason, str) else None
        return Standing("finished", None) if result.get("finished") else Standing("stopped", told)
    if not (path / METRICS).is_file():
        return Standing("planned")
    held = is_locked(path / LOCK)
    if held:
        return Standing("running")
    if last.last_event in FATAL or (held is False and last.last_event == SMALLER):
        return Standing("failed", f"{last.last_event}: {last.last_reason}".rstrip(": "))
    if held is False:
        return Standing("failed", "its process has ended without a result")
    silent_s = time.time() - written(path)
    if silent_s < IDLE_S:
        return Standing("running")
    return Standing("stopped", "nothing was written any more")


def is_locked(path: Path) -> bool | None:
    """Whether a trainer holds the folder's lock; None if there is none, or if it cannot be told."""
    if find_spec("fcntl") is None or path.is_symlink():
        return None
    fcntl = import_module("fcntl")
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(handle)


def steps_done(path: Path, result: Any, figures: Figures) -> int | None:
    """Steps done, from the last logged step, evaluation, event, checkpoint or result, since not every step is logged.
    None before anything is written."""
    told = [figures.steps, _checkpointed(path)]
    if isinstance(result, dict) and not _resumed(path):
        told.append(result.get("steps"))
    return max((steps for steps in told if type(steps) is int), default=None)


def written(path: Path) -> float:
    """When the run last wrote its metrics, else its plan or result: seconds since 1970, 0 if it wrote none."""
    for name in (METRICS, PLAN, RESULT):
        try:
            return (path / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


def _resumed(path: Path) -> bool:
    """Whether metrics were written after the result, which means that the run was resumed."""
    try:
        return (path / METRICS).stat().st_mtime > (path / RESULT).stat().st_mtime + 1.0
    except OSError:
        return False


def _checkpointed(path: Path) -> int | None:
    """The step of the newest checkpoint. It may not be the highest, because a run may go back to an earlier one."""
    folder = path / CHECKPOINTS
    try:
        if folder.is_symlink():
            return None
        names = [(entry.stat(follow_symlinks=False).st_mtime_ns, entry.name) for entry in os.scandir(folder)]
    except OSError:
        return None
    named = [_CHECKPOINT.fullmatch(name) for _, name in sorted(names)]
    return next((int(found[1]) for found in reversed(named) if found), None)
