"""`Finding`: one statement of an explanation, with its figures.

Each module makes those of one kind of evidence. A new one is a function that its module's `findings()` yields from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from oomph.runs.run import Scalar

Severity = Literal["info", "warning", "error"]
# What a finding rests on: read in the log; following from it by arithmetic or by the plan of the stated settings; or
# a guess among several possibilities. A guess says "may" or "could", and is never a headline.
Basis = Literal["read", "follows", "guess"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


class Finding(msgspec.Struct, frozen=True):
    """One thing found. The `id`, "topic.what", is stable: tools and tests rely on it, not on the words."""

    id: str
    severity: Severity
    title: str  # one plain sentence, without a full stop
    text: str  # reasons and figures, in sentences
    numbers: dict[str, Scalar] = msgspec.field(default_factory=dict)
    basis: Basis = "follows"

    @property
    def topic(self) -> str:
        return self.id.partition(".")[0]


def known(numbers: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The numbers that are not None."""
    return {name: number for name, number in numbers.items() if number is not None}


# --- words -----------------------------------------------------------------------------------------


def sentences(parts: Iterable[str | None]) -> str:
    """The parts as sentences with capital letters and full stops; None and "" are skipped."""
    return " ".join(
        f"{_capitalised(part)}{'' if part.endswith(('.', '!', '?', ':')) else '.'}" for part in parts if part
    )


def _capitalised(part: str) -> str:
    """With a capital letter, unless the first word is the name of a program or a setting."""
    word = part.split(" ", 1)[0]
    is_name = any(mark in word for mark in "._=") or not word.islower()
    return part if is_name else f"{part[0].upper()}{part[1:]}"


def listed(parts: Iterable[str]) -> str:
    """ "a, b and c"."""
    words = list(parts)
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
