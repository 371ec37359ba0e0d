"""What inductor plans for small models, kept in a file: it takes half a minute to plan what is read here in a moment.

The plans depend on nothing but the model and the versions of torch and transformers. `make record` asks inductor for
all of them again; in every run of CI some tests (`asked_again`) do so for a few.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from oomph.config.schema import TrainConfig

_FILE = Path(__file__).with_name("inductor_plans.json")
_ANEW = os.environ.get("OOMPH_RECORD") == "1"
T = TypeVar("T")


def recorded(name: str, model: Any, ask: Callable[[], T], asked_again: bool = False) -> T:
    """What `ask` says of a model (a JSON value): from the file, where it is of this model and these versions."""
    entry = _record()["plans"].get(name)
    fingerprint = _fingerprint(model)
    if not _ANEW and _record()["versions"] == _versions():
        assert entry is not None, f"no plan of {name!r} is recorded: make record"
        assert entry["model"] == fingerprint, f"the recorded plan of {name!r} is of another model: make record"
        if not asked_again:
            said: T = entry["plan"]
            return said
    answer = ask()
    if _ANEW:
        _write(name, {"model": fingerprint, "plan": answer})
    elif entry is not None and _record()["versions"] == _versions():
        assert answer == entry["plan"], f"inductor plans {name!r} otherwise than recorded"
    return answer


@cache
def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name).split("+")[0] for name in ("torch", "transformers")}


@cache
def _record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_FILE.read_text())
    return found


def _write(name: str, entry: dict[str, Any]) -> None:
    plans = {**json.loads(_FILE.read_text())["plans"], name: entry}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(plans[name])}" for name in sorted(plans))
    _FILE.write_text(f'{{"versions": {json.dumps(_versions())}, "plans": {{\n{lines}\n}}}}\n')


def _fingerprint(model: Any) -> str:
    """Of what is not left at its default, so that a key that is added to the schema changes no model."""
    if isinstance(model, TrainConfig):
        plain = TrainConfig()
        keys = {key: value for key, value in msgspec.structs.asdict(model).items() if value != getattr(plain, key)}
    else:
        keys = dataclasses.asdict(model)
    return hashlib.sha1(json.dumps(keys, sort_keys=True, default=str).encode()).hexdigest()[:12]
