"""Many lines of one form at once.

Lines of a log that differ in their digits alone have the same form. Where one of them has been read with a regular
expression, the others need none: the same numbers stand at the same places. Translating and splitting all of them
together is some ten times as fast as going line by line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

DIGITS = b"0123456789.-"  # what is left out to get a line's form
Spans = Mapping[str, tuple[int, int]]  # where each column's value stands in a line

_BLANK = bytes(byte if byte in DIGITS else 32 for byte in range(256))
_decode = msgspec.json.Decoder(list[float]).decode
_WORDS = {"nan": float("nan"), "-nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


class Column(NamedTuple):
    """Where a column's value stands among the numbers of a line."""

    name: str
    place: int
    has_exponent: bool  # 6.0e-04: its exponent counts as the next number
    constant: float | None = None  # a word, "nan", which is the same in every line of the form


class Layout(NamedTuple):
    """How to read every line of one form."""

    columns: tuple[Column, ...]
    width: int  # numbers in a line


def form(data: bytes) -> bytes:
    """The text without its digits."""
    return data.translate(None, DIGITS)


def layout(line: str, spans: Spans) -> Layout | None:
    """The layout of all lines with this line's form; None where a value is not a number of its own."""
    if not line.isascii():
        return None
    columns = []
    for name, (start, end) in spans.items():
        value = line[start:end]
        if value.lower() in _WORDS:
            columns.append(Column(name, 0, False, _WORDS[value.lower()]))
        elif (start and line[start - 1].encode() in DIGITS) or not value[-1:].isdigit():
            return None
        else:
            columns.append(Column(name, len(_numbers(line[:start])), "e" in value.lower()))
    return Layout(tuple(columns), len(_numbers(line)))


def read(lines: Sequence[str], layout: Layout) -> dict[str, list[float]] | None:
    """The columns of lines of one form; None where one does not have the numbers it should."""
    numbers = _numbers("\n".join(lines))
    width = layout.width
    if len(numbers) != width * len(lines):
        return None
    found: dict[str, list[float]] = {}
    try:
        for column in layout.columns:
            values = numbers[column.place :: width]
            if column.constant is not None:
                found[column.name] = [column.constant] * len(lines)
            elif column.has_exponent:
                exponents = numbers[column.place + 1 :: width]
                found[column.name] = [float(f"{a}e{b}") for a, b in zip(values, exponents, strict=True)]
            else:
                found[column.name] = _floats(values)
    except ValueError:
        return None
    return found


def _floats(values: Sequence[str]) -> list[float]:
    """The values as numbers, by way of JSON: its decoder is three times as fast as `float`, but takes no 007."""
    try:
        return _decode(f"[{','.join(values)}]")
    except msgspec.DecodeError:
        return list(map(float, values))


def _numbers(text: str) -> list[str]:
    return text.encode().translate(_BLANK, b",").decode("ascii").split()
