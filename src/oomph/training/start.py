"""How a run starts: from scratch, or from a checkpoint with the config and options it had.

What happens on `--resume`, in order:
1. `find_start` here: which checkpoint; its config, overridden by the user's changes (`resumed_config`); its options.
2. `checkpoint.load`: the file's checksum and every entry are checked before anything is built; for a sharded
   checkpoint `parts.read_rest`, and each rank then verifies and reads its parts.
3. `run.train`: the device is chosen, the folder locked, a checkpoint newer than the one found is taken instead, and the
   run is planned again. (A job that its launcher restarted gets here by itself: `jobs.taken_up`.)
4. `run.build` loads the weights; `state.unpack` puts optimizer, data position and random numbers into the trainer;
   `run._sync_files` reconciles metrics.jsonl and best.pt with the checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from oomph.config import KEYS, LoadedConfig, TrainConfig
from oomph.config.shape import SHAPE
from oomph.data.manifest import MANIFEST as DATA_MANIFEST
from oomph.data.manifest import META_PICKLE, find_dataset
from oomph.errors import InputError, Problem
from oomph.training import checkpoint
from oomph.training.folder import find_run

_ADAPTERS = ("method", "lora_rank", "lora_alpha", "lora_targets")
KEPT = ", kept"  # for `parallel`: a sharded run may continue in a single process


@dataclass(frozen=True)
class Options:
    """The caller's options beyond the config. None: not set, so a resumed run keeps its own."""

    resume: bool | str | os.PathLike[str] = False  # True: the run in out_dir; or a run's folder or checkpoint
    force: bool = False  # train although the plan says that it does not fit
    overwrite: bool = False  # start over in a folder that holds a run
    keep: int | None = None
    save_minutes: float | None = None
    order: str | None = None
    weights: str | os.PathLike[str] | None = None  # initial weights: a checkpoint, or Hugging Face's safetensors
    tensorboard: bool | None = None
    trackio: bool | None = None
    export: bool | None = None
    again: bool = False  # a restarted job that had saved nothing
    quiet: bool = False
    measure: bool = True  # measure the CPU, so that the plan has a time


@dataclass(frozen=True)
class SettledOptions:
    """Options that stay the same for a whole run; a checkpoint holds them, and a resumed run keeps them."""

    keep: int = 2  # newest checkpoints kept, besides the best
    save_minutes: float = 15.0  # most minutes between two checkpoints
    order: str = "random"  # of the data: "random" windows as in nanoGPT, or shuffled "epochs"
    tensorboard: bool = False
    trackio: bool = False
    export: bool = False  # write the weights for Hugging Face at the end
    weights: str = ""  # source of the initial weights

    def to_repeat(self) -> dict[str, str]:
        """The options, by name, that change the numbers and so are needed to repeat the run."""
        return {name: getattr(self, name) for name in ("order", "weights") if getattr(self, name) not in ("random", "")}

    def to_dict(self) -> dict[str, Any]:
        """The options as plain values for a checkpoint."""
        return asdict(self)


def settle_options(options: Options, saved: Mapping[str, Any], resuming: bool = False) -> SettledOptions:
    """The options set now, else the checkpoint's, else the defaults. Raises `InputError` if invalid."""
    chosen: dict[str, Any] = {}
    for option in fields(SettledOptions):
        said, before = getattr(options, option.name), saved.get(option.name)
        if said is not None:
            chosen[option.name] = os.fspath(said) if option.name == "weights" else said
        elif type(before) is type(option.default):
            chosen[option.name] = before
    found = SettledOptions(**chosen)
    problems = []
    if found.keep < 1:
        problems.append(Problem("--keep", "too few", found=str(found.keep), allowed="at least 1"))
    if not found.save_minutes > 0:
        problems.append(Problem("--save_minutes", "too few", found=str(found.save_minutes), allowed="more than 0"))
    problems += [
        Problem(f"--{name}", "cannot go with --resume", allowed="one of the two")
        for name in ("overwrite", "weights")
        if resuming and getattr(options, name)
    ]
    order = saved.get("order")
    if order is not None and order != found.order:
        what = f"cannot change in a resumed run: so far its data was read with --order {order}"
        problems.append(Problem("--order", what, found.order, f"{order}, or --weights instead of --resume"))
    if problems:
        raise InputError(problems)
    return found


@dataclass(frozen=True)
class Start:
    """What a run starts from."""

    loaded: LoadedConfig
    options: SettledOptions
    checkpoint: Path | None = None
    content: dict[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    newest: bool = False  # take the newest checkpoint of the run, not a particular one

    @property
    def folder(self) -> Path | None:
        """The resumed run's folder."""
        return None if self.checkpoint is None else checkpoint.run_of(self.checkpoint)

    def resumes_in(self, folder: Path | None) -> bool:
        """Whether the run is resumed in its own folder."""
        return self.folder is not None and folder is not None and self.folder.resolve() == folder.resolve()

    def data(self, loaded: LoadedConfig) -> Path:
        """The data's folder: where the config says, else where the resumed run had it."""
        try:
            return find_dataset(loaded.config.dataset, loaded.data_roots())
        except InputError:
            before = self.content.get("oomph", {}).get("data_folder")
            same = self.content.get("config", {}).get("dataset") == loaded.config.dataset
            if before is None or not same or not (Path(before) / "train.bin").is_file():
                raise
            return Path(before)


def find_start(loaded: LoadedConfig, options: Options) -> Start:
    """What to start from, according to the options and the config."""
    resume = options.resume or loaded.config.init_from == "resume"
    if not resume:
        options = replace(options, weights=options.weights or loaded.weights)
        return Start(loaded, settle_options(options, {}))
    settle_options(options, {}, resuming=True)  # refuse invalid values before reading a large file
    asked = Path(loaded.config.out_dir if resume is True else resume)
    path = find_run(asked)
    content = _read(path)
    merged, changes = resumed_config(path, content, loaded)
    ours = content.get("oomph", {})
    saved = {"order": ours.get("data", {}).get("order"), **ours.get("options", {})}
    chosen = settle_options(options, saved, resuming=True)
    return Start(merged, chosen, path, content, tuple(changes), newest=path != asked)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        return checkpoint.load(path)
    from oomph.training.ranks import parts  # imports a second's worth of torch

    return parts.read_rest(path)


def newest_of(start: Start) -> Path | None:
    """The checkpoint to start from, as the run's folder has it now."""
    return find_run(start.folder) if start.newest and start.folder is not None else start.checkpoint


def resumed_config(path: Path, content: dict[str, Any], now: LoadedConfig) -> tuple[LoadedConfig, list[str]]:
    """The checkpoint's config, overridden by the user's settings, and a line for each changed key.

    Refuses a changed shape, optimizer or seed, which the weights, the optimizer's state and the data order depend on.
    """
    before = checkpoint.saved_config(content, str(path))
    decided = set(content.get("oomph", {}).get("decided", ())) | _decided_elsewhere(content, before, now)
    if not _set_by_user(now, "eval_iters") or now.config.eval_iters == before.config.eval_iters:
        decided.discard("eval_tokens")  # so that its evaluations are comparable, whatever the batch
    defaults = TrainConfig()
    values, sources = {}, {}
    changes: list[str] = []
    problems: list[Problem] = []
    for key in KEYS:
        old, new = getattr(before.config, key), getattr(now.config, key)
        if _set_by_user(now, key):
            values[key], sources[key] = new, now.sources[key]
            if new != old and key != "out_dir":
                changes.append(f"{key}: {old} in the checkpoint, now {new} ({now.sources[key]})")
                problems += _cannot_change(key, old, new, now.sources[key], content)
        elif key in decided:
            values[key], sources[key] = getattr(defaults, key) if key not in SHAPE else old, "default"
        else:
            values[key], sources[key] = old, before.sources[key] + (KEPT if key == "parallel" else "")
    if problems:
        raise InputError(problems)
    if not now.said("out_dir") and _in_a_run(path):
        values["out_dir"], sources["out_dir"] = str(checkpoint.run_of(path)), str(path)
    values["init_from"] = "scratch" if before.config.init_from == "resume" else before.config.init_from
    return LoadedConfig(TrainConfig(**values), sources, now.notes, now.files), changes


def _decided_elsewhere(content: dict[str, Any], before: LoadedConfig, now: LoadedConfig) -> set[str]:
    """Keys that nanoGPT records but that say nothing about this device: it writes dtype = float16 on a CPU and computes
    in float32."""
    if content.get("oomph"):
        return set()
    kind = (now if now.said("device") else before).config.device.partition(":")[0]
    same = kind == before.config.device.partition(":")[0] and kind != "cpu"
    return set() if same else {"dtype"}


def _set_by_user(now: LoadedConfig, key: str) -> bool:
    """Whether the user set the key now. Values read from the data's own files do not count."""
    if key == "init_from" or not now.said(key):
        return False
    looked_up = key in ("vocab_size", "dataset_tokens") and any(
        name in now.sources[key] for name in (META_PICKLE, DATA_MANIFEST, "train.bin")
    )
    return not looked_up or (key == "dataset_tokens" and now.said("dataset"))


def _cannot_change(key: str, old: object, new: object, where: str, content: dict[str, Any]) -> list[Problem]:
    if key in (*SHAPE, *_ADAPTERS):
        what = f"{key} cannot change: the checkpoint's weights have {key} = {old}"
    elif key == "optimizer" and content.get("optimizer"):
        what = f"{key} cannot change: the checkpoint holds the state of {key} = {old}"
    elif key == "seed" and content.get("oomph"):
        what = f"{key} cannot change: so far the data was read in the order of {key} = {old}"
    else:
        return []
    allowed = str(old) if key in (*SHAPE, *_ADAPTERS) else f"{old}, or --weights instead of --resume"
    return [Problem(where, what, found=str(new), allowed=allowed)]


def _in_a_run(path: Path) -> bool:
    """Whether a checkpoint is inside a run's folder."""
    return path.parent.name == checkpoint.FOLDER or path.name in (checkpoint.BEST, checkpoint.NANOGPT)
