"""The entries of a checkpoint: what each must be, checked before anything is built from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from oomph.errors import Problem

VERSION = 1  # of our entries


def problems_in(content: object, where: str) -> list[Problem]:
    """Everything wrong with the entries of a checkpoint, oomph's or nanoGPT's."""
    sharded = isinstance(content, dict) and "sharded" in content
    if not isinstance(content, dict) or not (sharded or isinstance(content.get("model"), dict)):
        return [Problem(where, "not a checkpoint: it has no model", allowed="a checkpoint of oomph train or nanoGPT")]
    problems = _wrong(content, _ENTRIES, where, "")
    for part in ("model", "ema"):
        for name, value in (content.get(part) or {}).items() if _is_dict(content.get(part) or {}) else ():
            if not isinstance(name, str) or not isinstance(value, torch.Tensor):
                found = f"{str(name)[:60]!r}: {type(value).__name__}"
                problems.append(Problem(where, f"its {part} is not a dict of tensors", found=found))
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
    """Whether it is a number, or a tensor with one: nanoGPT's best_val_loss is."""
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


def _is_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) and _is_count(each) for name, each in value.items())


def _is_standing(value: Any) -> bool:
    return isinstance(value, dict) and all(_STANDING.get(name, _is_number)(number) for name, number in value.items())


def _is_loss(value: Any) -> bool:
    return value is None or type(value) in (int, float)  # None: no step or evaluation yet


def _is_alarms(value: Any) -> bool:
    return isinstance(value, dict) and all(
        name in ("loss", "gradient norm")
        and isinstance(level, list)
        and len(level) == 4
        and all(type(number) in (int, float) and number == number for number in level)
        and min(level[1:]) >= 0
        for name, level in value.items()
    )


_STANDING: dict[str, Validator] = {
    "best_val_loss": lambda value: type(value) in (int, float),
    "evaluated_at": lambda value: type(value) is int,
    "metrics_bytes": _is_count,
    "seconds": lambda value: type(value) in (int, float) and value >= 0,
    "loss": _is_loss,
    "val_loss": _is_loss,
    "alarms": _is_alarms,
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
    "ema": (_is_dict, "the averaged weights"),
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
    "numbers": (_is_numbers, "numbers by name"),
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
