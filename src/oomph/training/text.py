"""Text to tokens and back, by the tokenizer of the data that a run was trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from oomph.data import encoders
from oomph.data.manifest import (
    MANIFEST,
    META_PICKLE,
    TOKENIZER,
    Manifest,
    find_dataset,
    read_manifest,
    read_meta_pickle,
)
from oomph.errors import InputError, Problem
from oomph.files import write_whole

KEPT_TOKENIZER = "tokenizer"  # the folder in a run's folder
TOKENIZER_FILES = (MANIFEST, META_PICKLE, TOKENIZER)
GPT2_WORDS, GPT2_PADDED = 50257, 50304  # its vocabulary, and nanoGPT's rounding of it


@dataclass(frozen=True)
class Codec:
    """A tokenizer in both directions."""

    name: str
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    end_of_text: int | None


def codec_for(dataset: str, tokenizer_dir: Path | None = None, vocab_size: int | None = None) -> Codec:
    """The tokenizer of a dataset. Raises `InputError` where there is no such dataset."""
    return _codec_in(find_dataset(dataset), tokenizer_dir, vocab_size)


def codec_of_run(
    run: Path, dataset: str, vocab_size: int, tokenizer_dir: Path | None = None, data_folder: Path | None = None
) -> Codec:
    """The tokenizer that a run was trained with: the one kept in its folder, else that of its data.

    Where the data is gone too it is GPT-2's, as nanoGPT's sample.py takes it, but only for a model with GPT-2's
    vocabulary: raises `InputError` for any other.
    """
    kept = run / KEPT_TOKENIZER
    if any((kept / name).is_file() for name in (MANIFEST, META_PICKLE)):
        return _codec_in(kept, tokenizer_dir, vocab_size)
    roots = (Path(), run, run.parent, run.parent.parent)
    try:
        folder = find_dataset(dataset, roots)
    except InputError:
        if data_folder is not None and data_folder.is_dir():
            return _codec_in(data_folder, tokenizer_dir, vocab_size)
        if not GPT2_WORDS <= vocab_size <= GPT2_PADDED:
            raise InputError(
                Problem(
                    str(run),
                    "its tokenizer is not known: neither one in the run's folder nor its data is here",
                    found=f"dataset {dataset!r}, vocab_size = {vocab_size}",
                    allowed="--dataset FOLDER with the data it was trained on",
                )
            ) from None
        return _gpt2(tokenizer_dir)
    return _codec_in(folder, tokenizer_dir, vocab_size)


def keep_tokenizer(data: Path, run: Path) -> None:
    """Copy what turns ids into text into the run's folder, so that its model speaks wherever the data is."""
    manifest = read_manifest(data)
    folder = run / KEPT_TOKENIZER
    named = TOKENIZER if manifest is None else manifest.tokenizer.file or TOKENIZER
    try:
        for name in TOKENIZER_FILES:
            (folder / name).unlink(missing_ok=True)
        for source, name in ((MANIFEST, MANIFEST), (META_PICKLE, META_PICKLE), (named, TOKENIZER)):
            if (data / source).is_file():
                folder.mkdir(exist_ok=True)
                write_whole(folder / name, (data / source).read_bytes())
    except OSError as error:
        raise InputError(Problem(str(folder), "cannot be written", found=error.strerror)) from None


def _codec_in(folder: Path, tokenizer_dir: Path | None, vocab_size: int | None) -> Codec:
    """The manifest's, nanoGPT's characters, or GPT-2's where the folder names none and the vocabulary has its words."""
    manifest = read_manifest(folder)
    if manifest is not None:
        return _of_manifest(manifest, folder, tokenizer_dir)
    if (folder / META_PICKLE).is_file():
        return _characters(folder / META_PICKLE, None)
    if vocab_size is not None and vocab_size < GPT2_WORDS:
        found = f"no {MANIFEST} or {META_PICKLE}, and vocab_size = {vocab_size} is too small for GPT-2's"
        raise InputError(Problem(str(folder), "this data names no tokenizer", found=found))
    return _gpt2(tokenizer_dir)


def _of_manifest(manifest: Manifest, folder: Path, tokenizer_dir: Path | None) -> Codec:
    name, end = manifest.tokenizer.name, manifest.tokenizer.end_of_text
    if name == "bytes":
        return Codec(name, lambda text: list(text.encode()), lambda ids: _bytes_text(ids), end)
    if name == "chars":
        return _characters(folder / META_PICKLE, end)
    if name == "gpt2":
        return _gpt2(tokenizer_dir)
    own = folder / (manifest.tokenizer.file or TOKENIZER)
    return _tokenizer_json(own if own.is_file() else folder / TOKENIZER, name, end)


def _bytes_text(ids: list[int]) -> str:
    return bytes(token for token in ids if token < 256).decode(errors="replace")


def _characters(path: Path, end: int | None) -> Codec:
    meta = read_meta_pickle(path)
    to_id, to_text = meta.get("stoi"), meta.get("itos")
    if not isinstance(to_id, dict) or not isinstance(to_text, dict):
        raise InputError(Problem(str(path), "no table of characters", allowed="nanoGPT's meta.pkl"))

    def encode(text: str) -> list[int]:
        unknown = sorted({letter for letter in text if letter not in to_id})
        if unknown:
            found = " ".join(map(repr, unknown[:10]))
            raise InputError(Problem("--prompt", "letters that the data does not have", found=found))
        return [to_id[letter] for letter in text]

    return Codec("chars", encode, lambda ids: "".join(to_text.get(token, "�") for token in ids if token != end), end)


def _gpt2(tokenizer_dir: Path | None) -> Codec:
    from oomph.data import gpt2

    encoding = gpt2.load(tokenizer_dir)
    end = gpt2.END_OF_TEXT_ID
    known = encoding.n_vocab

    def decode(ids: list[int]) -> str:
        text: str = encoding.decode([token for token in ids if token < known and token != end])
        return text

    return Codec("gpt2", lambda text: list(encoding.encode(text, disallowed_special=())), decode, end)


def _tokenizer_json(path: Path, name: str, end: int | None) -> Codec:
    encoder = encoders.JsonEncoder(path, name, None)
    tokenizer = encoder._tokenizer

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode([token for token in ids if token < encoder.vocab_size], skip_special_tokens=True)
        return text

    return Codec(name, lambda text: [int(token) for token in encoder.encode([text])[0]], decode, end)
