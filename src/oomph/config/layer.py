"""What one source says: its settings with their places, notes and problems. Every reader returns a `Layer`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from oomph.config.schema import KEYS
from oomph.errors import Problem, nearest

UNSET = "None"  # what unsets a key in TOML, which has no null
MAX_UNKNOWN = 20  # named one by one; a file with more is not a config


class SourcedValue(NamedTuple):
    """A value and where it was given. `firm` is False for a program's defaults, whose replacement needs no note."""

    value: object
    where: str
    firm: bool = True


@dataclass(frozen=True)
class UnknownValue:
    """A value that a file sets but that cannot be worked out from its text."""

    reason: str
    needs_running: bool = True  # False: the expression is wrong or out of bounds, running it would not help


@dataclass
class Layer:
    """What reading one source gave."""

    values: dict[str, SourcedValue] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    foreign: set[str] = field(default_factory=set)  # a fork's own keys, which later files may set too
    program: str | None = None  # whose format it is: the trainer, unless one is set


@dataclass
class Scope:
    """The names a config file may use: every value so far, and a fork's own keys."""

    names: dict[str, object]
    foreign: set[str] = field(default_factory=set)
    given: set[str] = field(default_factory=set)  # keys that a source has set
    confined: bool = False  # it is a stranger's: no name in it is looked for on the disk

    def take(self, layer: Layer) -> None:
        self.foreign |= layer.foreign
        self.given |= layer.values.keys()
        for name, said in layer.values.items():
            if said.value is None:
                self.names[name] = UnknownValue("it is not set")
            else:
                self.names[name] = said.value


def unknown_keys(names: Sequence[tuple[str, str]], advice: str = "") -> list[Problem]:
    """Problems for names that are not keys, each with its place: mostly misspellings, which nanoGPT would accept."""
    problems = [
        Problem(
            where=where,
            what=f"unknown key {name[:60]!r}",
            allowed=f"a key of nanoGPT or oomph{advice}",
            nearest=nearest(name[:60], KEYS),
        )
        for name, where in names[:MAX_UNKNOWN]
    ]
    if len(names) > MAX_UNKNOWN:
        problems.append(Problem(where=names[MAX_UNKNOWN][1], what=f"{len(names) - MAX_UNKNOWN} more unknown keys"))
    return problems


def parser_message(error: BaseException) -> str:
    """A parser's error in a few words, without Python's internal limits."""
    text = str(getattr(error, "msg", None) or error)
    if isinstance(error, RecursionError | MemoryError):
        return "nested too deeply to be read"
    return "a number has too many digits" if "integer string conversion" in text else text[:120]
