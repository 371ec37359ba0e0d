"""One value against its key: made the right type where that is safe, or a `Problem` that says what is allowed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from oomph.config.keys import Key
from oomph.errors import Problem, nearest

Value = int | float | str | bool | None
MAX_TEXT = 4096  # characters of one text value

_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_COUNT = re.compile(r"([+-]?)([0-9_]{1,30})(?:\.([0-9]{1,30}))? ?([kKmMbBtT])")
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


class Said(NamedTuple):
    """A value somebody gave, and where. `firm` is False for a program's own defaults, which overrule nothing."""

    value: object
    where: str
    firm: bool = True


@dataclass(frozen=True)
class Unreadable:
    """A value that a file gives but that cannot be told from its text."""

    reason: str
    needs_running: bool = True  # False: the expression is wrong or out of bounds, running it would not help


def coerce(key: Key, value: object, where: str) -> Value | Problem:
    """`value` as the key's type, or the problem with it. Never guesses: only lossless changes of type are made."""
    if value is None and key.optional:
        return None
    made = _as_kind(key, value)
    if made is None or not _within(key, made):
        near = nearest(value, key.choices) if key.choices and isinstance(value, str) else None
        return Problem(
            where=where, what=f"{key.name} is not valid", found=show(value), allowed=key.allowed, nearest=near
        )
    return made


def parse_text(key: Key, text: str) -> object:
    """What `--key=text` means: nanoGPT's literals, and friendlier. `coerce` then judges it."""
    text = text.strip()
    if key.optional and text.lower() == "none":
        return None
    if key.kind is bool:
        return _TRUTHS.get(text.lower(), text)
    if key.kind is str:
        return _unquoted(text)
    number = count(text) if key.kind is int else None
    if number is not None:
        return number
    from oomph.config.evaluate import ExpressionError, UndecidableError, evaluate_text

    try:
        return evaluate_text(text)
    except (UndecidableError, ExpressionError):
        return text  # not a number: coerce says so, with the text as it was written


def count(text: str) -> int | float | None:
    """The number in "3.68B", "10M" or "5k"; None where the text is not such a number."""
    match = _COUNT.fullmatch(text)
    if match is None or not match[2].strip("_"):
        return None
    sign, whole, fraction, suffix = match.groups(default="")
    scale: int = 10 ** len(fraction)
    scaled: int = int(sign + whole.replace("_", "") + fraction) * _SUFFIXES[suffix.lower()]
    return scaled // scale if scaled % scale == 0 else scaled / scale


def show(value: object) -> str:
    """A value as a message shows it: never long, whatever it is."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"a number of {value.bit_length():,} bits"  # printing it could take minutes, or be refused by Python
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    if value is None or isinstance(value, int | float):
        return repr(value)
    return f"a {type(value).__name__}"


def _as_kind(key: Key, value: object) -> Value:
    """The value as the key's type, or None where that would need a guess."""
    if key.kind is bool:
        return bool(value) if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)) else None
    if key.kind is str:
        return value if isinstance(value, str) else None
    if isinstance(value, bool):
        return None
    if key.kind is float:
        return _as_float(value)
    if isinstance(value, str):
        value = count(value)
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) else None


def _as_float(value: object) -> float | None:
    if not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond every float
        return None


def _within(key: Key, value: Value) -> bool:
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
        and (key.le is None or value <= key.le)
        and (key.lt is None or value < key.lt)
    )


def _unquoted(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text
