"""A run's folder and its lock. docs/train.md lists the files."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from oomph.config import to_toml
from oomph.data.errors import printable
from oomph.data.manifest import MANIFEST, META_PICKLE, TOKENIZER, read_manifest
from oomph.errors import InputError, Problem
from oomph.files import write_whole
from oomph.planning.plan import Plan
from oomph.training import checkpoint
from oomph.training.log import LOG_FILE, METRICS_FILE
from oomph.training.result import Result

LOCK_FILE = ".lock"
RESULT = "result.json"
JOB = ".job"  # the torchrun or Slurm job that writes here
KEPT_TOKENIZER = "tokenizer"  # a folder
_TOKENIZER_FILES = (MANIFEST, META_PICKLE, TOKENIZER)
# Files that `oomph train` and `oomph sample` write into subfolders: nothing else in them is ever deleted.
_OURS = {
    "samples": ("seed_*.txt", "step-*.txt"),
    "tensorboard": ("events.out.tfevents.*",),
    "huggingface": ("model.safetensors", "config.json"),
    "nanogpt": (checkpoint.NANOGPT,),
    KEPT_TOKENIZER: _TOKENIZER_FILES,
    checkpoint.FOLDER: (),
}


def open_folder(out_dir: str, resumed: Path | None, overwrite: bool) -> Path:
    """The folder of a run, created if missing. Refuses one with another run in it, unless `overwrite`."""
    folder = Path(out_dir)
    held = checkpoint.saved(folder)
    same = resumed is not None and resumed.resolve() == folder.resolve()
    if (held or (folder / METRICS_FILE).exists()) and not same and not overwrite:
        found = f"its last checkpoint is {held[-1].name}" if held else f"it holds {METRICS_FILE}"
        allowed = "--resume to go on with it, --out_dir=ANOTHER, or --overwrite"
        if resumed is not None:
            allowed = f"--out_dir=ANOTHER, or none to go on in {resumed}"
        raise InputError(
            Problem(f"out_dir {out_dir!r}", "this folder already holds a run", found=found, allowed=allowed)
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(Problem(f"out_dir {out_dir!r}", "cannot be made", found=error.strerror)) from None
    return folder


def clear(folder: Path) -> None:
    """Delete the run in a folder, but not nanoGPT's ckpt.pt or files that oomph did not write."""
    checkpoint.remove(checkpoint.saved(folder))
    try:
        checkpoint.remove([folder / checkpoint.BEST, *folder.glob(f".{checkpoint.BEST}.*")])
        checkpoint.remove((folder / checkpoint.FOLDER).glob(".step_*.part"))
        for name in (METRICS_FILE, RESULT, LOG_FILE, JOB):
            (folder / name).unlink(missing_ok=True)
        for name, patterns in _OURS.items():
            for path in [path for pattern in patterns for path in (folder / name).glob(pattern)]:
                path.unlink(missing_ok=True)
            with suppress(OSError):  # not empty, or not there
                (folder / name).rmdir()
    except OSError as error:
        raise InputError(Problem(str(folder), "the old run cannot be deleted", found=error.strerror)) from None


def write_plan(folder: Path, plan: Plan, options: Mapping[str, str]) -> None:
    """Write config.toml and plan.json. `options` are the command-line options needed to repeat the run."""
    said = "".join(f" --{name}={shlex.quote(value)}" for name, value in options.items())
    head = f"# To repeat this run: oomph train config.toml --out_dir=ANOTHER{printable(said)}\n\n"
    write_whole(folder / "config.toml", (head + to_toml(plan.config)).encode())
    write_json(folder / "plan.json", plan.to_dict())


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def read_result(folder: Path) -> Result | None:
    """The result of an earlier process; None if there is no readable one."""
    try:
        return msgspec.json.decode((folder / RESULT).read_bytes(), type=Result)
    except (OSError, msgspec.MsgspecError):
        return None


def find_run(folder: Path) -> Path:
    """The newest checkpoint of a run, or `folder` itself if it is a checkpoint."""
    if folder.is_file() or checkpoint.is_folder(folder):
        return folder
    checkpoint.recover(folder)
    held = checkpoint.saved(folder)
    if not held:
        found = "no such folder" if not folder.exists() else "a folder without checkpoints"
        raise InputError(
            Problem(str(folder), "nothing to resume", found=found, allowed="a run's folder, or its checkpoint")
        )
    return held[-1]


def keep_tokenizer(data: Path, run: Path) -> None:
    """Copy the tokenizer's files into the run's folder, so that `oomph sample` needs no data."""
    manifest = read_manifest(data)
    folder = run / KEPT_TOKENIZER
    named = TOKENIZER if manifest is None else manifest.tokenizer.file or TOKENIZER
    try:
        for name in _TOKENIZER_FILES:
            (folder / name).unlink(missing_ok=True)
        for source, name in ((MANIFEST, MANIFEST), (META_PICKLE, META_PICKLE), (named, TOKENIZER)):
            if (data / source).is_file():
                folder.mkdir(exist_ok=True)
                write_whole(folder / name, (data / source).read_bytes())
    except OSError as error:
        raise InputError(Problem(str(folder), "cannot be written", found=error.strerror)) from None


class FolderLock:
    """One trainer per folder: held until `release` or until the process ends, however it ends.

    Raises `InputError` if another process holds it. Does nothing on systems and file systems without such locks.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        self._handle: int | None = None
        if find_spec("fcntl") is None:
            return
        fcntl = import_module("fcntl")
        while self._handle is None:
            try:
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                raise InputError(Problem(str(folder), "cannot be written", found=error.strerror)) from None
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found = os.read(handle, 32).decode(errors="replace").strip()
                os.close(handle)
                raise InputError(
                    Problem(
                        f"out_dir {str(folder)!r}",
                        "another oomph train is writing here",
                        found=f"process {found}" if found else None,
                        allowed="--out_dir=ANOTHER, or wait until it ends",
                    )
                ) from None
            except OSError:  # a file system without locks
                os.close(handle)
                return
            if self._is_ours(handle):
                self._handle = handle
            else:
                os.close(handle)  # its last holder deleted the file after we opened it
        with suppress(OSError):
            os.ftruncate(self._handle, 0)
            os.write(self._handle, str(os.getpid()).encode())

    def _is_ours(self, handle: int) -> bool:
        try:
            return self.path.stat().st_ino == os.fstat(handle).st_ino
        except OSError:
            return False

    def release(self) -> None:
        """Release the lock."""
        if self._handle is not None:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = None
