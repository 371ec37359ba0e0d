"""What the page chooses from: presets, cards, config keys."""

from __future__ import annotations

from typing import Any

import msgspec

from oomph import devices
from oomph.config import GPT2_SHAPES, describe_keys


def presets() -> list[dict[str, Any]]:
    """Every preset with the keys that it sets."""
    return [{"name": name, "config": shape} for name, shape in GPT2_SHAPES.items()]


def gpus() -> list[dict[str, Any]]:
    """`oomph gpus --json`."""
    found: list[dict[str, Any]] = msgspec.to_builtins(list(devices.all_devices()))
    return found


def keys() -> list[dict[str, Any]]:
    """Every config key: enough to build a form field and to explain it."""
    return [
        {
            "name": key.name,
            "kind": key.kind.__name__,
            "default": key.default,
            "allowed": key.allowed,
            "choices": key.choices,
            "ge": key.ge,
            "le": key.le,
            "lt": key.lt,
            "optional": key.optional,
            "help": key.description,
            "whose": key.whose,
        }
        for key in describe_keys()
    ]
