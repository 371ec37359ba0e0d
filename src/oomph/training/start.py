"""Where a run begins: from nothing, or from a checkpoint, with the config and the habits that it had."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oomph.config import KEYS, LoadedConfig, TrainConfig
from oomph.data.manifest import MANIFEST as DATA_MANIFEST
from oomph.data.manifest import META_PICKLE, find_dataset
from oomph.errors import InputError, Problem
from oomph.training import checkpoint
from oomph.training.folder import find_run
from oomph.training.options import Habits, Options, habits
from oomph.training.state import SHAPE, saved_config


@dataclass(frozen=True)
class Start:
    """What a run goes on with."""

    loaded: LoadedConfig
    habits: Habits
    checkpoint: Path | None = None
    content: dict[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    newest: bool = False  # the checkpoint is the newest of its run, and was not named itself

    @property
    def folder(self) -> Path | None:
        """The resumed run's own."""
        return None if self.checkpoint is None else checkpoint.run_of(self.checkpoint)

    def goes_on_in(self, folder: Path | None) -> bool:
        """Whether that is the folder of the resumed run."""
        return self.folder is not None and folder is not None and self.folder.resolve() == folder.resolve()

    def data(self, loaded: LoadedConfig) -> Path:
        """The data's folder: where the config says, or where a resumed run had it."""
        try:
            return find_dataset(loaded.config.dataset, loaded.data_roots())
        except InputError:
            before = self.content.get("oomph", {}).get("data_folder")
            same = self.content.get("config", {}).get("dataset") == loaded.config.dataset
            if before is None or not same or not (Path(before) / "train.bin").is_file():
                raise
            return Path(before)


def find_start(loaded: LoadedConfig, options: Options) -> Start:
    """What the options and the config say to begin from."""
    resume = options.resume or loaded.config.init_from == "resume"
    if not resume:
        return Start(loaded, habits(options, {}))
    habits(options, {}, resuming=True)  # nonsense is refused before a large file is read
    asked = Path(loaded.config.out_dir if resume is True else resume)
    path = find_run(asked)
    content = checkpoint.load(path)
    merged, changes = resumed_config(path, content, loaded)
    ours = content.get("oomph", {})
    remembered = {"order": ours.get("data", {}).get("order"), **ours.get("options", {})}
    chosen = habits(options, remembered, resuming=True)
    return Start(merged, chosen, path, content, tuple(changes), newest=not asked.is_file())


def newest_of(start: Start) -> Path | None:
    """The checkpoint to begin from, as the run's folder has it by now."""
    return find_run(start.folder) if start.newest and start.folder is not None else start.checkpoint


def resumed_config(path: Path, content: dict[str, Any], now: LoadedConfig) -> tuple[LoadedConfig, list[str]]:
    """The config that a run goes on with: the checkpoint's, and over it what the user says now; what changed, in words.

    Refuses a changed shape, optimizer or seed: the weights, the state and the order of the data have the old one.
    """
    before = saved_config(content, str(path))
    decided = set(content.get("oomph", {}).get("decided", ()))
    defaults = TrainConfig()
    values, sources = {}, {}
    changes: list[str] = []
    problems: list[Problem] = []
    for key in KEYS:
        old, new = getattr(before.config, key), getattr(now.config, key)
        if _says(now, key):
            values[key], sources[key] = new, now.sources[key]
            if new != old and key != "out_dir":
                changes.append(f"{key}: {old} in the checkpoint, now {new} ({now.sources[key]})")
                problems += _cannot_change(key, old, new, now.sources[key], content)
        elif key in decided:
            values[key], sources[key] = getattr(defaults, key) if key not in SHAPE else old, "default"
        else:
            values[key], sources[key] = old, before.sources[key]
    if problems:
        raise InputError(problems)
    if not now.said("out_dir") and _in_a_run(path):
        values["out_dir"], sources["out_dir"] = str(checkpoint.run_of(path)), str(path)
    values["init_from"] = "scratch" if before.config.init_from == "resume" else before.config.init_from
    return LoadedConfig(TrainConfig(**values), sources, now.notes, now.files), changes


def _says(now: LoadedConfig, key: str) -> bool:
    """Whether the user says it now. What only the files of some data say is no word of the user's."""
    if key == "init_from" or not now.said(key):
        return False
    looked_up = key in ("vocab_size", "dataset_tokens") and any(
        name in now.sources[key] for name in (META_PICKLE, DATA_MANIFEST, "train.bin")
    )
    return not looked_up or (key == "dataset_tokens" and now.said("dataset"))


def _cannot_change(key: str, old: object, new: object, where: str, content: dict[str, Any]) -> list[Problem]:
    if key in SHAPE:
        what = f"{key} cannot change: the checkpoint's weights have {key} = {old}"
    elif key == "optimizer" and content.get("optimizer"):
        what = f"{key} cannot change: the checkpoint holds the state of {key} = {old}"
    elif key == "seed" and content.get("oomph"):
        what = f"{key} cannot change: the data was read in the order of {key} = {old} so far"
    else:
        return []
    allowed = str(old) if key in SHAPE else f"{old}, or --weights instead of --resume"
    return [Problem(where, what, found=str(new), allowed=allowed)]


def _in_a_run(path: Path) -> bool:
    """Whether a checkpoint lies where a run has it, and not loose somewhere."""
    return path.parent.name == checkpoint.FOLDER or path.name in (checkpoint.BEST, checkpoint.NANOGPT)
