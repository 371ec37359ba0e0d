"""A run's folder: config.toml, plan.json, metrics.jsonl, log.txt, result.json, checkpoints/, best.pt, samples/."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from oomph.config import to_toml
from oomph.data.failure import printable
from oomph.errors import InputError, Problem
from oomph.files import write_whole
from oomph.planner import Plan
from oomph.training import checkpoint
from oomph.training.metrics import FILE
from oomph.training.progress import FILE as LOG
from oomph.training.result import Result
from oomph.training.text import KEPT_TOKENIZER, TOKENIZER_FILES

RESULT = "result.json"
# What `oomph train` and `oomph sample` write into folders of a run's folder: nothing else in them is touched.
_OURS = {
    "samples": ("seed_*.txt",),
    "tensorboard": ("events.out.tfevents.*",),
    "huggingface": ("model.safetensors", "config.json"),
    KEPT_TOKENIZER: TOKENIZER_FILES,
    checkpoint.FOLDER: (".step_*.part",),
}


def open_folder(out_dir: str, resumed: Path | None, overwrite: bool) -> Path:
    """The folder of a run, made where it is missing. One that holds another run is not written over unasked."""
    folder = Path(out_dir)
    held = checkpoint.saved(folder)
    same = resumed is not None and resumed.resolve() == folder.resolve()
    if (held or (folder / FILE).exists()) and not same and not overwrite:
        found = f"its last checkpoint is {held[-1].name}" if held else f"it holds {FILE}"
        allowed = "--resume to go on with it, --out_dir=ANOTHER, or --overwrite"
        if resumed is not None:
            allowed = f"--out_dir=ANOTHER, or none to go on in {resumed}"
        raise InputError(
            Problem(f"out_dir {out_dir!r}", "this folder holds a run already", found=found, allowed=allowed)
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(Problem(f"out_dir {out_dir!r}", "cannot be made", found=error.strerror)) from None
    return folder


def clear(folder: Path) -> None:
    """Delete the run that a folder holds. nanoGPT's own checkpoint stays, and so does what others put there."""
    checkpoint.remove(checkpoint.saved(folder))
    try:
        for name in (checkpoint.BEST, FILE, RESULT, LOG):
            (folder / name).unlink(missing_ok=True)
        for path in folder.glob(f".{checkpoint.BEST}.*"):
            path.unlink(missing_ok=True)
        for name, patterns in _OURS.items():
            for path in [path for pattern in patterns for path in (folder / name).glob(pattern)]:
                path.unlink(missing_ok=True)
            with suppress(OSError):  # not empty, or not there
                (folder / name).rmdir()
    except OSError as error:
        raise InputError(Problem(str(folder), "the old run cannot be deleted", found=error.strerror)) from None


def write_plan(folder: Path, plan: Plan, options: Mapping[str, str]) -> None:
    """What was asked for, and what is expected of it. `options` are those that a run with the same numbers needs."""
    said = "".join(f" --{name}={shlex.quote(value)}" for name, value in options.items())
    head = f"# Again, from the start: oomph train config.toml --out_dir=ANOTHER{printable(said)}\n\n"
    write_whole(folder / "config.toml", (head + to_toml(plan.config)).encode())
    write_json(folder / "plan.json", plan.to_dict())


def write_json(path: Path, value: Any) -> None:
    """JSON for people and programs."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def read_result(folder: Path) -> Result | None:
    """What became of the run before; None where nothing readable is there."""
    try:
        return msgspec.json.decode((folder / RESULT).read_bytes(), type=Result)
    except (OSError, msgspec.MsgspecError):
        return None


def find_run(folder: Path) -> Path:
    """The newest checkpoint of a run, or the one that is named."""
    if folder.is_file():
        return folder
    held = checkpoint.saved(folder)
    if not held:
        found = "no such folder" if not folder.exists() else "a folder without checkpoints"
        raise InputError(
            Problem(str(folder), "nothing to resume here", found=found, allowed="a run's folder, or its checkpoint")
        )
    return held[-1]
