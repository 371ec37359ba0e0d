"""A verb's own options, and any config key beside them as `--key=value`, exactly as nanoGPT takes them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from oomph.config import KEYS, Override
from oomph.errors import InputError, Problem, nearest


class VerbParser(argparse.ArgumentParser):
    """argparse, with errors of our own kind and no guessing of abbreviations."""

    def __init__(self, verb: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"oomph {verb}",
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._problems: list[Problem] | None = None  # where a value that is wrong is noted, not raised

    def error(self, message: str) -> NoReturn:
        raise InputError(self._problem(message))

    def _problem(self, message: str) -> Problem:
        return Problem(self.prog, message, allowed=f"what {self.prog} --help lists")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """argparse's own, which ends at the first wrong value; with `problems`, the option is then as if not given."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            if self._problems is None:
                raise
            self._problems.append(self._problem(str(error)))
            return action.default

    def options(self) -> set[str]:
        """The names this verb takes for itself, without dashes."""
        return {option.lstrip("-") for action in self._actions for option in action.option_strings}

    def parse(
        self, argv: Sequence[str], problems: list[Problem] | None = None
    ) -> tuple[argparse.Namespace, list[Override]]:
        """The verb's own options, and the config keys among the arguments.

        Unknown names and wrong values are added to `problems`, for a caller who has more to find; else they are raised.
        """
        rest, overrides, found = split_keys(argv, self.options())
        if found and problems is None:
            raise InputError(found)
        if problems is not None:
            problems.extend(found)
        self._problems = problems
        return self.parse_intermixed_args(rest), overrides  # `a.toml --resume b.toml`: files before and after options


def split_keys(argv: Sequence[str], own: set[str]) -> tuple[list[str], list[Override], list[Problem]]:
    """Arguments that are the verb's own, `--key=value` or `--key value` for config keys, and what is neither."""
    rest: list[str] = []
    overrides: list[Override] = []
    problems: list[Problem] = []
    position = 0
    while position < len(argv):
        argument = argv[position]
        position += 1
        if not argument.startswith("--") or argument == "--":
            rest.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        if name in own:
            rest.append(f"--{name}{equals}{value}")
        elif name not in KEYS:
            known = [f"--{key}" for key in (*sorted(own), *KEYS)]
            problems.append(
                Problem(argument, f"unknown option or config key '{name}'", nearest=nearest(f"--{name}", known))
            )
            position += not equals and _is_value(argv, position)
        elif equals:
            overrides.append((name, value, argument))
        elif _is_value(argv, position):
            overrides.append((name, argv[position], f"{argument} {argv[position]}"))
            position += 1
        else:
            problems.append(Problem(argument, "needs a value", allowed=f"--{name}=VALUE"))
    return rest, overrides, problems


def _is_value(argv: Sequence[str], position: int) -> bool:
    return position < len(argv) and not argv[position].startswith("--")
