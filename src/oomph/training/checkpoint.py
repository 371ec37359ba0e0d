"""Checkpoint files: nanoGPT's dict in torch's zip format, plus what exact resuming needs, and a checksum.

nanoGPT and `torch.load` can read the file: the SHA-256 of everything before it is in the archive's comment. It is
written under another name, flushed to disk and renamed, so a file with a checkpoint's name is always complete.
"""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import torch

from oomph.errors import InputError, Problem
from oomph.files import sync_folder
from oomph.training.errors import TrainingError

FOLDER = "checkpoints"
BEST = "best.pt"
NANOGPT = "ckpt.pt"  # nanoGPT's only checkpoint
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
        raise TrainingError(_why_not_written(path, error)) from None
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    """Delete if possible: a leftover file only costs disk space."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _why_not_written(path: Path, error: Exception) -> str:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OSError):
        cure = "Free some disk space" if cause.errno in (errno.ENOSPC, errno.EDQUOT) else "Fix that"
        return f"{path}: cannot be written: {cause.strerror}. {cure}, then go on with --resume."
    if isinstance(error, MemoryError):
        return f"{path}: cannot be written: out of memory."
    return f"{path}: cannot be written: {str(error).splitlines()[0][:200]}"


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """A checkpoint of oomph or nanoGPT, verified. No code in it is executed. Raises `InputError` if it is invalid."""
    verify(path)
    try:
        content = torch.load(path, map_location=device, weights_only=True)
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
            summed = _sum(file, size - len(end))
    except OSError as error:
        raise InputError(Problem(str(path), "cannot be read", found=error.strerror)) from None
    if summed != end[2 + len(_MARK) :].decode(errors="replace"):
        raise InputError(Problem(str(path), "damaged: wrong checksum", allowed="--resume with an older checkpoint"))


def _refuse_without_checksum(path: Path, head: bytes) -> None:
    """A file without a checksum is nanoGPT's, unless its name is one of ours."""
    if head != b"PK\x03\x04":
        raise InputError(Problem(str(path), "not a checkpoint in torch's zip format", found=f"it begins with {head!r}"))
    if _NAME.fullmatch(path.name) or path.name == BEST:
        raise InputError(
            Problem(
                str(path),
                "truncated: the checksum at its end is missing",
                allowed="--resume with an older checkpoint",
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


def step_of(path: Path) -> int:
    """The step in a checkpoint's name; -1 if it has none."""
    named = _NAME.fullmatch(path.name)
    return int(named[1]) if named else -1


def run_of(path: Path) -> Path:
    """The run's folder of a checkpoint, or the folder itself."""
    if path.is_dir():
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


def mark_best(run: Path, path: Path) -> None:
    """Make best.pt this checkpoint: a hard link if possible, so that it costs no disk space.

    Raises `TrainingError` and leaves the older best.pt as it was.
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
        sync_folder(run)
    except OSError as error:
        _remove(temporary)
        raise TrainingError(_why_not_written(run / BEST, error)) from None


def best_of(run: Path) -> tuple[int, float] | None:
    """The step and validation loss of best.pt; None if there is no readable one."""
    try:
        content = torch.load(run / BEST, map_location="cpu", weights_only=True, mmap=True)
        return int(content["iter_num"]), float(content["best_val_loss"])
    except Exception:  # torch raises many classes for a damaged archive
        return None


VERSION = 1  # of our entries


def problems_in(content: object, where: str) -> list[Problem]:
    """Everything wrong with the entries of a checkpoint, oomph's or nanoGPT's."""
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        return [Problem(where, "not a checkpoint: it has no model", allowed="a checkpoint of oomph train or nanoGPT")]
    problems = _wrong(content, _ENTRIES, where, "")
    model = content["model"]
    for name, value in model.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            found = f"{str(name)[:60]!r}: {type(value).__name__}"
            problems.append(Problem(where, "its model is not a dict of tensors", found=found))
            break
    ours = content.get("oomph")
    if isinstance(ours, dict):
        if ours.get("version") != VERSION:
            found = str(ours.get("version"))[:60]
            return [
                Problem(where, "written by another version of oomph", found=f"version {found}", allowed=str(VERSION))
            ]
        problems += _wrong(ours, _OURS, where, "oomph.")
        problems += [Problem(where, f"its entry oomph.{name} is missing") for name in _NEEDED if name not in ours]
        if not isinstance(content.get("config"), dict):
            problems.append(Problem(where, "its entry config is missing"))
    return problems


Validator = Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    """nanoGPT's best_val_loss is a tensor with one number."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_random(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(state, dict)
        and "cpu" in state
        and all(isinstance(each, torch.Tensor) and each.dtype == torch.uint8 for each in state.values())
        for state in value
    )


def _is_standing(value: Any) -> bool:
    return isinstance(value, dict) and all(_STANDING.get(name, _is_number)(number) for name, number in value.items())


def _is_loss(value: Any) -> bool:
    return value is None or type(value) in (int, float)  # None: no step or evaluation yet


_STANDING: dict[str, Validator] = {
    "best_val_loss": lambda value: type(value) in (int, float),
    "evaluated_at": lambda value: type(value) is int,
    "metrics_bytes": _is_count,
    "seconds": lambda value: type(value) in (int, float) and value >= 0,
    "loss": _is_loss,
    "val_loss": _is_loss,
}


def _is_data(value: Any) -> bool:
    return isinstance(value, dict) and all(name in value and valid(value[name]) for name, valid in _DATA.items())


_DATA: dict[str, Validator] = {
    "order": lambda value: isinstance(value, str),
    "seed": lambda value: type(value) is int,
    "position": _is_count,
    "block_size": _is_size,
    "tokens": _is_size,
    "sha256": lambda value: isinstance(value, str),
}


_ENTRIES: dict[str, tuple[Validator, str]] = {
    "iter_num": (_is_count, "a whole number of at least 0"),
    "best_val_loss": (_is_number, "a number"),
    "config": (_is_dict, "a dict of keys"),
    "model_args": (_is_dict, "a dict of keys"),
    "optimizer": (_is_dict, "an optimizer's state"),
    "oomph": (_is_dict, "a dict"),
}
_OURS: dict[str, tuple[Validator, str]] = {
    "decided": (_is_names, "a list of keys"),
    "batch_size": (_is_size, "a whole number of at least 1"),
    "micro_steps": (_is_size, "a whole number of at least 1"),
    "scaler": (_is_dict, "a dict"),
    "data": (_is_data, "a reader's state"),
    "random": (_is_random, "random states"),
    "standing": (_is_standing, "numbers by name"),
    "options": (_is_dict, "a dict"),
    "data_folder": (lambda value: isinstance(value, str), "a path"),
}
_NEEDED = ("batch_size", "micro_steps", "scaler", "data", "random", "standing")


def _wrong(
    entries: Mapping[str, Any], checks: Mapping[str, tuple[Validator, str]], where: str, part: str
) -> list[Problem]:
    return [
        Problem(where, f"its entry {part}{name} is invalid", found=_shown(entries[name]), allowed=allowed)
        for name, (valid, allowed) in checks.items()
        if name in entries and not valid(entries[name]) and (entries[name] is not None or name in _NEEDED)
    ]


def _shown(value: object) -> str:
    return repr(value)[:60] if isinstance(value, int | float | str) else f"a {type(value).__name__}"
