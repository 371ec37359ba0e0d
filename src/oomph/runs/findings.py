"""`Finding`: one thing that an explanation says, in plain words first, with the figures beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

Severity = Literal["info", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
Number = int | float | str | bool | None


class Finding(msgspec.Struct, frozen=True):
    """One thing found. `id` is "topic.what"; a tool may rest on it."""

    id: str
    severity: Severity
    title: str  # one plain sentence, without a full stop
    text: str  # the reasons and the figures, in sentences
    numbers: dict[str, Number] = msgspec.field(default_factory=dict)

    @property
    def topic(self) -> str:
        return self.id.partition(".")[0]


def known(numbers: Mapping[str, Number]) -> dict[str, Number]:
    """The numbers that are known."""
    return {name: number for name, number in numbers.items() if number is not None}


def sentences(parts: Iterable[str | None]) -> str:
    """Parts as sentences: capital letters, full stops, the empty ones left out."""
    found = []
    for part in parts:
        if part:
            end = "" if part.endswith((".", "!", "?", ":")) else "."
            found.append(f"{_begun(part)}{end}")
    return " ".join(found)


def _begun(part: str) -> str:
    """With a capital letter, but names of programs and settings as they are."""
    word = part.split(" ", 1)[0]
    is_name = any(mark in word for mark in "._=") or not word.islower()
    return part if is_name else f"{part[0].upper()}{part[1:]}"


def tflops(rate: float) -> str:
    """A rate in the unit that suits it: 48.0 TFLOPS, 8.3 GFLOPS."""
    return f"{rate:.1f} TFLOPS" if rate >= 1 else f"{1e3 * rate:.1f} GFLOPS"


def several(number: int, what: str) -> str:
    """ "1 step", "4 steps"."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def listed(parts: Iterable[str]) -> str:
    """ "a, b and c"."""
    words = list(parts)
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
