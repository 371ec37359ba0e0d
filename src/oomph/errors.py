"""Errors for the user: what is wrong, where, what was found, what is allowed, the nearest valid name.

Readers collect every `Problem` and raise one `InputError`, so that the user fixes a file once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing wrong with the input, in the words the user will read."""

    where: str  # "config/run.py:12", "--n_embd=770", "preset"
    what: str  # "unknown key 'batch_sise'"
    found: str | None = None  # the value as the user wrote it
    allowed: str | None = None  # "a whole number of at least 1"
    nearest: str | None = None  # the closest valid name

    def __str__(self) -> str:
        parts = [f"{self.where}: {self.what}"]
        if self.found is not None:
            parts.append(f"found {self.found}")
        if self.allowed is not None:
            parts.append(f"allowed: {self.allowed}")
        if self.nearest is not None:
            parts.append(f"did you mean {self.nearest}?")
        return "; ".join(parts)


class InputError(Exception):
    """The input is wrong. Carries every problem found, not only the first. The command exits with 2."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


def nearest(name: str, choices: Sequence[str]) -> str | None:
    """The choice most like `name`; None where none is close."""
    from difflib import get_close_matches  # a few milliseconds, needed only when something is wrong

    folded = {choice.lower(): choice for choice in choices}
    close = get_close_matches(name.lower(), list(folded), n=1, cutoff=0.6)
    return folded[close[0]] if close else None
