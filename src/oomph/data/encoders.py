"""Tokenizers behind one face: texts in, arrays of ids out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from oomph.data import gpt2
from oomph.data.failure import printable
from oomph.data.manifest import read_meta_pickle
from oomph.data.needs import need
from oomph.errors import InputError, Problem, nearest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]", "<|im_end|>")
UNDERSTOOD = "gpt2, bytes, chars, bpe:SIZE (such as bpe:8192), or the path of a tokenizer.json or a meta.pkl"


class Encoder(Protocol):
    """A tokenizer. It goes to worker processes, so it must survive pickling."""

    name: str
    vocab_size: int
    end_of_text: int | None  # the id between documents; None where the vocabulary has none
    sha256: str  # of all that decides the ids

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]: ...


class Gpt2Encoder:
    """GPT-2's BPE through tiktoken; text that spells a special token is ordinary text."""

    name = "gpt2"
    vocab_size = 50257
    end_of_text: int | None = gpt2.END_OF_TEXT_ID
    sha256 = gpt2.MERGES_SHA256

    def __init__(self, tokenizer_dir: Path | None = None) -> None:
        self._encoding = gpt2.load(tokenizer_dir)

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        encode = self._encoding.encode_to_numpy
        return [encode(text, disallowed_special=()) for text in texts]


class ByteEncoder:
    """UTF-8 bytes, and one id more between documents."""

    name = "bytes"
    vocab_size = 257
    end_of_text: int | None = 256
    sha256 = hashlib.sha256(b"bytes").hexdigest()

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        import numpy as np

        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


class CharEncoder:
    """Characters in the order of their code points, as nanoGPT numbers them; one id more between documents."""

    name = "chars"

    def __init__(self, characters: str, with_end_of_text: bool, only_these: str | None = None) -> None:
        self.characters = characters
        self.only_these = only_these  # where the vocabulary was given: the file that has no others
        self.end_of_text: int | None = len(characters) if with_end_of_text else None
        self.vocab_size = len(characters) + with_end_of_text
        self.sha256 = hashlib.sha256(characters.encode()).hexdigest()
        self._table: NDArray[np.uint32] | None = None

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        import numpy as np

        if self._table is None:
            self._table = np.full(0x110000, 2**32 - 1, dtype=np.uint32)
            codes = np.frombuffer(self.characters.encode("utf-32-le"), dtype=np.uint32)
            self._table[codes] = np.arange(len(codes), dtype=np.uint32)
        ids = [self._table[np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)] for text in texts]
        if self.only_these and any(len(each) and each.max() >= len(self.characters) for each in ids):
            raise InputError(self._unknown(texts))
        return ids

    def _unknown(self, texts: Sequence[str]) -> Problem:
        unknown = sorted({*"".join(texts)} - {*self.characters})
        names = ", ".join(f"{character!r} (U+{ord(character):04X})" for character in unknown[:5])
        return Problem(
            f"--tokenizer {self.only_these}",
            "the text has characters that are not in it",
            found=names + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""),
            allowed="--tokenizer chars, which takes the characters from the text",
        )


class JsonEncoder:
    """Any tokenizer of Hugging Face's, from its `tokenizer.json`; nothing is added at the ends of a text."""

    def __init__(self, path: Path, name: str, end_of_text: str | None) -> None:
        self.name = name
        try:
            self.content = path.read_bytes()
        except OSError as error:
            raise InputError(Problem(str(path), "cannot be read", found=error.strerror, allowed=UNDERSTOOD)) from None
        self.sha256 = hashlib.sha256(self.content).hexdigest()
        self._tokenizer = _tokenizer_from(self.content, str(path))
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.end_of_text: int | None = vocabulary[_end_of_text_name(vocabulary, end_of_text, str(path))]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokenizer": None}  # its own pickling forgets how special tokens are treated

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokenizer = _tokenizer_from(self.content, self.name)

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        import numpy as np

        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def needs_learning(spec: str) -> bool:
    """Whether the vocabulary comes from the data itself, which is then read once before."""
    return spec == "chars" or spec.startswith("bpe:")


def check_spec(spec: str, end_of_text: str | None = None) -> None:
    """Refuse a tokenizer that there is not, before any work; and an end-of-text token that it would not use."""
    own = spec in ("gpt2", "bytes", "chars") or spec.startswith("bpe:") or is_meta_pickle(spec)
    if end_of_text is not None and own:
        raise InputError(
            Problem(
                f"--end_of_text {end_of_text}",
                f"the tokenizer {spec} has its own",
                allowed="only beside --tokenizer path/to/tokenizer.json",
            )
        )
    if spec in ("gpt2", "bytes", "chars"):
        return
    if spec.startswith("bpe:"):
        size = spec.removeprefix("bpe:")
        if not (size.isascii() and size.isdecimal()) or not 257 <= int(size) <= 2**20:
            raise InputError(
                Problem(f"--tokenizer {spec}", "not a vocabulary size", found=size, allowed="bpe:257 to bpe:1048576")
            )
    elif not Path(spec).is_file():
        close = nearest(spec, ["gpt2", "bytes", "chars", "bpe:8192"])
        raise InputError(Problem(f"--tokenizer {spec}", "no such tokenizer or file", allowed=UNDERSTOOD, nearest=close))


def load(spec: str, tokenizer_dir: Path | None, end_of_text: str | None) -> Encoder:
    """A tokenizer that needs no learning."""
    if spec == "gpt2":
        return Gpt2Encoder(tokenizer_dir)
    if spec == "bytes":
        return ByteEncoder()
    if is_meta_pickle(spec):
        return _characters_of(Path(spec))
    return JsonEncoder(Path(spec), printable(Path(spec).name), end_of_text)


def is_meta_pickle(spec: str) -> bool:
    """Whether it names nanoGPT's vocabulary of characters."""
    return spec.endswith(".pkl")


def _characters_of(path: Path) -> CharEncoder:
    """The characters of a set that is there, in its order: more text in the same ids."""
    itos = read_meta_pickle(path).get("itos")
    names = [itos.get(number) for number in range(len(itos))] if isinstance(itos, dict) else []
    with_end_of_text = names[-1:] == [gpt2.END_OF_TEXT]
    characters = names[:-1] if with_end_of_text else names
    if not characters or not all(isinstance(name, str) and len(name) == 1 for name in characters):
        raise InputError(
            Problem(
                str(path),
                "no vocabulary of characters",
                found="no itos" if not names else "an itos with other entries",
                allowed="the meta.pkl of a set made of characters: itos from 0 on, one character each",
            )
        )
    return CharEncoder("".join(map(str, characters)), with_end_of_text, only_these=printable(path))


def _tokenizer_from(content: bytes, where: str) -> Any:
    library = need("tokenizers", where)
    try:
        tokenizer = library.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        found = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise InputError(Problem(where, "not a tokenizer.json", found=found)) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # text that spells a special token is ordinary text
    return tokenizer


def _end_of_text_name(vocabulary: dict[str, int], asked: str | None, where: str) -> str:
    if asked is not None:
        if asked not in vocabulary:
            close = nearest(asked, [name for name in vocabulary if name[:1] in "<["])
            raise InputError(Problem(f"--end_of_text {asked}", f"not in {where}", nearest=close))
        return asked
    for name in END_OF_TEXT_NAMES:
        if name in vocabulary:
            return name
    raise InputError(
        Problem(
            where,
            "no end-of-text token that is known",
            allowed="name it with --end_of_text, or one of " + ", ".join(END_OF_TEXT_NAMES),
        )
    )
