"""`meta.json` beside the token files: what they hold and what they were made from. docs/data.md lists its fields."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from oomph.errors import InputError, Problem, nearest

MANIFEST = "meta.json"
META_PICKLE = "meta.pkl"
TOKENIZER = "tokenizer.json"
SET_FILES = ("train.bin", "val.bin", META_PICKLE, TOKENIZER)  # files that a set may have besides its manifest
SPLITS = ("train", "val")
VERSION = 1
MAX_MANIFEST_BYTES = 2**26


class Split(msgspec.Struct):
    """One token file."""

    file: str
    tokens: int = 0
    documents: int = 0
    sha256: str = ""


class TokenizerInfo(msgspec.Struct):
    """Which tokenizer made the ids."""

    name: str  # gpt2, bytes, chars, bpe:8192, or the name of a tokenizer.json
    vocab_size: int
    end_of_text: int | None
    sha256: str
    file: str | None = None  # beside the token files, if needed to turn ids back into text


class Counts(msgspec.Struct):
    """What was read, both splits together."""

    documents: int = 0
    empty: int = 0  # documents without text: left out
    repaired: int = 0  # documents whose invalid UTF-8 became U+FFFD
    broken: int = 0  # rows that are not documents, left out with --skip_broken
    text_bytes: int = 0  # of the documents included, as UTF-8


class Manifest(msgspec.Struct):
    """Everything known about a finished set."""

    version: int
    dtype: Literal["uint16", "uint32"]  # little-endian
    vocab_size: int  # ids are below it
    tokenizer: TokenizerInfo
    splits: dict[str, Split]
    counts: Counts
    files: list[str]  # all files of the set besides meta.json
    recipe: dict[str, Any]  # sources and settings: the same recipe makes the same bytes
    standard_input: dict[str, int | str] | None = None  # offset: how many bytes were read; sha256: of those

    @property
    def token_bytes(self) -> int:
        return token_bytes(self.dtype)

    def damage(self, folder: Path) -> list[str]:
        """Files of the set that are missing or have the wrong size, without reading them."""
        sizes = {split.file: split.tokens * self.token_bytes for split in self.splits.values()}
        found = []
        for name in {**sizes, **dict.fromkeys(self.files)}:
            path = folder / name
            if not path.is_file():
                found.append(f"{name} is missing")
            elif path.stat().st_size != sizes.get(name, path.stat().st_size):
                found.append(f"{name} has {path.stat().st_size:,} bytes instead of {sizes[name]:,}")
        return found


def token_bytes(dtype: str) -> int:
    """Bytes per token in a file."""
    return {"uint16": 2, "uint32": 4}[dtype]


def find_dataset(dataset: str, roots: Iterable[Path] | None = None) -> Path:
    """The folder with a train.bin for `dataset = 'name'`: data/name as in nanoGPT, or a path."""
    looked: list[Path] = []
    for root in roots or (Path(),):
        for folder in (root / "data" / dataset, root / dataset):
            looked.append(folder)
            if (folder / "train.bin").is_file():
                return folder
    beside = sorted(path.parent.name for root in roots or (Path(),) for path in (root / "data").glob("*/train.bin"))
    raise InputError(
        Problem(
            f"dataset {dataset!r}",
            "no token files",
            found=f"no train.bin in {' or '.join(map(str, looked))}",
            allowed="a folder made by `oomph data` or by a nanoGPT prepare.py",
            nearest=nearest(dataset, beside),
        )
    )


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in a folder; None if there is none, as in an unfinished set or one that nanoGPT made."""
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            content = file.read(MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(Problem(str(path), "cannot be read", found=error.strerror)) from None
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
        check_parts(manifest.recipe, manifest.splits)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InputError(
            Problem(str(path), "not a manifest of oomph data", found=str(error), allowed="--overwrite to start over")
        ) from None
    if manifest.version != VERSION:
        raise InputError(
            Problem(
                str(path), "made by another version of oomph", found=str(manifest.version), allowed=f"version {VERSION}"
            )
        )
    return manifest


def check_parts(recipe: dict[str, Any], splits: dict[str, Split]) -> None:
    """Raise ValueError if something is missing that the types do not check."""
    if set(splits) != set(SPLITS):
        raise ValueError(f"the splits are not {' and '.join(SPLITS)}")
    sources = recipe.get("sources")
    if not isinstance(sources, list) or not all(isinstance(entry, dict) and "name" in entry for entry in sources):
        raise ValueError("the recipe has no list of sources")


def to_json(value: object) -> bytes:
    """Indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def meta_pickle(characters: str, end_of_text: int | None) -> bytes:
    """nanoGPT's meta.pkl for a character vocabulary: plain dicts that its train.py and sample.py read."""
    import pickle

    names = list(characters) + (["<|endoftext|>"] if end_of_text is not None else [])
    meta = {
        "vocab_size": len(names),
        "itos": dict(enumerate(names)),
        "stoi": {name: number for number, name in enumerate(names)},
    }
    return pickle.dumps(meta, protocol=4)


def size_pickle(vocab_size: int) -> bytes:
    """A meta.pkl that only tells nanoGPT's train.py the vocabulary size, for other tokenizers."""
    import pickle

    return pickle.dumps({"vocab_size": vocab_size}, protocol=4)


def read_meta_pickle(path: Path) -> dict[str, Any]:
    """nanoGPT's meta.pkl, read as plain data: no code in it is executed."""
    from oomph.config.reading import pickles

    try:
        meta = pickles.read(path.read_bytes())
    except OSError as error:
        raise InputError(Problem(str(path), "cannot be read", found=error.strerror)) from None
    except pickles.RefusedError as error:
        raise InputError(Problem(str(path), "not plain data", found=str(error), allowed="nanoGPT's meta.pkl")) from None
    if not isinstance(meta, dict):
        raise InputError(Problem(str(path), "not nanoGPT's meta.pkl", found=f"a {type(meta).__name__}"))
    return {str(key): value for key, value in meta.items()}
