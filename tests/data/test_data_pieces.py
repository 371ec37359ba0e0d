"""Cuts that change no token, and a split that moves no document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from oomph.data.formats import TextSource
from oomph.data.pieces import TextPart, cut_place, decode, in_val, whole

TEXTS = st.text(st.sampled_from("ab1'sd \n\t.,é日\u3000\u00a0🙂"), min_size=2, max_size=200)


@given(text=TEXTS, share=st.floats(0.3, 1.0))
@settings(max_examples=300, deadline=None)
def test_a_cut_beside_white_space_changes_no_gpt2_token(reference: Any, text: str, share: float) -> None:
    data = text.encode()
    place = cut_place(data, max(1, int(len(data) * share)))
    left, right = data[:place], data[place:]
    if left[-1:].isalpha() and right[:1] in (b" ", b"\n"):  # else there was no such place: a cut between characters
        joined = reference.encode_ordinary(left.decode()) + reference.encode_ordinary(right.decode())
        assert joined == reference.encode_ordinary(text)


@given(text=TEXTS, share=st.floats(0.01, 1.0))
def test_a_cut_is_never_inside_a_character_and_never_empty(text: str, share: float) -> None:
    data = text.encode()
    limit = max(4, int(len(data) * share))
    place = cut_place(data[:limit], min(limit, len(data)))
    assert 0 < place <= limit
    if place < len(data[:limit]):
        data[:place].decode()


@given(st.binary(min_size=1, max_size=64))
def test_a_cut_of_bytes_that_are_no_text_still_moves_on(data: bytes) -> None:
    assert 0 < cut_place(data, len(data)) <= len(data)


@given(st.lists(st.binary(max_size=50), max_size=30), st.floats(0, 1))
def test_a_larger_fraction_only_adds_documents_to_validation(documents: list[bytes], fraction: float) -> None:
    small = [in_val(document, fraction / 2) for document in documents]
    large = [in_val(document, fraction) for document in documents]
    assert all(b for a, b in zip(small, large, strict=True) if a)


def test_the_split_takes_about_its_fraction_and_is_fixed_for_ever() -> None:
    chosen = [number for number in range(10_000) if in_val(f"document {number}".encode(), 0.05)]
    assert 400 < len(chosen) < 600
    assert chosen[:3] == FIXED


FIXED: list[int] = [3, 19, 32]


@given(st.text(max_size=300))
def test_a_document_is_on_the_same_side_however_it_is_stored(text: str) -> None:
    from_text = next(iter(TextPart(text.encode()).pieces(0.5)))
    assert whole(text, 0.5).is_val == from_text.is_val  # type: ignore[union-attr]


def test_broken_utf8_becomes_the_replacement_character() -> None:
    assert decode(b"a\xff\xfeb") == ("a\ufffd\ufffdb", True)
    assert decode("é".encode()) == ("é", False)


def test_half_a_surrogate_pair_is_replaced() -> None:
    piece = whole("a\ud800b", 0.0)
    assert (piece.text, piece.repaired) == ("a\ufffdb", True)


@given(
    parts=st.lists(st.text(st.sampled_from("ab \n日"), max_size=40), min_size=1, max_size=12),
    separator=st.sampled_from(["\n", "\n\n", "<|endoftext|>", "x"]),
    block=st.integers(16, 64),
)
@settings(max_examples=200, deadline=None)
def test_separated_documents_do_not_depend_on_the_chunk_size(
    tmp_path_factory: Any, parts: list[str], separator: str, block: int
) -> None:
    import pytest

    from oomph.data import formats as module
    from oomph.data.streams import FileStream

    path: Path = tmp_path_factory.mktemp("text") / "text.txt"
    content = separator.join(parts)
    path.write_bytes(content.encode())
    source = TextSource("text", {}, None, lambda at: FileStream(path, at), separator.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", block)
        pieces = [piece for b in source.chunks({}, 0.5) for part in b.parts for piece in part.pieces(0.5)]
    documents, current = [], ""
    for piece in pieces:
        current += piece.text  # type: ignore[union-attr]
        if piece.ends:  # type: ignore[union-attr]
            documents.append(current)
            current = ""
    assert documents == content.split(separator)
    assert current == ""
