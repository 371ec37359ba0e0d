"""How tests check a refusal: by the parts of its problems (where, found, allowed, nearest), not by its wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from oomph.errors import InputError, Problem


@contextmanager
def refused(where: str = "", found: str = "", allowed: str = "", nearest: str | None = None) -> Iterator[list[Problem]]:
    """The body raises `InputError`, and one of its problems has these texts in its parts. Yields all problems."""
    problems: list[Problem] = []
    with pytest.raises(InputError) as error:
        yield problems
    problems += error.value.problems
    wanted = {"where": where, "found": found, "allowed": allowed, "nearest": nearest or ""}
    assert any(all(text in (getattr(problem, part) or "") for part, text in wanted.items()) for problem in problems), (
        f"{wanted} is in none of: {error.value}"
    )
