"""Checkpoints of sharded runs: a folder of torch.distributed.checkpoint's files, renamed when it is complete.

    step_00000010.pt/
        __0_0.distcp …   each rank's parts of the weights, the optimizer's state and the average
        .metadata        which part of which tensor is where
        run.pt           everything else, and the SHA-256 of the other files; written last

Any number of ranks can read it, each its own parts. torch pickles `.metadata`: only the few classes that it needs
are ever looked up.
"""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_now

from oomph.errors import InputError, Problem
from oomph.training import checkpoint
from oomph.training.errors import DiskFullError, TrainingError

if TYPE_CHECKING:
    from oomph.training.trainer import Trainer

_METADATA = ".metadata"
_SUM = ".sha256"  # beside a file until run.pt includes it
_MODEL, _STATE, _AVERAGE = "model.", "optimizer.state.", "ema."
_HEAD, _EMBEDDING = "lm_head.weight", "transformer.wte.weight"


def tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, each as a part of the whole one if it is sharded; restored in place."""
    sharing, state = trainer.sharing, trainer.optimizer.state
    found = _named(_MODEL, sharing.names, sharing.tensors([p.detach() for p in sharing.parameters]))
    kinds = dict.fromkeys(kind for each in state.values() for kind, value in each.items() if torch.is_tensor(value))
    for kind in kinds:
        values = [state[parameter][kind] for parameter in sharing.parameters]
        whole = [value.shape != parameter.shape for value, parameter in zip(values, sharing.parameters, strict=True)]
        places = values if any(whole) else sharing.tensors(values)  # a step count is not sharded
        names = [f"{name}.{kind}" for name in sharing.names]
        found |= _named(_STATE, names, places)
    if trainer.average:
        found |= _named(_AVERAGE, sharing.names, sharing.tensors(trainer.average))
    return found


def _named(kind: str, names: list[str], tensors: list[Tensor]) -> dict[str, Tensor]:
    return {f"{kind}{name}": tensor for name, tensor in zip(names, tensors, strict=True)}


# --- writing ------------------------------------------------------------------------------------------


class _Writer(FileSystemWriter):
    """Writes a rank's file and its checksum; the first rank then completes the folder and calls `done`."""

    def __init__(self, folder: Path, rest: Mapping[str, Any], done: Callable[[], None]) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True)
        self.folder, self.rest, self.done = folder, rest, done

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        for name in {result.storage_data.relative_path for result in written.value()}:
            (self.folder / f"{name}{_SUM}").write_text(_sum(self.folder / name))
        return written

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        super().finish(metadata, results)
        names = sorted({result.storage_data.relative_path for each in results for result in each})
        sums = {_METADATA: _sum(self.folder / _METADATA)}
        for name in names:
            told = self.folder / f"{name}{_SUM}"
            if not told.is_file():
                what = f"{name} was written by another machine, to a disk of its own: out_dir must be on one for all"
                raise OSError(None, what)
            sums[name] = told.read_text()
            told.unlink()
        checkpoint.save({**self.rest, "sharded": {"files": sums}}, self.folder / checkpoint.RUN)
        self.done()


def save(tensors: dict[str, Tensor], rest: Mapping[str, Any], path: Path, group: Any, done: Callable[[], None]) -> None:
    """Write a checkpoint's folder; called on every rank. The first calls `done` once it is renamed.

    Raises `TrainingError` on every rank if one cannot write.
    """
    try:
        save_now(tensors, storage_writer=_writer(path, rest, done), process_group=group)
    except CheckpointException as error:
        raise _not_written(path, error) from None


def save_later(
    tensors: dict[str, Tensor], rest: Mapping[str, Any], path: Path, group: Any, done: Callable[[], None]
) -> Future[Any]:
    """The same in a thread, from a copy in the host's memory. The result is None, or the `TrainingError`."""
    written = async_save(tensors, storage_writer=_writer(path, rest, done), process_group=group)
    told: Future[Any] = Future()

    def tell(finished: Future[Any]) -> None:
        error = finished.exception()
        told.set_result(None if error is None else _not_written(path, error))

    cast("Future[Any]", written).add_done_callback(tell)
    return told


def _writer(path: Path, rest: Mapping[str, Any], done: Callable[[], None]) -> _Writer:
    part = unfinished(path)

    def finish() -> None:
        checkpoint.name_folder(part, path)
        done()

    return _Writer(part, rest, finish)


def unfinished(path: Path) -> Path:
    """Where a checkpoint's folder is written before it is renamed."""
    return path.with_name(f".{path.name}.part")


def prepare(path: Path) -> None:
    """Delete what a killed process left of this checkpoint; on the first rank, before any rank writes."""
    with suppress(OSError):
        shutil.rmtree(unfinished(path))
    path.parent.mkdir(parents=True, exist_ok=True)


def _not_written(path: Path, error: BaseException) -> TrainingError:
    if isinstance(error, CheckpointException):
        failures = [failure[0] for failure in error.failures.values()]
        full = [failure for failure in failures if isinstance(failure, DiskFullError)]
        others = [failure for failure in failures if isinstance(failure, OSError)]
        error = next(iter([*full, *others, *failures]), error)
    return error if isinstance(error, TrainingError) else checkpoint.not_written(path, cast(Exception, error))


# --- reading ------------------------------------------------------------------------------------------

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size", "device", *(str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype))),  # noqa: E501
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "WindowsPath", "Path", "PurePosixPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath", "Path", "PurePosixPath", "PureWindowsPath"),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class _PartsReader(FileSystemReader):
    """torch's reader, restricted to the classes that `.metadata` may name."""

    def read_metadata(self, *_arguments: Any, **_named: Any) -> Metadata:
        path = Path(self.path) / _METADATA
        try:
            with path.open("rb") as file:
                metadata: Any = _Unpickler(file).load()
        except Exception as error:  # a damaged pickle raises many classes
            what = "refused without executing it" if "names" in str(error) else "cannot be read"
            raise InputError(Problem(str(path), what, found=str(error)[:160])) from None
        if not isinstance(metadata, Metadata):
            raise InputError(Problem(str(path), "not torch.distributed.checkpoint's", found=type(metadata).__name__))
        return metadata


def read_rest(folder: Path) -> dict[str, Any]:
    """A checkpoint's entries, except the sharded tensors."""
    checkpoint.verify(folder / checkpoint.RUN)
    content = checkpoint.load_file(folder / checkpoint.RUN)
    files = (content.get("sharded") or {}).get("files")
    if not isinstance(files, dict) or not all(isinstance(each, str) for pair in files.items() for each in pair):
        raise InputError(Problem(str(folder / checkpoint.RUN), "its entry sharded is missing or invalid"))
    return content


def verify(folder: Path, rest: Mapping[str, Any], rank: int = 0, ranks: int = 1) -> None:
    """Refuse the folder if any byte of its files has changed; each rank checks its share of them."""
    for name in sorted(rest["sharded"]["files"])[rank::ranks]:
        path = folder / Path(name).name
        try:
            summed = _sum(path)
        except OSError as error:
            raise InputError(Problem(str(path), "cannot be read", found=error.strerror)) from None
        if summed != rest["sharded"]["files"][name]:
            raise InputError(Problem(str(path), "damaged: wrong checksum", allowed="--resume with an older checkpoint"))


def restore(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill this rank's tensors in place. Raises `InputError` if one is missing or has another shape."""
    reader = _PartsReader(folder)
    held = reader.read_metadata().state_dict_metadata
    problems = []
    for name, tensor in tensors.items():
        found = held.get(name)
        if not isinstance(found, TensorStorageMetadata):
            problems.append(Problem(str(folder), f"it has no {name}"))
        elif found.size != tensor.shape:
            problems.append(
                Problem(str(folder), f"{name} has another shape", str(tuple(found.size)), str(tuple(tensor.shape)))
            )
    if problems:
        raise InputError(problems[:10])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about loading in a single process, which is intended
            load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        reason = next(iter([str(failure[0]) for failure in error.failures.values()]), str(error))
        raise InputError(Problem(str(folder), "cannot be read as a checkpoint", found=reason[:160])) from None


def load_whole(folder: Path, optimizer: bool = False) -> dict[str, Any]:
    """A checkpoint in nanoGPT's format, from its parts: weights, average and, if requested, the optimizer's state."""
    rest = read_rest(folder)
    verify(folder, rest)
    held = _PartsReader(folder).read_metadata().state_dict_metadata
    kinds = (_MODEL, _AVERAGE, _STATE) if optimizer else (_MODEL, _AVERAGE)
    tensors = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in held.items()
        if isinstance(found, TensorStorageMetadata) and name.startswith(kinds)
    }
    restore(folder, tensors)
    content = {**rest, "model": _of(_MODEL, tensors)}
    if average := _of(_AVERAGE, tensors):
        content["ema"] = average
    for each in (content["model"], average):
        if _EMBEDDING in each:
            each.setdefault(_HEAD, each[_EMBEDDING])
    if optimizer:
        content["optimizer"] = _optimizer(rest, tensors)
    return {name: value for name, value in content.items() if name != "sharded"}


def _of(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(kind): tensor for name, tensor in tensors.items() if name.startswith(kind)}


def _optimizer(rest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """torch.optim's state_dict: parameters by number, in the order of their groups."""
    numbers: dict[str, int] = rest["oomph"]["numbers"]
    state: dict[int, dict[str, Tensor]] = {number: {} for number in numbers.values()}
    for name, tensor in _of(_STATE, tensors).items():
        parameter, _, kind = name.rpartition(".")
        state[numbers[parameter]][kind] = tensor
    return {"state": state, "param_groups": rest["optimizer"]["param_groups"]}


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return checkpoint.sha256(cast(IO[bytes], file), os.fstat(file.fileno()).st_size)
