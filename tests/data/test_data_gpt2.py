"""GPT-2's tokens are tiktoken's, and its vocabulary is found without a network."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomph.data import tokenizer as gpt2
from oomph.data.tokenizer import Gpt2Tokenizer
from refusals import refused


@pytest.fixture(scope="module")
def encoder(gpt2_dir: Path) -> Gpt2Tokenizer:
    return Gpt2Tokenizer(gpt2_dir)


def test_tokens_of_real_text_are_tiktokens(encoder: Gpt2Tokenizer, reference: Any, documents: list[str]) -> None:
    for ours, text in zip(encoder.encode(documents), documents, strict=True):
        assert ours.tolist() == reference.encode_ordinary(text)


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_tokens_of_any_text_are_tiktokens(encoder: Gpt2Tokenizer, reference: Any, text: str) -> None:
    assert encoder.encode([text])[0].tolist() == reference.encode_ordinary(text)


def test_text_that_spells_the_special_token_stays_text(encoder: Gpt2Tokenizer, reference: Any) -> None:
    ids = encoder.encode(["<|endoftext|>"])[0].tolist()
    assert ids == reference.encode_ordinary("<|endoftext|>")
    assert encoder.end_of_text not in ids


def test_the_vocabulary_is_found_in_a_hugging_face_cache(
    gpt2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--gpt2" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    shutil.copy(gpt2_dir / "vocab.bpe", snapshot / "merges.txt")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert snapshot / "merges.txt" in list(gpt2._places(None))
    assert gpt2.gpt2_encoding(snapshot).n_vocab == 50257


def test_a_folder_without_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with refused(f"--tokenizer_dir {tmp_path}", allowed="vocab.bpe"):
        gpt2.gpt2_encoding(tmp_path)


def test_a_vocabulary_that_is_not_gpt2s_is_refused(gpt2_dir: Path, tmp_path: Path) -> None:
    lines = (gpt2_dir / "vocab.bpe").read_text(encoding="utf-8").split("\n")
    (tmp_path / "vocab.bpe").write_text("\n".join(lines[:1000]), encoding="utf-8")
    with refused(f"--tokenizer_dir {tmp_path}", allowed="vocab.bpe"):
        gpt2.gpt2_encoding(tmp_path)


def test_where_it_is_nowhere_the_message_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    def unreachable(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(gpt2, "_places", lambda _: iter([tmp_path / "vocab.bpe"]))
    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with refused(found=str(tmp_path), allowed="--tokenizer_dir"):
        gpt2.gpt2_encoding(None)
