"""Comments that state a product, such as "16 * 32 * 1024 = 524,288", made true again when its factors change."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from math import prod

FACTORS = ("batch_size", "gradient_accumulation_steps", "block_size")
_NUMBER = re.compile(r"\d[\d,_]*")
_TIMES = r"(?:[*×·]|(?<=[\s\d])x(?=[\s\d]))"
_TERM = r"[^=≈*×·#\n]*?\d[^=≈*×·#\n]*?"
_RESULT = r"(\d+\.\d+|\d[\d,_]*\d|\d)( ?(?:[kKM]|million)\b)?"  # 524,288 or 0.5M
_PRODUCT = re.compile(rf"({_TERM}(?:{_TIMES}{_TERM})+)([=≈]\s*~?\s*){_RESULT}")
_WORDS = {
    "batch_size": r"batch|sequence",
    "gradient_accumulation_steps": r"accum|micro",
    "block_size": r"block|context",
}


def correct(comment: str, old: Mapping[str, int], new: Mapping[str, int]) -> str:
    """The comment with each product of the old values that it states restated for the new ones."""
    return _PRODUCT.sub(lambda match: _restate(match, old, new), comment)


def _restate(match: re.Match[str], old: Mapping[str, int], new: Mapping[str, int]) -> str:
    terms, equals, stated, unit = match.groups(default="")
    pieces = re.split(rf"({_TIMES})", terms)
    numbers = [_NUMBER.search(piece) for piece in pieces[::2]]
    values = [_value(number[0]) for number in numbers if number is not None]
    result = _result_like(stated, unit, prod(values))
    if result is None:
        return match[0]  # not a product after all
    changed = _factors(pieces[::2], values, old, new)
    if changed == values:
        return match[0]
    for place, (number, value) in enumerate(zip(numbers, changed, strict=True)):
        if number is not None and value != values[place]:
            piece = pieces[2 * place]
            pieces[2 * place] = piece[: number.start()] + _like(number[0], value) + piece[number.end() :]
    return "".join(pieces) + equals + result(prod(changed)) + unit


def _factors(terms: list[str], values: list[int], old: Mapping[str, int], new: Mapping[str, int]) -> list[int]:
    """The factors with the new values in their places: known by the words beside them, else by their size. All as they
    were where a named one was not true before: nobody knows what such a comment is about."""
    changed = list(values)
    free = set(range(len(values)))
    for key in FACTORS:
        named = [place for place in sorted(free) if re.search(_WORDS[key], terms[place], re.IGNORECASE)]
        equal = [place for place in sorted(free) if values[place] == old[key]]
        place = next((place for place in [*(each for each in named if each in equal), *named, *equal]), None)
        if place is None:
            continue
        free.discard(place)
        part = key == "gradient_accumulation_steps" and old[key] % max(1, values[place]) == 0
        if values[place] != old[key] and not part:
            return values
        # A factor of an accumulation over several devices, "5 gradaccum * 8 GPUs", grows as the whole does.
        scaled, rest = divmod(values[place] * new[key], old[key])
        if rest:
            return values
        changed[place] = scaled
    return changed


def _result_like(stated: str, unit: str, product: int) -> Callable[[int], str] | None:
    """How to state a product as this one is stated; None where it is not the one stated. A rounded one, "0.5M", keeps
    its digits after the point, and gets more where they would be more than 5 % off."""
    if not unit:
        return partial(_like, stated) if "." not in stated and _value(stated) == product else None
    if not 0 < product < 10**18:
        return None  # nobody's batch
    for base in (1000, 1024):  # 524,288 is 524K to some, 512K to others
        scale = base if unit.strip() in "kK" else base**2
        digits = len(stated.partition(".")[2])
        if f"{product / scale:.{digits}f}" == stated:
            return partial(_rounded, scale, digits)
    return None


def _rounded(scale: int, digits: int, value: int) -> str:
    text = f"{value / scale:.{digits}f}"
    return text if abs(float(text) * scale / value - 1) <= 0.05 else _rounded(scale, digits + 1, value)


def _value(text: str) -> int:
    return int(text.replace(",", "").replace("_", ""))


def _like(text: str, value: int) -> str:
    """The number with the other one's separators."""
    return f"{value:,}" if "," in text else f"{value:_}" if "_" in text else str(value)
