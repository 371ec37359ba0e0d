"""Token files byte-equal to what nanoGPT's own recipes write, and sets that nanoGPT made are read."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import token_files, write_jsonl

from oomph.data import check, info, prepare, read_manifest
from oomph.data.manifest import read_meta_pickle
from oomph.data.pieces import in_val
from refusals import refused


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


def test_characters_and_meta_pkl_match_nanogpts_shakespeare_char(tmp_path: Path, documents: list[str]) -> None:
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
    with refused("evil.pkl"):
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
    failures = check(tmp_path).failures
    assert [line.partition(":")[0] for line in failures] == ["train.bin", "val.bin"]
    assert all("999" in line for line in failures)


def test_many_documents_of_characters_have_an_end_of_text_between_them(tmp_path: Path) -> None:
    prepare([str(write_jsonl(tmp_path / "a.jsonl", ["ab", "ba"]))], tmp_path / "out", tokenizer="chars", val_fraction=0)
    assert np.fromfile(tmp_path / "out" / "train.bin", dtype=np.uint16).tolist() == [0, 1, 2, 1, 0, 2]
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert (manifest.vocab_size, manifest.tokenizer.end_of_text) == (3, 2)


def test_more_text_is_written_in_the_characters_of_a_set_that_is_there(tmp_path: Path) -> None:
    itos = dict(enumerate("zyxab c"))  # an order that no text would give
    (tmp_path / "meta.pkl").write_bytes(
        pickle.dumps({"vocab_size": 7, "itos": itos, "stoi": {name: number for number, name in itos.items()}})
    )
    (tmp_path / "more.txt").write_text("abc xyz " * 20)
    prepare([str(tmp_path / "more.txt")], tmp_path / "out", tokenizer=str(tmp_path / "meta.pkl"))
    ids = np.frombuffer(b"".join(token_files(tmp_path / "out")), dtype=np.uint16)
    assert "".join(itos[number] for number in ids.tolist()) == "abc xyz " * 20
    assert read_meta_pickle(tmp_path / "out" / "meta.pkl")["itos"] == itos
    assert not check(tmp_path / "out").failures


def test_our_own_meta_pkl_gives_documents_the_same_end_of_text(tmp_path: Path) -> None:
    first = str(write_jsonl(tmp_path / "a.jsonl", ["abc", "cab"]))
    prepare([first], tmp_path / "one", tokenizer="chars", val_fraction=0)
    prepare([first], tmp_path / "two", tokenizer=str(tmp_path / "one" / "meta.pkl"), val_fraction=0)
    assert token_files(tmp_path / "one") == token_files(tmp_path / "two")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_character_that_a_given_vocabulary_lacks_is_named(tmp_path: Path, workers: int) -> None:
    (tmp_path / "a.txt").write_text("abc")
    prepare([str(tmp_path / "a.txt")], tmp_path / "one", tokenizer="chars")
    (tmp_path / "b.txt").write_text("abc é")
    with refused("meta.pkl", found="' ' (U+0020), 'é' (U+00E9)"):
        vocabulary = str(tmp_path / "one" / "meta.pkl")
        prepare([str(tmp_path / "b.txt")], tmp_path / "two", tokenizer=vocabulary, workers=workers)
    assert not (tmp_path / "two" / "train.bin").exists()


def test_a_meta_pkl_without_characters_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 257}))
    (tmp_path / "a.txt").write_text("abc")
    with refused("meta.pkl", found="no itos"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer=str(tmp_path / "meta.pkl"))


def test_a_text_split_by_its_tail_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc " * 50)
    done = prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer="bytes")
    assert done.manifest.counts.documents == 1
    assert done.manifest.splits["val"].tokens == 20


def test_info_says_which_file_of_a_set_is_gone_or_cut(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc " * 50)
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer="bytes")
    assert info(tmp_path / "out")["state"] == "finished"
    (tmp_path / "out" / "val.bin").unlink()
    (tmp_path / "out" / "train.bin").write_bytes(b"12")
    facts = info(tmp_path / "out")
    assert facts["state"] == "damaged"
    damaged, missing = facts["damage"]
    assert damaged.startswith("train.bin has 2 bytes") and "360" in damaged and missing.startswith("val.bin")


def test_a_source_written_again_is_refused_with_both_moments(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("abc " * 50)
    os.utime(source, ns=(0, 1_700_000_000 * 10**9))
    prepare([str(source)], tmp_path / "out", tokenizer="bytes")
    os.utime(source, ns=(0, 1_700_000_060 * 10**9))
    with refused(found="22:13:20.000000 UTC before, 2023-11-14 22:14:20.000000 UTC now"):
        prepare([str(source)], tmp_path / "out", tokenizer="bytes")
