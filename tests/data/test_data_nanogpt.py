"""Token files byte-equal to what nanoGPT's own recipes write, and sets that nanoGPT made are read."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import token_files, write_jsonl

from oomph.data import check, info, prepare, read_manifest
from oomph.data.manifest import read_meta_pickle
from oomph.data.pieces import in_val
from oomph.errors import InputError


def test_documents_are_written_as_the_openwebtext_recipe_writes_them(
    tmp_path: Path, gpt2_dir: Path, reference: Any, documents: list[str]
) -> None:
    prepare(
        [str(write_jsonl(tmp_path / "a.jsonl", documents))], tmp_path / "out", tokenizer_dir=gpt2_dir, val_fraction=0.1
    )
    wanted: dict[bool, list[int]] = {False: [], True: []}
    for text in documents:
        wanted[in_val(text.encode(), 0.1)] += [*reference.encode_ordinary(text), reference.eot_token]
    assert wanted[True]
    assert token_files(tmp_path / "out") == tuple(
        np.array(wanted[side], dtype=np.uint16).tobytes() for side in (False, True)
    )


def test_a_single_text_is_written_as_the_shakespeare_recipe_writes_it(
    tmp_path: Path, gpt2_dir: Path, reference: Any, documents: list[str]
) -> None:
    text = "\n".join(documents)
    (tmp_path / "input.txt").write_bytes(text.encode())
    prepare([str(tmp_path / "input.txt")], tmp_path / "out", tokenizer_dir=gpt2_dir)
    border = int(len(text) * 0.9)
    wanted = (reference.encode_ordinary(text[:border]), reference.encode_ordinary(text[border:]))
    assert token_files(tmp_path / "out") == tuple(np.array(ids, dtype=np.uint16).tobytes() for ids in wanted)


def test_characters_and_their_meta_pkl_are_those_of_the_shakespeare_char_recipe(
    tmp_path: Path, documents: list[str]
) -> None:
    text = "\n".join(documents)
    (tmp_path / "input.txt").write_bytes(text.encode())
    prepare([str(tmp_path / "input.txt")], tmp_path / "out", tokenizer="chars")
    names = sorted(set(text))
    numbers = {name: number for number, name in enumerate(names)}
    ids = np.array([numbers[name] for name in text], dtype=np.uint16)
    border = int(len(text) * 0.9)
    assert token_files(tmp_path / "out") == (ids[:border].tobytes(), ids[border:].tobytes())
    meta = pickle.loads((tmp_path / "out" / "meta.pkl").read_bytes())
    assert meta == {"vocab_size": len(names), "itos": dict(enumerate(names)), "stoi": numbers}


def test_our_meta_pkl_is_read_without_running_anything(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("hello world, hello")
    prepare([str(tmp_path / "input.txt")], tmp_path / "out", tokenizer="chars")
    assert read_meta_pickle(tmp_path / "out" / "meta.pkl")["stoi"]["h"] == 4
    (tmp_path / "evil.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(InputError, match="not plain data"):
        read_meta_pickle(tmp_path / "evil.pkl")


def test_a_set_that_nanogpt_made_can_be_looked_at_and_checked(tmp_path: Path) -> None:
    for name in ("train", "val"):
        np.arange(1000, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    facts = info(tmp_path)
    assert (facts["splits"]["train"]["tokens"], facts["vocab_size"], facts["made_by"]) == (
        1000,
        50257,
        "another program",
    )
    assert check(tmp_path).failures == []
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 999, "stoi": {}, "itos": {}}))
    assert check(tmp_path).failures == [
        f"{name}.bin: id 999 is not below the vocabulary's 999" for name in ("train", "val")
    ]


def test_many_documents_of_characters_have_an_end_of_text_between_them(tmp_path: Path) -> None:
    prepare([str(write_jsonl(tmp_path / "a.jsonl", ["ab", "ba"]))], tmp_path / "out", tokenizer="chars", val_fraction=0)
    assert np.fromfile(tmp_path / "out" / "train.bin", dtype=np.uint16).tolist() == [0, 1, 2, 1, 0, 2]
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert (manifest.vocab_size, manifest.tokenizer.end_of_text) == (3, 2)
