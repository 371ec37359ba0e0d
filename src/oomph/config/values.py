"""A value checked against its key, made the right type or a `Problem`; and `Given`: all valid values of a config."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import msgspec

from oomph.config.keys import Key
from oomph.config.layer import SourcedValue
from oomph.errors import Problem, nearest
from oomph.units import parse_count

ConfigValue = int | float | str | bool | None
MAX_TEXT = 4096  # characters of one text value


def coerce(key: Key, value: object, where: str) -> ConfigValue | Problem:
    """`value` as the key's type, or the problem with it. Only lossless conversions are made."""
    if value is None and key.optional:
        return None
    made = _as_kind(key, value)
    if made is None or not _within(key, made):
        near = nearest(value, key.choices) if key.choices and isinstance(value, str) else None
        return Problem(
            where=where, what=f"{key.name} is not valid", found=show(value), allowed=key.allowed, nearest=near
        )
    return made


def show(value: object) -> str:
    """A value as a message shows it, in few characters whatever it is."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"a number of {value.bit_length():,} bits"  # printing it could take minutes, or be refused by Python
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    if value is None or isinstance(value, int | float):
        return repr(value)
    return f"a {type(value).__name__}"


def _as_kind(key: Key, value: object) -> ConfigValue:
    """The value as the key's type, or None if the conversion would lose or guess something."""
    if key.kind is bool:
        return bool(value) if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)) else None
    if key.kind is str:
        return value if isinstance(value, str) else None
    if isinstance(value, bool):
        return None
    if key.kind is float:
        return _as_float(value)
    if isinstance(value, str):
        value = parse_count(value)
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) else None


def _as_float(value: object) -> float | None:
    if not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer too large for a float
        return None


def _within(key: Key, value: ConfigValue) -> bool:
    if isinstance(value, str):
        if key.choices:
            return value in key.choices
        if key.pattern is not None:
            return re.fullmatch(key.pattern, value) is not None
        return len(value) <= MAX_TEXT and not any(c < " " or c == "\x7f" or "\ud800" <= c <= "\udfff" for c in value)
    if value is None or isinstance(value, bool):
        return True
    return (
        (key.ge is None or value >= key.ge)
        and (key.gt is None or value > key.gt)
        and (key.le is None or value <= key.le)
        and (key.lt is None or value < key.lt)
    )


class Given(msgspec.Struct, frozen=True):
    """The valid values of a config, and where each was said: what rules about several keys look at."""

    valid: Mapping[str, ConfigValue]
    said: Mapping[str, SourcedValue]

    def get(self, key: str) -> ConfigValue:
        """A key's value; None if it is unset or not valid."""
        return self.valid.get(key)

    @property
    def trainer(self) -> str:
        return str(self.get("trainer"))

    @property
    def family(self) -> str:
        return str(self.get("model_type"))

    def problem(self, key: str, what: str, found: str, allowed: str) -> Problem:
        """A problem at the place that set the key."""
        return Problem(where=place(key, self.said[key]), what=what, found=found, allowed=allowed)


def place(key: str, said: SourcedValue) -> str:
    """Where a value was set; the key's name for a default."""
    return key if said.where == "default" else said.where
