"""Text to tokens and back, by the tokenizer of the data that a run was trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from oomph.data import encoders
from oomph.data.manifest import META_PICKLE, TOKENIZER, Manifest, find_dataset, read_manifest, read_meta_pickle
from oomph.errors import InputError, Problem


@dataclass(frozen=True)
class Codec:
    """A tokenizer in both directions."""

    name: str
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    end_of_text: int | None


def codec_for(dataset: str, tokenizer_dir: Path | None = None) -> Codec:
    """The tokenizer of a dataset: its manifest's, nanoGPT's characters, or GPT-2's where nothing is known of it."""
    try:
        folder = find_dataset(dataset)
    except InputError:
        return _gpt2(tokenizer_dir)  # the data is gone or elsewhere; nanoGPT's sample.py takes GPT-2's too
    manifest = read_manifest(folder)
    if manifest is not None:
        return _of_manifest(manifest, folder, tokenizer_dir)
    if (folder / META_PICKLE).is_file():
        return _characters(folder / META_PICKLE, None)
    return _gpt2(tokenizer_dir)


def _of_manifest(manifest: Manifest, folder: Path, tokenizer_dir: Path | None) -> Codec:
    name, end = manifest.tokenizer.name, manifest.tokenizer.end_of_text
    if name == "bytes":
        return Codec(name, lambda text: list(text.encode()), lambda ids: _bytes_text(ids), end)
    if name == "chars":
        return _characters(folder / META_PICKLE, end)
    if name == "gpt2":
        return _gpt2(tokenizer_dir)
    return _tokenizer_json(folder / (manifest.tokenizer.file or TOKENIZER), name, end)


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
