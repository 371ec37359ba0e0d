"""A restarted job continues its run: torchrun's --max-restarts, Slurm's requeue.

The run's folder holds the names of the job that writes there, so that a job which was killed before its first
checkpoint does not resume an older run that it was meant to replace.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from oomph.config import LoadedConfig
from oomph.files import write_whole
from oomph.training import checkpoint
from oomph.training.folder import JOB
from oomph.training.start import Options

_REQUEUE_S = 30.0  # for Slurm to answer


def names() -> list[str]:
    """The names that launchers gave this job; the same when it is restarted."""
    found = []
    if run := os.environ.get("TORCHELASTIC_RUN_ID"):
        found.append(f"torchrun {run}" if run != "none" else f"torchrun {socket.gethostname()} {os.getppid()}")
    if job := os.environ.get("SLURM_JOB_ID"):
        found.append(f"slurm {job}")
    return found


def is_restarted() -> bool:
    """Whether torchrun or Slurm has started this job before."""
    counts = [os.environ.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")]
    return any(count.isdigit() and int(count) > 0 for count in counts)


def taken_up(loaded: LoadedConfig, options: Options) -> Options:
    """The options of a restarted job: it resumes its own run, or starts over if nothing was saved."""
    if not is_restarted() or (options.resume and not loaded.said("out_dir")):
        return options
    folder = Path(loaded.config.out_dir)
    if not set(names()).intersection(_read(folder)):
        return options
    checkpoint.recover(folder)
    if checkpoint.saved(folder):
        return replace(options, resume=folder, overwrite=False, weights=None)
    return replace(options, again=True)


def _read(folder: Path) -> list[str]:
    try:
        return (folder / JOB).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def sign(folder: Path) -> None:
    """Write this job's names into the run's folder; without any, delete those of an earlier one."""
    if found := names():
        write_whole(folder / JOB, "".join(f"{name}\n" for name in found).encode())
    else:
        with suppress(OSError):
            (folder / JOB).unlink(missing_ok=True)


def asks_for_restart(signal_name: str | None) -> bool:
    """Whether a signal means that the job will continue later: SIGUSR1, and SIGTERM in a Slurm job."""
    return signal_name == "SIGUSR1" or (signal_name == "SIGTERM" and "SLURM_JOB_ID" in os.environ)


def requeue(signal_name: str | None) -> str | None:
    """Requeue a Slurm job that got SIGUSR1, and return a message on how that went; None for anything else.

    After SIGTERM Slurm requeues by itself if it preempts.
    """
    job, command = os.environ.get("SLURM_JOB_ID"), shutil.which("scontrol")
    if signal_name != "SIGUSR1" or job is None or command is None:
        return None
    try:
        done = subprocess.run(
            [command, "requeue", job], capture_output=True, text=True, timeout=_REQUEUE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"WARNING: scontrol requeue {job} failed: {error}"
    if done.returncode:
        return f"WARNING: scontrol requeue {job} failed: {done.stderr.strip()[:200]}"
    return f"Slurm will start job {job} again"
