"""Checkpoint files: nanoGPT's dict in torch's zip format, plus what exact resuming needs, and a checksum.

nanoGPT and `torch.load` can read the file: the SHA-256 of everything before it is in the archive's comment. It is
written under another name, flushed to disk and renamed, so a file with a checkpoint's name is always complete. Ranks
that share a model write a folder instead, with each rank's part in it (`parts`).
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import torch

from oomph import config as configs
from oomph.config import KEYS, LoadedConfig
from oomph.data.errors import is_full
from oomph.errors import InputError, Problem
from oomph.files import sync_folder
from oomph.training.entries import problems_in
from oomph.training.errors import DiskFullError, TrainingError

FOLDER = "checkpoints"
BEST = "best.pt"
NANOGPT = "ckpt.pt"  # nanoGPT's only checkpoint
RUN = "run.pt"  # in a checkpoint's folder: what is not sharded
_NAME = re.compile(r"step_(\d{8,})\.pt")
_MARK = b"oomph sha256:"
_COMMENT_BYTES = len(_MARK) + 64
_LENGTH = _COMMENT_BYTES.to_bytes(2, "little")  # a zip's last field: the length of its comment
_BLOCK_BYTES = 2**22


class _Hashed:
    """A file that hashes what is written to it, except the last two bytes, which become the comment's length."""

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
        """Write the checksum into the archive's comment."""
        self._file.seek(-2, os.SEEK_END)
        self._file.write(_LENGTH + _MARK + self._sum.hexdigest().encode())


def save(content: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint, all or nothing. Raises `TrainingError` and leaves an older file as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w+b") as file:
            hashed = _Hashed(file)
            torch.save(dict(content), cast(IO[bytes], hashed))  # torch.save only needs `write`
            hashed.finish()
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except (OSError, RuntimeError, MemoryError) as error:  # torch turns a failed write into a RuntimeError
        raise not_written(path, error) from None
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    """Delete if possible: a leftover only costs disk space. A folder is renamed first, so that none is half deleted."""
    with suppress(OSError):
        if not path.is_dir():
            path.unlink(missing_ok=True)
            return
        hidden = path if path.name.startswith(".") else path.with_name(f".{path.name}.{os.getpid()}.part")
        path.rename(hidden)
        (hidden / RUN).unlink(missing_ok=True)
        shutil.rmtree(hidden)


def name_folder(part: Path, path: Path) -> None:
    """Give a complete folder its name, replacing another checkpoint of that name."""
    _remove(path)
    part.rename(path)
    sync_folder(path.parent)


def is_folder(path: Path) -> bool:
    """Whether it is a checkpoint of ranks that shared a model."""
    return (path / RUN).is_file()


def not_written(path: Path, error: Exception) -> TrainingError:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OSError):
        full = is_full(cause)
        cure = "Free some disk space" if full else "Fix that"
        kind = DiskFullError if full else TrainingError
        return kind(f"{path}: cannot be written: {cause.strerror or cause}. {cure}, then go on with --resume.")
    if isinstance(error, MemoryError):
        return TrainingError(f"{path}: cannot be written: out of memory.")
    return TrainingError(f"{path}: cannot be written: {str(error).splitlines()[0][:200]}")


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """A checkpoint of oomph or nanoGPT, verified, its tensors mapped from the file. Executes no code in it.

    Raises `InputError` if it is invalid.
    """
    verify(path)
    return load_file(path, device)


def load_file(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The same for a file whose checksum is known to be right."""
    try:
        content = torch.load(path, map_location=device, weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0][:160]
        raise InputError(
            Problem(
                str(path),
                "refused without executing it: it holds more than tensors and plain values",
                found=reason,
                allowed="a checkpoint of oomph train or nanoGPT",
            )
        ) from None
    except Exception as error:  # torch raises many classes for a damaged archive
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise InputError(Problem(str(path), "cannot be read as a checkpoint", found=reason)) from None
    problems = problems_in(content, str(path))
    if problems:
        raise InputError(problems)
    checked: dict[str, Any] = content
    return checked


def verify(path: Path) -> None:
    """Refuse one of our checkpoints if any byte has changed since it was written."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _COMMENT_BYTES - 2))
            end = file.read()
            if end[:2] != _LENGTH or not end[2:].startswith(_MARK):
                file.seek(0)
                _refuse_without_checksum(path, file.read(4))
                return
            summed = sha256(file, size - len(end))
    except OSError as error:
        raise InputError(Problem(str(path), "cannot be read", found=error.strerror)) from None
    if summed != end[2 + len(_MARK) :].decode(errors="replace"):
        raise InputError(Problem(str(path), "damaged: wrong checksum", allowed="--resume with an older checkpoint"))


def _refuse_without_checksum(path: Path, head: bytes) -> None:
    """Refuse a file without a checksum if its name is one of ours; otherwise it is nanoGPT's."""
    if head != b"PK\x03\x04":
        raise InputError(Problem(str(path), "not a checkpoint in torch's zip format", found=f"it begins with {head!r}"))
    if _NAME.fullmatch(path.name) or path.name in (BEST, RUN):
        raise InputError(
            Problem(
                str(path),
                "truncated: the checksum at its end is missing",
                allowed="--resume with an older checkpoint",
            )
        )


def sha256(file: IO[bytes], size: int) -> str:
    """The SHA-256 of the file's first `size` bytes."""
    file.seek(0)
    summed = hashlib.sha256()
    while size > 0 and (block := file.read(min(size, _BLOCK_BYTES))):
        summed.update(block)
        size -= len(block)
    return summed.hexdigest()


def path_of(run: Path, step: int) -> Path:
    """The path of the checkpoint after `step` steps."""
    return run / FOLDER / f"step_{step:08d}.pt"


def saved(run: Path) -> list[Path]:
    """A run's checkpoints, oldest first; nanoGPT's ckpt.pt if there are none of ours."""
    try:
        found = [path for path in (run / FOLDER).iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        found = []
    if not found and (run / NANOGPT).is_file():
        return [run / NANOGPT]
    return sorted(found, key=step_of)


def recover(run: Path) -> None:
    """Rename folders that were complete when their writer was killed before it could rename them."""
    for part in (run / FOLDER).glob(".step_*.pt.part"):
        path = part.with_name(part.name.removeprefix(".").removesuffix(".part"))
        if is_folder(part) and not path.exists():
            with suppress(OSError):  # another rank did it
                part.rename(path)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name; -1 if it has none."""
    named = _NAME.fullmatch(path.name)
    return int(named[1]) if named else -1


def run_of(path: Path) -> Path:
    """The folder of a checkpoint's run, or the folder itself."""
    if path.is_dir() and not is_folder(path):
        return path
    return path.parent.parent if path.parent.name == FOLDER else path.parent


def remove(paths: Iterable[Path]) -> None:
    """Delete checkpoints, but never nanoGPT's ckpt.pt."""
    for path in paths:
        if path.name != NANOGPT:
            _remove(path)


def keep_last(run: Path, count: int) -> None:
    """Delete all but the newest `count`, and unfinished files of killed processes."""
    remove(saved(run)[:-count])
    for path in (*(run / FOLDER).glob(".step_*.part"), *run.glob(f".{BEST}.*")):
        _remove(path)


def make_room(run: Path) -> Iterator[str]:
    """Delete what a full disk cannot hold, yielding the name of each: older checkpoints, then best.pt.

    Never the newest checkpoint: until the next is complete, the run would be lost with it.
    """
    *older, newest = saved(run) or [run / NANOGPT]
    for path in older:
        remove([path])
        yield path.name
    best = run / BEST
    if best.exists() and newest.exists() and not _same(best, newest):
        _remove(best)
        yield BEST


def _same(one: Path, other: Path) -> bool:
    """Whether both are the same checkpoint on the disk."""
    if one.is_dir() and other.is_dir():
        return (one / RUN).samefile(other / RUN)
    return one.samefile(other)


def mark_best(run: Path, path: Path) -> None:
    """Make this checkpoint best.pt: a hard link if possible, so that it costs no disk space.

    Raises `TrainingError` and leaves the older best.pt as it was.
    """
    temporary = run / f".{BEST}.{os.getpid()}"
    try:
        _remove(temporary)
        if path.is_dir():
            temporary.mkdir()
            for file in path.iterdir():
                _link(file, temporary / file.name)
            name_folder(temporary, run / BEST)
            return
        _link(path, temporary)
        if (run / BEST).is_dir():
            _remove(run / BEST)
        temporary.replace(run / BEST)
        sync_folder(run)
    except OSError as error:
        _remove(temporary)
        raise not_written(run / BEST, error) from None


def _link(path: Path, new: Path) -> None:
    try:
        os.link(path, new)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, new)
        with new.open("rb") as copy:
            os.fsync(copy.fileno())


def best_of(run: Path) -> tuple[int, float] | None:
    """The step and validation loss of best.pt; None if there is no readable one."""
    try:
        path = run / BEST / RUN if (run / BEST).is_dir() else run / BEST
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return int(content["iter_num"]), float(content["best_val_loss"])
    except Exception:  # torch raises many classes for a damaged archive
        return None


def saved_config(content: dict[str, Any], where: str) -> LoadedConfig:
    """The config in a checkpoint, oomph's or nanoGPT's, with the shape of its weights."""
    found = {**(content.get("config") or {}), **(content.get("model_args") or {})}
    return configs.from_dict({key: found[key] for key in KEYS if found.get(key) is not None}, where)
