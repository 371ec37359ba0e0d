"""What is wrong with a question's form, in the words of a person instead of the decoder's."""

from __future__ import annotations

import re

from oomph.errors import Problem

NAMES = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
    "object": "an object",
    "array": "a list",
}
_KIND = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_SIZE = re.compile(r"Expected `(str|array)` of length (<=|>=) (\d+)")
_RANGE = re.compile(r"Expected `(?:int|float)` (<=|>=|<|>) (\S+)")
_FIELD = re.compile(r"Object (contains unknown|missing required) field `([^`]*)`")
_SIGNS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than"}
_UNITS = {"str": "characters", "array": "entries"}


def in_words(message: str) -> Problem:
    """A message of msgspec's, such as "Expected `float`, got `str` - at `$.hours`", as a problem."""
    what, _, place = message.partition(" - at ")
    where = place.strip("`").removeprefix("$").strip(".").replace("[...]", "") or "body"
    if found := _KIND.fullmatch(what):
        return Problem(where, "is of another kind", _named(found[2]), _named(found[1]))
    if found := _SIZE.fullmatch(what):
        wrong = "is too long" if found[2] == "<=" else "is too short"
        return Problem(where, wrong, allowed=f"{_SIGNS[found[2]]} {int(found[3]):,} {_UNITS[found[1]]}")
    if found := _RANGE.fullmatch(what):
        return Problem(where, "is out of range", allowed=f"{_SIGNS[found[1]]} {found[2]}")
    if found := _FIELD.fullmatch(what):
        inside = "" if where == "body" else f"{where}."
        wrong = "is no field here" if found[1].startswith("contains") else "is missing"
        return Problem(f"{inside}{found[2][:100]}", wrong)
    return Problem(where, what[:300])


def _named(kinds: str) -> str:
    return " or ".join(NAMES.get(kind, kind) for kind in kinds.split(" | "))
