"""The keys of a `TrainConfig` as data: type, default, description and limits of each, for messages and forms."""

from __future__ import annotations

from functools import cache
from types import NoneType
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import msgspec

from oomph.config.schema import TrainConfig

Whose = Literal["nanogpt", "oomph"]
KeyType = type[int] | type[float] | type[str] | type[bool]
KEYS = TrainConfig.__struct_fields__  # every name, in the schema's order
_WORDS = {int: "whole number", float: "number", str: "text", bool: "True or False"}


class Key(msgspec.Struct, frozen=True):
    """One key of a config: enough to document it, to make a form field for it and to check a value."""

    name: str
    type: str  # in words: "whole number", "number", "text", "True or False"
    default: int | float | str | bool | None
    description: str
    whose: Whose
    kind: KeyType
    optional: bool  # None is allowed and means "not set"
    needed: bool  # predictions depend on its value
    choices: tuple[str, ...]
    pattern: str | None
    ge: float | None
    gt: float | None
    le: float | None
    lt: float | None

    @property
    def allowed(self) -> str:
        """The allowed values, in words for an error message."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.pattern is not None:
            return self.description
        if self.kind is str:
            return "text on one line, of at most 4096 characters"
        if self.kind is bool:
            return "True or False"
        return f"a {self.type}{self._limits()}"

    def _limits(self) -> str:
        if self.gt is not None:
            return f" of more than {self.gt:,}" + (f", at most {self.le:,}" if self.le is not None else "")
        if self.ge is None:
            return ""
        if self.lt is not None:
            return f" from {self.ge:,} up to but not including {self.lt:,}"
        if self.le is not None:
            return f" from {self.ge:,} to {self.le:,}"
        return f" of at least {self.ge:,}"


@cache
def keys() -> dict[str, Key]:
    """Every key by name, in the schema's order."""
    hints = get_type_hints(TrainConfig, include_extras=True)
    defaults = TrainConfig.__struct_defaults__
    return {name: _key_of(name, hints[name], default) for name, default in zip(KEYS, defaults, strict=True)}


def describe_keys() -> list[Key]:
    """Every key in the schema's order, nanoGPT's first: for `oomph plan --help` and for a form."""
    return list(keys().values())


def _key_of(name: str, hint: object, default: int | float | str | bool | None) -> Key:
    parts = [hint] if get_origin(hint) is Annotated else [part for part in get_args(hint) if part is not NoneType]
    kind, meta = get_args(parts[0])
    extra = meta.extra
    schema = meta.extra_json_schema or {}
    return Key(
        name=name,
        type=_WORDS[kind],
        default=default,
        description=meta.description,
        whose=extra["whose"],
        kind=kind,
        optional=get_origin(hint) is not Annotated,
        needed=extra["needed"],
        choices=tuple(schema.get("enum", ())),
        pattern=meta.pattern,
        ge=meta.ge,
        gt=meta.gt,
        le=meta.le,
        lt=meta.lt,
    )
