"""A run's folder: config.toml, plan.json, metrics.jsonl, log.txt, result.json, checkpoints/, best.pt, samples/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from oomph.config import TrainConfig, to_toml
from oomph.errors import InputError, Problem
from oomph.files import write_whole
from oomph.planner import Plan
from oomph.training import checkpoint
from oomph.training.metrics import FILE


def open_folder(config: TrainConfig, resuming: bool, overwrite: bool) -> Path:
    """The folder of a run, made where it is missing. One that holds another run is not written over unasked."""
    folder = Path(config.out_dir)
    held = checkpoint.saved(folder)
    if (held or (folder / FILE).exists()) and not resuming and not overwrite:
        found = f"its last checkpoint is {held[-1].name}" if held else f"it holds {FILE}"
        raise InputError(
            Problem(
                f"out_dir {config.out_dir!r}",
                "this folder holds a run already",
                found=found,
                allowed="--resume to go on with it, --out_dir=ANOTHER, or --overwrite",
            )
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(Problem(f"out_dir {config.out_dir!r}", "cannot be made", found=error.strerror)) from None
    if overwrite and not resuming:
        for path in (*held, folder / checkpoint.BEST, folder / FILE, folder / "result.json"):
            if path.name != checkpoint.NANOGPT:
                path.unlink(missing_ok=True)
    return folder


def write_plan(folder: Path, plan: Plan) -> None:
    """What was asked for, and what is expected of it."""
    write_whole(folder / "config.toml", to_toml(plan.config).encode())
    write_json(folder / "plan.json", plan.to_dict())


def write_json(path: Path, value: Any) -> None:
    """JSON for people and programs."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


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
