"""Text to token files, and token files to batches.

    from oomph import data
    data.prepare(["builtin:python"], "data/python", tokenizer="bytes")
    batches = data.Batches("data/python", "train", batch_size=12, block_size=1024)
    x, y = next(batches)

Importing this imports neither numpy nor a tokenizer: each comes when it is first needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomph.data.failure import DataError as DataError
    from oomph.data.inspect import check as check
    from oomph.data.inspect import info as info
    from oomph.data.manifest import Manifest as Manifest
    from oomph.data.manifest import find_dataset as find_dataset
    from oomph.data.manifest import read_manifest as read_manifest
    from oomph.data.prefetch import Prefetcher as Prefetcher
    from oomph.data.prepare import prepare as prepare
    from oomph.data.reader import Batches as Batches

_HOMES = {
    "Batches": "reader",
    "DataError": "failure",
    "Manifest": "manifest",
    "Prefetcher": "prefetch",
    "check": "inspect",
    "find_dataset": "manifest",
    "info": "inspect",
    "prepare": "prepare",
    "read_manifest": "manifest",
}
__all__ = [
    "Batches",
    "DataError",
    "Manifest",
    "Prefetcher",
    "check",
    "find_dataset",
    "info",
    "prepare",
    "read_manifest",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'oomph.data' has no attribute '{name}'")
    value = getattr(import_module(f"oomph.data.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
