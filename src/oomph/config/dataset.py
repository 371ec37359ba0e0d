"""What the data on this disk says of a run: its tokens and its vocabulary, from the files beside it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from oomph.config.layer import Layer
from oomph.config.values import Said

MAX_META_BYTES = 2**24
VOCABULARY_MULTIPLE = 64  # nanoGPT's 50304 is GPT-2's 50257 rounded up to it
TRAIN, META, MANIFEST = "train.bin", "meta.pkl", "meta.json"


def is_plain(dataset: str) -> bool:
    """Whether it is a name, and not a path that leads elsewhere."""
    return dataset not in (".", "..") and not any(letter in dataset for letter in "/\\:\0")


def look(dataset: str, roots: Iterable[Path]) -> Layer:
    """`dataset_tokens` and `vocab_size` as the first folder found has them; an empty layer where there is none.

    nanoGPT reads data/NAME below the folder it runs in; `roots` are that folder and those of the config files.
    """
    layer = Layer()
    folder = _folder(dataset, roots)
    if folder is None:
        return layer
    _manifest(folder / MANIFEST, layer)
    meta = _meta(folder / META, layer)
    words = meta.get("vocab_size")
    if isinstance(words, int) and not isinstance(words, bool):  # nanoGPT takes it as it is
        layer.values["vocab_size"] = Said(words, str(folder / META))
    if "dataset_tokens" in layer.values:
        return layer
    token_bytes = 4 if meta.get("dtype") in ("uint32", "int32") else 2
    train = folder / TRAIN
    size = train.stat().st_size if train.is_file() else 0
    if size >= token_bytes:
        layer.values["dataset_tokens"] = Said(size // token_bytes, f"{train}, at {token_bytes} bytes a token")
    return layer


def _folder(dataset: str, roots: Iterable[Path]) -> Path | None:
    """The first folder of that name that holds data."""
    for root in roots:
        for folder in (root / "data" / dataset, root / dataset):
            try:
                if any((folder / name).is_file() for name in (TRAIN, META, MANIFEST)):
                    return folder
            except (OSError, ValueError):  # a name that no file system takes
                continue
    return None


def _manifest(file: Path, layer: Layer) -> None:
    """Take what `oomph data` wrote beside its token files. The vocabulary is padded, as nanoGPT pads GPT-2's."""
    if not file.is_file() or file.stat().st_size > MAX_META_BYTES:
        return
    import json

    try:
        content = json.loads(file.read_bytes())
        tokens, words = int(content["splits"]["train"]["tokens"]), int(content["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        layer.notes.append(f"{file}: not a manifest of oomph data: passed over")
        return
    padded = -(-words // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    layer.values["dataset_tokens"] = Said(tokens, str(file))
    layer.values["vocab_size"] = Said(
        padded, f"{file}: {words} words, rounded up to a multiple of {VOCABULARY_MULTIPLE}"
    )


def _meta(file: Path, layer: Layer) -> dict[object, object]:
    try:
        if not file.is_file():  # a pipe of that name would keep us waiting
            return {}
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
