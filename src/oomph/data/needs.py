"""Libraries that come with an extra: imported when they are needed, named with their cure where they are missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from oomph.errors import InputError, Problem

EXTRAS = {
    "datasets": "data",
    "numpy": "train",
    "pyarrow": "data",
    "tiktoken": "train",
    "tiktoken_ext": "train",
    "tokenizers": "train",
    "zstandard": "data",
}


def need(module: str, where: str) -> Any:
    """The module, for what stands at `where`."""
    try:
        return import_module(module)
    except ImportError:
        library = module.partition(".")[0]
        cure = f"after: pip install 'oomph[{EXTRAS[library]}]'"
        raise InputError(Problem(where, f"needs {library}, which is not installed", allowed=cure)) from None
