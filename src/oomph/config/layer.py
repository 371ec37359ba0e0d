"""The contents of one source: its settings with their places, notes and problems. Every reader returns a `Layer`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from oomph.config.keys import KEYS
from oomph.errors import Problem, nearest

EACH_DEVICES = " (each device's)"  # ends the place of a number that is per device in its program
UNSET = "None"  # unsets a key in TOML, which has no null
MAX_UNKNOWN = 20  # listed one by one; a file with more is not a config


class SourcedValue(NamedTuple):
    """A value and where it was given. `firm` is False for a program's defaults, whose replacement needs no note."""

    value: object
    where: str
    firm: bool = True
    name: str | None = None  # the key's name in that file, if not ours


class UnknownValue(msgspec.Struct, frozen=True):
    """A value that a file sets but that cannot be worked out from its text."""

    reason: str
    needs_running: bool = True  # False: the expression is wrong or out of bounds, running it would not help


class Layer(msgspec.Struct):
    """What reading one source gave."""

    values: dict[str, SourcedValue] = msgspec.field(default_factory=dict)
    notes: list[str] = msgspec.field(default_factory=list)
    problems: list[Problem] = msgspec.field(default_factory=list)
    foreign: set[str] = msgspec.field(default_factory=set)  # a fork's own keys, which later files may set too
    program: str | None = None  # the program whose format it is: the trainer, unless one is set
    is_model: bool = False  # a whole model: it replaces an earlier one


# Key names of what forks of nanoGPT add to a step: fewer key and value heads, rotary positions,
# checkpointing, experts, windows, other MLPs, adapters, lower precision, averaged weights, other optimizers.
CHANGES_A_STEP = re.compile(
    r"kv_?head|num_key_value|gqa|mqa|rope|rotary|alibi|(?:use|grad\w*|activation)_checkpoint|recompute|expert|moe|window"
    r"|swiglu|geglu|ffn|mlp|lora|quant|fp8|\bema|_ema|offload|muon|attn|attention|fsdp|zero_stage",
    re.IGNORECASE,
)


class Scope(msgspec.Struct):
    """The names a config file may use: every value so far, and a fork's own keys."""

    names: dict[str, object]
    foreign: set[str] = msgspec.field(default_factory=set)
    given: set[str] = msgspec.field(default_factory=set)  # keys that a source has set
    confined: bool = False  # untrusted: no name in it is looked up on disk

    def changing_a_step(self) -> set[str]:
        """A fork's own keys that are switched on and, judging by their names, change a step's memory or time."""
        return {name for name in self.foreign if CHANGES_A_STEP.search(name) and self.names.get(name, True)}

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
