"""Checkpoints: nanoGPT's dict in torch's zip format, with all that exact resumption needs, and a checksum.

The file stays one that nanoGPT and `torch.load` read: the SHA-256 of everything before it stands in the archive's
comment, the place that zip has for such things. It is written under another name, flushed to the disk and renamed,
so that whatever stands under a checkpoint's name is whole.
"""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import torch

from oomph.errors import InputError, Problem
from oomph.training.failure import TrainingError
from oomph.training.sound import problems_in

FOLDER = "checkpoints"
BEST = "best.pt"
NANOGPT = "ckpt.pt"  # what nanoGPT calls its only one
_NAME = re.compile(r"step_(\d{8,})\.pt")
_MARK = b"oomph sha256:"
_COMMENT_BYTES = len(_MARK) + 64
_LENGTH = _COMMENT_BYTES.to_bytes(2, "little")  # a zip's last field: how long its comment is
_BLOCK_BYTES = 2**22


class _Hashed:
    """A file that sums up what is written to it, all but the last two bytes: those become the comment's length."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sum = hashlib.sha256()
        self._tail = b""

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        if len(view) >= 2:
            self._sum.update(self._tail)
            self._sum.update(view[:-2])
            self._tail = bytes(view[-2:])
        else:
            joined = self._tail + bytes(view)
            self._sum.update(joined[:-2])
            self._tail = joined[-2:]
        self._file.write(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> None:
        """Put the checksum into the archive's comment."""
        self._file.seek(-2, os.SEEK_END)
        self._file.write(_LENGTH + _MARK + self._sum.hexdigest().encode())


def save(content: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint whole or not at all. Raises `TrainingError`; what stood there before still does."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w+b") as file:
            hashed = _Hashed(file)
            torch.save(dict(content), cast(IO[bytes], hashed))  # all it needs of a file is `write`
            hashed.finish()
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError, MemoryError) as error:  # torch wraps a failing write into a RuntimeError
        raise TrainingError(_why_not_written(path, error)) from None
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    """Delete where that can be done: what stays costs room, and no run."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make the new name last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _why_not_written(path: Path, error: Exception) -> str:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OSError):
        cure = "Free some room" if cause.errno in (errno.ENOSPC, errno.EDQUOT) else "Mend that"
        return f"{path}: cannot be written: {cause.strerror}. {cure}, then go on with --resume."
    if isinstance(error, MemoryError):
        return f"{path}: cannot be written: no memory is left for it."
    return f"{path}: cannot be written: {str(error).splitlines()[0][:200]}"


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """A checkpoint of ours or of nanoGPT's, checked, with nothing in it run. Raises `InputError` with the reason."""
    verify(path)
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0][:160]
        raise InputError(
            Problem(
                str(path),
                "refused, and nothing in it was run: it holds more than tensors and plain values",
                found=reason,
                allowed="a checkpoint of oomph train or of nanoGPT",
            )
        ) from None
    except Exception as error:  # torch raises a dozen kinds where an archive is damaged
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise InputError(Problem(str(path), "cannot be read as a checkpoint", found=reason)) from None
    problems = problems_in(content, str(path))
    if problems:
        raise InputError(problems)
    checked: dict[str, Any] = content
    return checked


def verify(path: Path) -> None:
    """Refuse a checkpoint of ours that is not, byte by byte, what was written."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _COMMENT_BYTES - 2))
            end = file.read()
            if end[:2] != _LENGTH or not end[2:].startswith(_MARK):
                file.seek(0)
                _refuse_unmarked(path, file.read(4))
                return
            summed = _sum(file, size - len(end))
    except OSError as error:
        raise InputError(Problem(str(path), "cannot be read", found=error.strerror)) from None
    if summed != end[2 + len(_MARK) :].decode(errors="replace"):
        raise InputError(
            Problem(str(path), "damaged: its checksum is wrong", allowed="an older checkpoint: name it with --resume")
        )


def _refuse_unmarked(path: Path, head: bytes) -> None:
    """Without a checksum it is nanoGPT's, unless its name says that it is ours."""
    if head != b"PK\x03\x04":
        raise InputError(Problem(str(path), "not a checkpoint in torch's zip format", found=f"it begins with {head!r}"))
    if _NAME.fullmatch(path.name) or path.name == BEST:
        raise InputError(
            Problem(
                str(path),
                "cut short: the checksum at its end is missing",
                allowed="an older checkpoint: name it with --resume",
            )
        )


def _sum(file: IO[bytes], size: int) -> str:
    file.seek(0)
    summed = hashlib.sha256()
    while size > 0 and (block := file.read(min(size, _BLOCK_BYTES))):
        summed.update(block)
        size -= len(block)
    return summed.hexdigest()


def path_of(run: Path, step: int) -> Path:
    """Where the checkpoint after that many steps stands."""
    return run / FOLDER / f"step_{step:08d}.pt"


def saved(run: Path) -> list[Path]:
    """A run's checkpoints, oldest first; nanoGPT's only one where there are none of ours."""
    try:
        found = [path for path in (run / FOLDER).iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        found = []
    if not found and (run / NANOGPT).is_file():
        return [run / NANOGPT]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The number of steps in a checkpoint's name; -1 where it has none."""
    named = _NAME.fullmatch(path.name)
    return int(named[1]) if named else -1


def run_of(path: Path) -> Path:
    """The folder of the run that a checkpoint, or the folder itself, belongs to."""
    if path.is_dir():
        return path
    return path.parent.parent if path.parent.name == FOLDER else path.parent


def remove(paths: Iterable[Path]) -> None:
    """Delete checkpoints; nanoGPT's only one is never touched."""
    for path in paths:
        if path.name != NANOGPT:
            _remove(path)


def keep_last(run: Path, count: int) -> None:
    """Delete all but the newest, and what a killed process left unfinished."""
    remove(saved(run)[:-count])
    for path in (*(run / FOLDER).glob(".step_*.part"), *run.glob(f".{BEST}.*")):
        _remove(path)


def mark_best(run: Path, path: Path) -> None:
    """Let best.pt be this checkpoint: a second name for the same bytes, so that it costs no room while both stand.

    Raises `TrainingError`; what was the best before still is.
    """
    temporary = run / f".{BEST}.{os.getpid()}"
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:  # a file system without hard links
            import shutil

            shutil.copyfile(path, temporary)
            with temporary.open("rb") as copy:
                os.fsync(copy.fileno())
        temporary.replace(run / BEST)
        _sync_folder(run)
    except OSError as error:
        _remove(temporary)
        raise TrainingError(_why_not_written(run / BEST, error)) from None


def best_of(run: Path) -> tuple[int, float] | None:
    """The step and the validation loss of best.pt; None where there is none that can be read."""
    try:
        content = torch.load(run / BEST, map_location="cpu", weights_only=True, mmap=True)
        return int(content["iter_num"]), float(content["best_val_loss"])
    except Exception:  # torch raises a dozen kinds where an archive is damaged
        return None
