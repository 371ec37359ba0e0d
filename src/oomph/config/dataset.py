"""What the data on this disk says of a run: its tokens, from train.bin, and its vocabulary, from meta.pkl."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from oomph.config.layer import Layer
from oomph.config.values import Said

MAX_META_BYTES = 2**24


def look(dataset: str, roots: Iterable[Path]) -> Layer:
    """`dataset_tokens` and `vocab_size` as the first folder found has them; an empty layer where there is none.

    nanoGPT reads data/NAME below the folder it runs in; `roots` are that folder and those of the config files.
    """
    layer = Layer()
    file, size = _train_bin(dataset, roots)
    if file is None:
        return layer
    meta_file = file.with_name("meta.pkl")
    meta = _meta(meta_file, layer)
    words = meta.get("vocab_size")
    if isinstance(words, int) and not isinstance(words, bool):
        layer.values["vocab_size"] = Said(words, str(meta_file))
    token_bytes = 4 if meta.get("dtype") in ("uint32", "int32") else 2
    if size >= token_bytes:
        layer.values["dataset_tokens"] = Said(size // token_bytes, f"{file}, at {token_bytes} bytes a token")
    return layer


def _train_bin(dataset: str, roots: Iterable[Path]) -> tuple[Path | None, int]:
    """The first train.bin there is, and its size in bytes."""
    for root in roots:
        for file in (root / "data" / dataset / "train.bin", root / dataset / "train.bin"):
            try:
                if file.is_file():
                    return file, file.stat().st_size
            except (OSError, ValueError):  # a name that no file system takes
                continue
    return None, 0


def _meta(file: Path, layer: Layer) -> dict[object, object]:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_META_BYTES + 1)
    except OSError:
        return {}
    from oomph.config import pickles  # seldom needed, and its tables take a moment

    try:
        if len(data) > MAX_META_BYTES:
            raise pickles.RefusedError("it is larger than 16 MiB")
        content = pickles.read(data)
    except pickles.RefusedError as refusal:
        layer.notes.append(f"{file}: not read, and nothing in it was run: {refusal}")
        return {}
    return content if isinstance(content, dict) else {}
