"""A set is the same bytes however it is made, is recognised when it is there, and is not mixed with another."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import token_files, write_jsonl

from oomph.data import check, prepare, read_manifest
from oomph.data.pieces import in_val
from oomph.data.sources import ReadOptions
from oomph.errors import InputError
from refusals import refused


@pytest.fixture
def source(tmp_path: Path, documents: list[str]) -> str:
    return str(write_jsonl(tmp_path / "source.jsonl", documents))


@pytest.mark.parametrize("tokenizer", ["gpt2", "chars", "bpe:300"])
def test_the_bytes_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, source: str, gpt2_dir: Path, documents: list[str], tokenizer: str
) -> None:
    if tokenizer.startswith("bpe"):
        write_jsonl(Path(source), documents[:12])  # training takes its time
    sets = []
    for workers in (1, 3):
        out = tmp_path / f"out{workers}"
        prepare([source], out, tokenizer=tokenizer, tokenizer_dir=gpt2_dir, val_fraction=0.1, workers=workers)
        assert check(out).failures == []
        sets.append(token_files(out))
    assert sets[0] == sets[1]
    assert all(sets[0])


def test_workers_that_are_spawned_and_not_forked_do_the_same(
    tmp_path: Path, source: str, gpt2_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oomph.data import workers

    prepare([source], tmp_path / "one", tokenizer_dir=gpt2_dir, workers=1)
    monkeypatch.setattr(workers, "_start_method", lambda: "spawn")
    prepare([source], tmp_path / "two", tokenizer_dir=gpt2_dir, workers=2)
    assert token_files(tmp_path / "one") == token_files(tmp_path / "two")


def test_the_manifest_says_what_is_in_the_files(tmp_path: Path, source: str, documents: list[str]) -> None:
    done = prepare([source], tmp_path / "out", tokenizer="bytes", val_fraction=0.1)
    manifest = json.loads((tmp_path / "out" / "meta.json").read_bytes())
    splits = manifest["splits"]
    assert splits["val"]["documents"] == sum(in_val(text.encode(), 0.1) for text in documents)
    assert (
        splits["train"]["documents"] + splits["val"]["documents"] == manifest["counts"]["documents"] == len(documents)
    )
    tokens = splits["train"]["tokens"] + splits["val"]["tokens"]
    assert tokens == sum(len(text.encode()) + 1 for text in documents)
    assert manifest["counts"]["text_bytes"] == tokens - len(documents)
    assert (manifest["dtype"], manifest["vocab_size"], manifest["tokenizer"]["name"]) == ("uint16", 257, "bytes")
    assert read_manifest(tmp_path / "out") == done.manifest
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "meta.json",
        "meta.pkl",
        "train.bin",
        "val.bin",
    ]


def test_growing_the_data_moves_no_document_between_the_splits(tmp_path: Path, documents: list[str]) -> None:
    prepare(
        [str(write_jsonl(tmp_path / "a.jsonl", documents[:40]))], tmp_path / "a", tokenizer="bytes", val_fraction=0.2
    )
    prepare([str(write_jsonl(tmp_path / "b.jsonl", documents))], tmp_path / "b", tokenizer="bytes", val_fraction=0.2)
    for few, many in zip(token_files(tmp_path / "a"), token_files(tmp_path / "b"), strict=True):
        assert many.startswith(few)


@pytest.mark.parametrize("take", [1, 1000, 123_457])
def test_take_gives_exactly_so_many_tokens_from_the_beginning(tmp_path: Path, source: str, take: int) -> None:
    whole = prepare([source], tmp_path / "whole", tokenizer="bytes", val_fraction=0.1)
    done = prepare([source], tmp_path / "out", tokenizer="bytes", val_fraction=0.1, take=take)
    assert sum(split.tokens for split in done.manifest.splits.values()) == take
    for part, all_of_it in zip(token_files(tmp_path / "out"), token_files(tmp_path / "whole"), strict=True):
        assert all_of_it.startswith(part)
    assert done.manifest.counts.documents <= whole.manifest.counts.documents


def test_fewer_tokens_than_asked_for_are_noted(tmp_path: Path, source: str) -> None:
    done = prepare([source], tmp_path / "out", tokenizer="bytes", take=10**9)
    assert "1,000,000,000" in done.notes[0]


def test_a_finished_set_is_recognised_and_left_alone(tmp_path: Path, source: str) -> None:
    prepare([source], tmp_path / "out", tokenizer="bytes")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    again = prepare([source], tmp_path / "out", tokenizer="bytes")
    assert again.already
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}


def test_a_changed_source_or_setting_is_refused_with_the_reason(
    tmp_path: Path, source: str, documents: list[str]
) -> None:
    prepare([source], tmp_path / "out", tokenizer="bytes")
    before = token_files(tmp_path / "out")
    with refused(found="now name=chars"):
        prepare([source], tmp_path / "out", tokenizer="chars")
    with refused(found="take was unset, is now 5"):
        prepare([source], tmp_path / "out", tokenizer="bytes", take=5)
    with refused(found="val_fraction=0.005, is now by=hash, val_fraction=0.5"):
        prepare([source], tmp_path / "out", tokenizer="bytes", val_fraction=0.5)
    other = str(write_jsonl(tmp_path / "other.jsonl", documents[:3]))
    with refused(found="other.jsonl"):
        prepare([source, other], tmp_path / "out", tokenizer="bytes")
    write_jsonl(Path(source), documents[:5])
    with refused(found="source.jsonl"):
        prepare([source], tmp_path / "out", tokenizer="bytes")
    assert token_files(tmp_path / "out") == before


def test_overwrite_leaves_nothing_of_the_old_set(tmp_path: Path, source: str) -> None:
    prepare([source], tmp_path / "out", tokenizer="chars")
    prepare([source], tmp_path / "out", tokenizer="bytes", overwrite=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "meta.json",
        "meta.pkl",
        "train.bin",
        "val.bin",
    ]
    assert check(tmp_path / "out").failures == []


def test_files_that_another_program_made_are_not_replaced_unasked(tmp_path: Path, source: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.bin").write_bytes(b"precious")
    with refused(found="train.bin", allowed="--overwrite"):
        prepare([source], tmp_path / "out", tokenizer="bytes")
    assert [path.read_bytes() for path in (tmp_path / "out").iterdir()] == [b"precious"]


def test_a_finished_set_that_was_damaged_is_not_called_finished(tmp_path: Path, source: str) -> None:
    prepare([source], tmp_path / "out", tokenizer="bytes")
    with (tmp_path / "out" / "val.bin").open("ab") as file:
        file.write(b"xx")
    with refused(found="val.bin", allowed="--overwrite"):
        prepare([source], tmp_path / "out", tokenizer="bytes")


def test_a_vocabulary_above_65536_is_written_in_32_bits(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(70_000)} | {"</s>": 70_000, "[UNK]": 70_001}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("w5 w69999 w7")
    out = tmp_path / "out"
    done = prepare(
        [str(tmp_path / "a.txt")], out, tokenizer=str(tmp_path / "tokenizer.json"), split="hash", val_fraction=0
    )
    assert np.fromfile(out / "train.bin", dtype="<u4").tolist() == [5, 69999, 7, 70_000]
    assert done.manifest.dtype == "uint32"
    assert any("16-bit" in note for note in done.notes)
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


def test_a_tokenizer_json_gives_the_ids_that_its_library_gives(tmp_path: Path, documents: list[str]) -> None:
    from tokenizers import Tokenizer

    documents = documents[:10]
    source = str(write_jsonl(tmp_path / "few.jsonl", documents))
    prepare([source], tmp_path / "trained", tokenizer="bpe:400", val_fraction=0)
    path = tmp_path / "trained" / "tokenizer.json"
    prepare([source], tmp_path / "out", tokenizer=str(path), val_fraction=0)
    assert token_files(tmp_path / "out") == token_files(tmp_path / "trained")
    tokenizer = Tokenizer.from_file(str(path))
    ids = [
        number for text in documents for number in [*tokenizer.encode(text).ids, tokenizer.token_to_id("<|endoftext|>")]
    ]
    assert np.fromfile(tmp_path / "out" / "train.bin", dtype=np.uint16).tolist() == ids
    assert tokenizer.decode(ids[:50]) == documents[0][: len(tokenizer.decode(ids[:50]))]


def test_an_end_of_text_that_the_tokenizer_does_not_have_is_refused(tmp_path: Path) -> None:
    source = str(write_jsonl(tmp_path / "few.jsonl", ["some text"]))
    prepare([source], tmp_path / "trained", tokenizer="bpe:300")
    path = str(tmp_path / "trained" / "tokenizer.json")
    with refused(nearest="<|endoftext|>"):
        prepare([source], tmp_path / "out", tokenizer=path, end_of_text="<|endoftxt|>")


@pytest.mark.parametrize("spec", ["gtp2", "bpe:8k", "bpe:10", "no/such/tokenizer.json"])
def test_a_tokenizer_that_there_is_not_is_refused(tmp_path: Path, source: str, spec: str) -> None:
    with refused("--tokenizer"):
        prepare([source], tmp_path / "out", tokenizer=spec)
    assert not (tmp_path / "out").exists()


def test_standard_input_is_recognised_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_input(content: bytes) -> Any:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        return prepare(["-"], tmp_path / "out", tokenizer="bytes", reading=ReadOptions(separator="\n"))

    assert not from_input(b"one\ntwo\n").already
    assert from_input(b"one\ntwo\n").already
    for other in (b"one\nTwo\n", b"one\ntwo\nthree\n", b"one\n"):
        with pytest.raises(InputError, match="standard input"):
            from_input(other)


def test_learning_from_standard_input_is_refused_because_it_is_read_once(tmp_path: Path) -> None:
    with refused("--tokenizer chars"):
        prepare(["-"], tmp_path / "out", tokenizer="chars")


def test_a_split_by_tail_needs_a_single_text(tmp_path: Path, source: str) -> None:
    with refused("--split tail", allowed="--split hash"):
        prepare([source], tmp_path / "out", tokenizer="bytes", split="tail")


def test_two_calls_at_once_do_not_work_on_one_set(tmp_path: Path, source: str) -> None:
    from oomph.data.work import WorkFolder

    first = WorkFolder(tmp_path / "out")
    with refused("--out", allowed="another --out"):
        prepare([source], tmp_path / "out", tokenizer="bytes")
    first.close()
    assert prepare([source], tmp_path / "out", tokenizer="bytes").manifest.counts.documents
