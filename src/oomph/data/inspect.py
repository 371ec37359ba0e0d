"""`oomph data info` and `check`: what a folder of token files holds, and whether it is intact."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from oomph.data.errors import printable, require
from oomph.data.manifest import (
    META_PICKLE,
    SPLITS,
    TOKENIZER,
    Manifest,
    find_dataset,
    read_manifest,
    read_meta_pickle,
    token_bytes,
)
from oomph.data.tokenizer import GPT2_VOCAB_SIZE
from oomph.data.work import JOURNAL, WORK, Journal, decode_journal
from oomph.errors import InputError, Problem

READ_BYTES = 2**22


@dataclass
class DataCheck:
    """What was checked, and what failed."""

    folder: Path
    checks: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def info(path: str | Path) -> dict[str, Any]:
    """What a folder holds, as plain values: from the manifest, or what can be found without one."""
    folder = _folder(path)
    manifest = read_manifest(folder)
    if manifest is not None:
        facts: dict[str, Any] = msgspec.to_builtins(manifest)
        sources = facts["recipe"]["sources"]
        damage = manifest.damage(folder)
        return {
            "folder": printable(folder),
            "state": "damaged" if damage else "finished",
            "damage": damage,
            "made_by": "oomph data",
            **facts,
            "sources": len(sources),
        }
    unfinished = _unfinished(folder)
    if unfinished is not None:
        splits = {name: msgspec.to_builtins(split) for name, split in unfinished.splits.items()}
        return {"folder": printable(folder), "state": "unfinished", "made_by": "oomph data", "splits": splits}
    vocab_size, meta = _vocabulary(folder)
    splits = {}
    for name in SPLITS:
        file = folder / f"{name}.bin"
        if file.is_file():
            splits[name] = {"file": file.name, "tokens": file.stat().st_size // 2}
    return {
        "folder": printable(folder),
        "state": "finished",
        "made_by": "another program",
        "dtype": "uint16",
        "vocab_size": vocab_size,
        "vocab_size_from": meta,
        "splits": splits,
    }


def check(path: str | Path) -> DataCheck:
    """Check sizes, ids against the vocabulary, and checksums. Reads every byte, in constant memory."""
    require("numpy", "oomph data check")
    folder = _folder(path)
    result = DataCheck(folder)
    manifest = read_manifest(folder)
    if manifest is None and _unfinished(folder) is not None:
        result.failures.append("unfinished: run the same `oomph data` command to finish it")
        return result
    vocab_size = manifest.vocab_size if manifest else _vocabulary(folder)[0]
    for name in SPLITS:
        _check_split(result, folder / f"{name}.bin", manifest, vocab_size)
    if manifest is not None:
        missing = [name for name in manifest.files if not (folder / name).is_file()]
        result.failures += [f"{name}: is missing" for name in missing if name != manifest.tokenizer.file]
        _check_vocabulary(result, manifest)
        if META_PICKLE in manifest.files and manifest.tokenizer.file != META_PICKLE:
            _check_size(result, manifest)
    return result


def _check_split(result: DataCheck, path: Path, manifest: Manifest | None, vocab_size: int) -> None:
    import numpy as np

    dtype = manifest.dtype if manifest else "uint16"
    try:
        size = path.stat().st_size
        if size % token_bytes(dtype):
            result.failures.append(f"{path.name}: {size:,} bytes is not a whole number of {dtype} tokens")
            return
        digest, largest = hashlib.sha256(), -1
        with path.open("rb") as file:
            while data := file.read(READ_BYTES):
                digest.update(data)
                largest = max(largest, int(np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<")).max()))
    except OSError as error:
        result.failures.append(f"{path.name}: cannot be read: {error.strerror}")
        return
    tokens = size // token_bytes(dtype)
    if largest >= vocab_size:
        result.failures.append(f"{path.name}: id {largest:,} is not below the vocabulary's {vocab_size:,}")
    else:
        result.checks.append(f"{path.name}: {tokens:,} tokens, the largest id {largest:,} is below {vocab_size:,}")
    if manifest is None:
        result.checks.append(f"{path.name}: no manifest, so no checksum to compare")
        return
    split = manifest.splits[path.stem]
    if tokens != split.tokens:
        result.failures.append(f"{path.name}: {tokens:,} tokens instead of {split.tokens:,}")
    elif digest.hexdigest() != split.sha256:
        result.failures.append(f"{path.name}: SHA-256 is {digest.hexdigest()} instead of {split.sha256}")
    else:
        result.checks.append(f"{path.name}: SHA-256 is right")


def _check_size(result: DataCheck, manifest: Manifest) -> None:
    """Check the meta.pkl from which nanoGPT takes the vocabulary size."""
    try:
        size = read_meta_pickle(result.folder / META_PICKLE).get("vocab_size")
    except InputError as error:
        result.failures.append(f"{META_PICKLE}: {error.problems[0].what}")
        return
    if size == manifest.vocab_size:
        result.checks.append(f"{META_PICKLE}: vocabulary size {manifest.vocab_size:,} is right")
    else:
        result.failures.append(f"{META_PICKLE}: vocabulary size {size} instead of {manifest.vocab_size:,}")


def _check_vocabulary(result: DataCheck, manifest: Manifest) -> None:
    """Check the file that turns ids back into text, if the set has one."""
    name = manifest.tokenizer.file
    if name == TOKENIZER:
        path = result.folder / name
        same = path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == manifest.tokenizer.sha256
    elif name == META_PICKLE:
        try:
            itos = read_meta_pickle(result.folder / name).get("itos")
            number = manifest.vocab_size - (manifest.tokenizer.end_of_text is not None)
            characters = "".join(str(itos[i]) for i in range(number)) if isinstance(itos, dict) else ""
            same = hashlib.sha256(characters.encode()).hexdigest() == manifest.tokenizer.sha256
        except (InputError, KeyError):
            same = False
    else:
        return
    if same:
        result.checks.append(f"{name}: the vocabulary is right")
    else:
        result.failures.append(f"{name}: not the vocabulary of this set")


def _folder(path: str | Path) -> Path:
    """The folder of a finished or unfinished set, looked for in the same order as `find_dataset`."""
    named = Path(path).parent if Path(path).is_file() else Path(path)
    for folder in (Path("data") / named, named):
        if (folder / WORK).is_dir() or (folder / "train.bin").is_file() or read_manifest(folder) is not None:
            return folder
    return find_dataset(str(path))


def _unfinished(folder: Path) -> Journal | None:
    path = folder / WORK / JOURNAL
    if not path.is_file():
        return None
    try:
        return decode_journal(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(Problem(str(path), "cannot be read", found=str(error))) from None


def _vocabulary(folder: Path) -> tuple[int, str]:
    """The vocabulary size of a set without a manifest, and where it comes from."""
    path = folder / META_PICKLE
    if path.is_file():
        size = read_meta_pickle(path).get("vocab_size")
        if isinstance(size, int):
            return size, META_PICKLE
    return GPT2_VOCAB_SIZE, "GPT-2's, as there is no meta.pkl"
