"""Text to token files, and token files to batches.

    from oomph import data
    data.prepare(["builtin:python"], "data/python", tokenizer="bytes")
    batches = data.Batches("data/python", "train", batch_size=12, block_size=1024)
    x, y = next(batches)

numpy, torch and the tokenizer libraries are imported when they are first needed, not here.
"""

from oomph.data.errors import DataError
from oomph.data.inspect import check, info
from oomph.data.manifest import Manifest, find_dataset, read_manifest
from oomph.data.prepare import prepare
from oomph.data.reader import Batches, Prefetcher

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
