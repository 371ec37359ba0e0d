"""A config as text that `load` reads back: oomph's TOML, or a nanoGPT `.py` file."""

from __future__ import annotations

from collections.abc import Callable

from oomph.config.keys import keys
from oomph.config.schema import TrainConfig


def to_toml(config: TrainConfig) -> str:
    """The config in oomph's own format, each key with its description. What is not said is left out."""
    return _lines(config, _toml_value)


def to_python(config: TrainConfig) -> str:
    """The config as a file for nanoGPT's train.py, with oomph's own keys, which nanoGPT passes over."""
    return _lines(config, repr)


def _lines(config: TrainConfig, write: Callable[[object], str]) -> str:
    lines = []
    for key in keys().values():
        value = getattr(config, key.name)
        if value is not None:
            lines.append(f"{key.name} = {write(value)}  # {key.description}")
    return "\n".join(lines) + "\n"


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        from json import dumps  # JSON's escapes are TOML's, save that TOML escapes DEL too

        return dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
