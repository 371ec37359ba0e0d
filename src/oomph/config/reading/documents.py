"""Configs that are data: TOML (oomph's own format), JSON and YAML; and writing a config as text that `load`
reads back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from oomph.config.keys import keys
from oomph.config.layer import UNSET, Layer, Scope, SourcedValue, parser_message, unknown_keys
from oomph.config.reading import deepspeed, fine_tuning, hugging_face, other_programs, recipes
from oomph.config.schema import TrainConfig
from oomph.config.values import show
from oomph.errors import InputError, Problem

MAX_DOTS = 200  # tomllib's time grows with the square of a dotted key's parts


def read_toml(text: str, label: str) -> Layer:
    """The layer of a TOML file: keys at the top level, one per line."""
    import tomllib

    if any(line.count(".") > MAX_DOTS for line in text.split("\n")):
        raise InputError(Problem(where=label, what=f"a line with more than {MAX_DOTS} dots", allowed="plain keys"))
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError, OverflowError) as error:
        line = re.search(r"at line ([0-9]+)", str(error))
        where = f"{label}:{line[1]}" if line else label
        raise InputError(Problem(where=where, what=f"not TOML: {parser_message(error)}")) from None
    other_programs.refuse(content, label)
    layer = Layer(program="oomph")
    lines = _lines(text)
    unknown: list[tuple[str, str]] = []
    for name, value in content.items():
        where = f"{label}:{lines[name]}" if name in lines else label
        if isinstance(value, dict | list):
            what = f"{name[:60]!r} is a {'table' if isinstance(value, dict) else 'list'}"
            allowed = "plain keys at the top, such as n_layer = 12"
            layer.problems.append(Problem(where=where, what=what, allowed=allowed))
        elif name in keys():
            layer.values[name] = SourcedValue(value, where)
        else:
            unknown.append((name, where))
    layer.problems += unknown_keys(unknown)
    return layer


def looks_like_toml(text: str) -> bool:
    """Whether a config without a name is in our own format: it parses as TOML and not as Python."""
    import tomllib

    try:
        content = tomllib.loads(text) if text.count(".") < 1000 else {}
    except (ValueError, RecursionError):
        return False
    return any(value is True or value is False for value in content.values())


def _lines(text: str) -> dict[str, int]:
    """The first line of each key or table."""
    found: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        match = re.match(r"\s*\[{0,2}\s*[\"']?([A-Za-z0-9_-]+)", line)
        if match:
            found.setdefault(match[1], number)
    return found


def _quoted_lines(text: str) -> dict[str, int]:
    """The first line on which each quoted name appears, at any depth."""
    found: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        for name in re.findall(r"\"([A-Za-z0-9_]+)\"\s*:", line):
            found.setdefault(name, number)
    return found


def read_json(text: str, label: str, scope: Scope) -> Layer:
    """The layer of a Hugging Face `config.json`, of a fine-tuning config, or of a flat object of our own keys."""
    import json

    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        where = f"{label}:{line}" if line else label
        raise InputError(Problem(where=where, what=f"not JSON: {parser_message(error)}")) from None
    if not isinstance(content, dict):
        raise InputError(Problem(where=label, what="not a config", found=show(content), allowed="an object of keys"))
    if hugging_face.is_model(content):
        return hugging_face.read(content, label)
    return _read_fine_tuning(content, text, label, scope) or read_mapping(content, label)


def read_yaml(text: str, label: str, scope: Scope) -> Layer:
    """The layer of a fine-tuning config in YAML, or of our own keys."""
    import yaml  # type: ignore[import-untyped]

    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{label}:{mark.line + 1}" if mark else label
        what = f"not YAML: {parser_message(getattr(error, 'problem', None) or error)}"
        raise InputError(Problem(where=where, what=what)) from None
    if not isinstance(content, dict):
        raise InputError(Problem(where=label, what="not a config", found=show(content), allowed="keys and values"))
    return _read_fine_tuning(content, text, label, scope) or read_mapping(content, label)


def _read_fine_tuning(content: Mapping[str, object], text: str, label: str, scope: Scope) -> Layer | None:
    """The layer of any program's fine-tuning config; None if it is not one."""
    if deepspeed.is_config(content):
        quoted = _quoted_lines(text)
        return deepspeed.read(content, lambda name: f"{label}:{quoted.get(name, 1)}", scope.names.get("n_embd"))
    other_programs.refuse(content, label)
    lines = _lines(text)
    find = hugging_face.find_known if scope.confined else hugging_face.find
    known = "model_type" in scope.given

    def place(name: str) -> str:
        return f"{label}:{lines[name]}" if name in lines else label

    if (layer := recipes.read(content, place, find, known)) is not None:
        return layer
    return fine_tuning.read(content, place, find, known) if fine_tuning.is_config(content) else None


def read_mapping(values: Mapping[str, object], where: str) -> Layer:
    """The layer of a mapping from keys to values."""
    layer = Layer()
    unknown: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(name, str) and name in keys():
            layer.values[name] = SourcedValue(value, where)
        else:
            unknown.append((str(name), where))
    layer.problems += unknown_keys(unknown)
    return layer


def to_toml(config: TrainConfig) -> str:
    """The config in oomph's own format, each key with its description. Unset keys are left out, unless the program has
    defaults for them."""
    return _assignments(config, toml_value)


def to_python(config: TrainConfig) -> str:
    """The config as a file for nanoGPT's train.py, with oomph's own keys too, which nanoGPT ignores."""
    return _assignments(config, repr)


def _assignments(config: TrainConfig, write: Callable[[object], str]) -> str:
    lines = []
    for key in keys().values():
        value = getattr(config, key.name)
        if value is not None or (key.optional and config.trainer not in ("nanogpt", "oomph")):
            lines.append(f"{key.name} = {write(value)}  # {key.description}")
    return "\n".join(lines) + "\n"


def toml_value(value: object) -> str:
    """A value as TOML. None becomes the text that `load` reads as unset, since TOML has no null."""
    if value is None:
        return f'"{UNSET}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        from json import dumps  # JSON's escapes are TOML's, except that TOML escapes DEL too

        return dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
