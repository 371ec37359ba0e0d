"""What one source says: values with their places, things passed over, and problems. Readers make these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from oomph.config.keys import KEYS
from oomph.config.values import Said, Unreadable
from oomph.errors import Problem, nearest

MAX_UNKNOWN = 20  # named one by one: a file with more unknown keys is no config at all


@dataclass
class Layer:
    """The outcome of reading one source."""

    values: dict[str, Said] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    foreign: set[str] = field(default_factory=set)  # keys of a fork, which later files may set too
    ours: bool = False  # oomph's own format: its trainer is oomph unless said otherwise


@dataclass
class Known:
    """What is known before a source is read: every value so far, and a fork's own keys."""

    names: dict[str, object]
    foreign: set[str] = field(default_factory=set)

    def take(self, layer: Layer) -> None:
        self.foreign |= layer.foreign
        for name, said in layer.values.items():
            if said.value is None:
                self.names[name] = Unreadable("it is not said")
            else:
                self.names[name] = said.value


def unknown_keys(names: Sequence[tuple[str, str]], advice: str = "") -> list[Problem]:
    """Names that are no keys, each with its place: almost always misspellings, which nanoGPT would have let pass."""
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


def reason(error: BaseException) -> str:
    """Why a parser gave up, in few words of its own and none about Python's inner limits."""
    text = str(getattr(error, "msg", None) or error)
    if isinstance(error, RecursionError | MemoryError):
        return "nested too deeply to be read"
    return "a number has too many digits" if "integer string conversion" in text else text[:120]
