"""Whether what a checkpoint holds is what it should be, before anything is built from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from oomph.errors import Problem

VERSION = 1  # of our own entries


def problems_in(content: object, where: str) -> list[Problem]:
    """Everything wrong with the entries of a checkpoint, ours or nanoGPT's."""
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        return [Problem(where, "not a checkpoint: it holds no model", allowed="one of oomph or nanoGPT")]
    problems = _wrong(content, _ENTRIES, where, "")
    model = content["model"]
    for name, value in model.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            found = f"{str(name)[:60]!r}: {type(value).__name__}"
            problems.append(Problem(where, "its model is not a table of tensors", found=found))
            break
    ours = content.get("oomph")
    if isinstance(ours, dict):
        if ours.get("version") != VERSION:
            found = str(ours.get("version"))[:60]
            return [Problem(where, "of another version of oomph", found=f"version {found}", allowed=str(VERSION))]
        problems += _wrong(ours, _OURS, where, "oomph.")
        problems += [Problem(where, f"its entry oomph.{name} is missing") for name in _NEEDED if name not in ours]
        if not isinstance(content.get("config"), dict):
            problems.append(Problem(where, "its entry config is missing"))
    return problems


Check = Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    """nanoGPT's best_val_loss is a tensor of one number."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float)


def _is_table(value: Any) -> bool:
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
    return value is None or type(value) in (int, float)  # None: no step, or no evaluation, has been done


_STANDING: dict[str, Check] = {
    "best_val_loss": lambda value: type(value) in (int, float),
    "evaluated_at": lambda value: type(value) is int,
    "metrics_bytes": _is_count,
    "seconds": lambda value: type(value) in (int, float) and value >= 0,
    "loss": _is_loss,
    "val_loss": _is_loss,
}


def _is_data(value: Any) -> bool:
    return isinstance(value, dict) and all(name in value and sound(value[name]) for name, sound in _DATA.items())


_DATA: dict[str, Check] = {
    "order": lambda value: isinstance(value, str),
    "seed": lambda value: type(value) is int,
    "position": _is_count,
    "block_size": _is_size,
    "tokens": _is_size,
    "sha256": lambda value: isinstance(value, str),
}


_ENTRIES: dict[str, tuple[Check, str]] = {
    "iter_num": (_is_count, "a whole number of at least 0"),
    "best_val_loss": (_is_number, "a number"),
    "config": (_is_table, "a table of keys"),
    "model_args": (_is_table, "a table of keys"),
    "optimizer": (_is_table, "an optimizer's state"),
    "oomph": (_is_table, "a table"),
}
_OURS: dict[str, tuple[Check, str]] = {
    "decided": (_is_names, "a list of keys"),
    "batch_size": (_is_size, "a whole number of at least 1"),
    "micro_steps": (_is_size, "a whole number of at least 1"),
    "scaler": (_is_table, "a table"),
    "data": (_is_data, "a reader's position, and of which data"),
    "random": (_is_random, "random states"),
    "standing": (_is_standing, "numbers by name"),
    "options": (_is_table, "a table"),
    "data_folder": (lambda value: isinstance(value, str), "a path"),
}
_NEEDED = ("batch_size", "micro_steps", "scaler", "data", "random", "standing")


def _wrong(entries: Mapping[str, Any], checks: Mapping[str, tuple[Check, str]], where: str, part: str) -> list[Problem]:
    return [
        Problem(where, f"its entry {part}{name} is not sound", found=_shown(entries[name]), allowed=allowed)
        for name, (sound, allowed) in checks.items()
        if name in entries and not sound(entries[name]) and (entries[name] is not None or name in _NEEDED)
    ]


def _shown(value: object) -> str:
    return repr(value)[:60] if isinstance(value, int | float | str) else f"a {type(value).__name__}"
