"""Vocabularies that come from the data itself: its characters, or a byte-level BPE trained on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from oomph.data.encoders import CharEncoder, Encoder, JsonEncoder
from oomph.data.gpt2 import END_OF_TEXT
from oomph.data.manifest import TOKENIZER
from oomph.data.needs import need
from oomph.data.pieces import Block, Piece
from oomph.data.work import WorkFolder

SAMPLE_BYTES = 2**26  # of the training documents, from the first on, that a BPE is trained on
CHARACTERS = "characters.txt"


def learn(
    spec: str, blocks: Iterator[Block], folder: WorkFolder, val_fraction: float, documents: bool, take: int | None
) -> Encoder:
    """The tokenizer, from the file an earlier call left in `folder` or from the text."""
    file = folder.path / (CHARACTERS if spec == "chars" else TOKENIZER)
    if not file.exists():
        if spec == "chars":
            folder.write(file.name, _characters(blocks, val_fraction, take).encode())
        else:
            folder.write(file.name, _train_bpe(int(spec.removeprefix("bpe:")), blocks, val_fraction))
    if spec == "chars":
        return CharEncoder(file.read_bytes().decode(), with_end_of_text=documents)
    return JsonEncoder(file, spec, END_OF_TEXT)


def _characters(blocks: Iterator[Block], val_fraction: float, take: int | None) -> str:
    """Every character there is, in the order of code points."""
    import numpy as np

    seen = np.zeros(0x110000, dtype=bool)
    count = 0
    for piece in _pieces(blocks, val_fraction):
        codes = np.frombuffer(piece.text.encode("utf-32-le"), dtype=np.uint32)
        seen[codes] = True
        count += len(codes)
        if take is not None and count >= take:
            break
    return np.flatnonzero(seen).astype("<u4").tobytes().decode("utf-32-le")


def _train_bpe(size: int, blocks: Iterator[Block], val_fraction: float) -> bytes:
    """A byte-level BPE with GPT-2's pattern: any text can be written with it."""
    library = need("tokenizers", f"--tokenizer bpe:{size}")
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
        tokenizer.train_from_iterator(_sample(blocks, val_fraction), trainer)
    text: str = tokenizer.to_str()
    return text.encode()


def _sample(blocks: Iterator[Block], val_fraction: float) -> Iterator[str]:
    size = 0
    for piece in _pieces(blocks, val_fraction):
        if not piece.is_val:  # the validation split stays unseen
            yield piece.text
            size += len(piece.text)
        if size >= SAMPLE_BYTES:
            return


def _pieces(blocks: Iterator[Block], val_fraction: float) -> Iterator[Piece]:
    for block in blocks:
        for part in block.parts:
            for piece in part.pieces(val_fraction):
                if isinstance(piece, Piece):  # what is broken is reported when it is tokenized
                    yield piece


@contextmanager
def library_parallelism(on: bool) -> Iterator[None]:
    """Whether tokenizers may use threads of its own: for training it should, beside our processes it must not."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if on else "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
