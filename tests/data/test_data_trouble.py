"""What once gave a wrong set, a wrong count or a hang."""

from __future__ import annotations

import io
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from data_helpers import write_jsonl

from oomph.data import check, info, prepare
from oomph.data.pieces import CHUNK_BYTES, cut_place
from oomph.data.reader import Batches
from oomph.data.tokenizer import JsonTokenizer
from oomph.errors import InputError
from refusals import refused


def test_text_that_spells_a_special_token_is_text_in_every_tokenizer(tmp_path: Path) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", [f"hello {number} <|endoftext|> more" for number in range(3)]))
    prepare([source], tmp_path / "bpe", tokenizer="bpe:300", val_fraction=0)
    file = tmp_path / "bpe" / "tokenizer.json"
    prepare([source], tmp_path / "json", tokenizer=str(file), val_fraction=0)
    for name in ("bpe", "json"):
        assert np.fromfile(tmp_path / name / "train.bin", dtype=np.uint16).tolist().count(0) == 3
    encoder = JsonTokenizer(file, "a", "<|endoftext|>")
    sent = pickle.loads(pickle.dumps(encoder))  # as to a worker that is started anew
    assert [ids.tolist() for ids in sent.encode(["<|endoftext|>"])] == [
        ids.tolist() for ids in encoder.encode(["<|endoftext|>"])
    ]


def test_another_standard_input_is_refused_though_all_of_the_first_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = str(write_jsonl(tmp_path / "rows.jsonl", ["words"] * 3))
    (tmp_path / "bad.jsonl").write_text('{"nope": 1}\n')
    names = ["-", rows, str(tmp_path / "bad.jsonl")]

    def call(text: bytes, skip_broken: bool) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        prepare(names, tmp_path / "out", tokenizer="bytes", skip_broken=skip_broken, journal_seconds=0)

    first = b"the first text " * 50_000  # more than a block, so that it is journaled as read
    with refused("bad.jsonl:1", found="nope"):
        call(first, skip_broken=False)
    with pytest.raises(InputError, match="standard input"):
        call(b"another text " * 50_000, skip_broken=True)
    with refused(found="standard input"):
        call(first + b"and more", skip_broken=True)
    call(first, skip_broken=True)
    assert not check(tmp_path / "out").failures


def test_a_long_broken_document_is_counted_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe word" * 100_000)
    done = prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer="bytes", split="hash", journal_seconds=0)
    assert (done.manifest.counts.documents, done.manifest.counts.repaired) == (1, 1)


def test_info_looks_where_training_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("abc " * 50)
    Path("b.txt").write_text("abc " * 100)
    prepare(["a.txt"], "name", tokenizer="bytes")
    prepare(["b.txt"], "data/name", tokenizer="bytes")
    assert info("name")["splits"]["train"]["tokens"] == 360
    assert Batches("name", batch_size=1, block_size=4).path.parent == Path("data/name")


def test_check_sees_a_destroyed_meta_pkl(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc " * 50)
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer="bytes")
    assert not check(tmp_path / "out").failures
    (tmp_path / "out" / "meta.pkl").write_bytes(b"junk")
    assert [line[:8] for line in check(tmp_path / "out").failures] == ["meta.pkl"]
    (tmp_path / "out" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))
    (failure,) = check(tmp_path / "out").failures
    assert failure.startswith("meta.pkl") and "65" in failure and "257" in failure


def test_an_empty_training_split_is_noted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    done = prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer="bytes")
    assert [note.startswith("the training split") for note in done.notes] == [True]


def test_a_state_that_is_refused_moves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc " * 50)
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer="bytes")
    batches = Batches(tmp_path / "out", batch_size=2, block_size=4)
    with refused(found="4"):
        batches.load_state({**batches.state(), "seed": 4, "position": 630})
    assert batches.position == 0


def test_all_invalid_sizes_are_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        Batches(tmp_path, batch_size=2.5, block_size=0, world_size=0, rank=1)  # type: ignore[arg-type]
    assert [problem.where for problem in error.value.problems] == ["batch_size", "block_size", "world_size", "rank"]


def test_a_named_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with refused("pipe", allowed="- to read a pipe"):
        prepare([str(tmp_path / "pipe")], tmp_path / "out", tokenizer="bytes")


@pytest.mark.parametrize("names", [[""], ["hf:"]])
def test_a_source_or_a_folder_without_a_name_is_refused(tmp_path: Path, names: list[str]) -> None:
    with refused("SOURCE"):
        prepare(names, tmp_path / "out", tokenizer="bytes")
    with refused("--out"):
        prepare(["-"], "", tokenizer="bytes")


@pytest.mark.parametrize("blank", [b" ", b"\n", b" \n", b"\n "])
def test_white_space_alone_is_cut_at_the_end_of_a_block(blank: bytes) -> None:
    data = blank * (CHUNK_BYTES // len(blank))
    assert cut_place(data, len(data)) == len(data)
    assert cut_place(b"word" + data[4:], len(data)) == len(data)  # the only better place is beyond the half


def test_a_row_of_the_hub_that_is_no_text_is_named_or_skipped(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "x.jsonl").write_text('{"text": "a b"}\n{"text": "c"}\n')
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers" / "x.jsonl").write_text('{"text": 4}\n{"text": 5}\n')
    with refused("numbers, row 1", found="int"):
        prepare([f"hf:{tmp_path / 'numbers'}"], tmp_path / "out", tokenizer="bytes")
    both = [f"hf:{tmp_path / 'set'}", f"hf:{tmp_path / 'numbers'}"]
    done = prepare(both, tmp_path / "out", tokenizer="bytes", skip_broken=True, overwrite=True)
    assert (done.manifest.counts.documents, done.manifest.counts.broken) == (2, 2)


def test_a_folder_among_the_unfinished_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc " * 50)
    (tmp_path / "out" / ".unfinished" / "sub").mkdir(parents=True)
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer="bytes")
    assert not (tmp_path / "out" / ".unfinished").exists()
