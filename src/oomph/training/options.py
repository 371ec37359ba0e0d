"""What is asked of a run beyond its config, and which of it a resumed run remembers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from oomph.errors import InputError, Problem

_PLAIN = ("random", "")


@dataclass(frozen=True)
class Options:
    """What the caller says. None: not said, so that a resumed run goes on with what it had."""

    resume: bool | str | os.PathLike[str] = False  # True: the run in out_dir; or a run's folder or checkpoint
    force: bool = False  # train though the plan says that it does not fit
    overwrite: bool = False  # begin anew in a folder that holds a run
    keep: int | None = None
    save_minutes: float | None = None
    order: str | None = None
    weights: str | os.PathLike[str] | None = None  # first weights: a checkpoint, or Hugging Face's safetensors
    tensorboard: bool | None = None
    export: bool | None = None
    quiet: bool = False
    measure: bool = True  # the CPU's rates, for the plan's hours


@dataclass(frozen=True)
class Habits:
    """What a run keeps to from its first step to its last, over all processes that work on it."""

    keep: int = 2  # checkpoints kept, the newest ones; the best is kept beside them
    save_minutes: float = 15.0  # a checkpoint at least this often
    order: str = "random"  # of the data: "random" windows as nanoGPT draws them, or shuffled "epochs"
    tensorboard: bool = False
    export: bool = False  # at the end, the weights as Hugging Face has them
    weights: str = ""  # where the first ones came from

    def for_a_repetition(self) -> dict[str, str]:
        """The options, by name, without which the config alone gives other numbers."""
        return {
            name: value for name, value in (("order", self.order), ("weights", self.weights)) if value not in _PLAIN
        }

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)


def habits(options: Options, remembered: Mapping[str, Any], resuming: bool = False) -> Habits:
    """What is said now, over what the checkpoint remembers, over the defaults. Raises `InputError` for nonsense."""
    chosen: dict[str, Any] = {}
    for field in fields(Habits):
        said, before = getattr(options, field.name), remembered.get(field.name)
        if said is not None:
            chosen[field.name] = os.fspath(said) if field.name == "weights" else said
        elif type(before) is type(field.default):
            chosen[field.name] = before
    found = Habits(**chosen)
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
    order = remembered.get("order")
    if order is not None and order != found.order:
        what = f"cannot change in a resumed run: its data was read with --order {order} so far"
        problems.append(Problem("--order", what, found.order, f"{order}, or --weights instead of --resume"))
    if problems:
        raise InputError(problems)
    return found
