"""Odd names, odd rows, odd settings: each is read rightly or refused with its place."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import write_jsonl

from oomph.cli import data as verb
from oomph.config import from_dict
from oomph.data import check, info, prepare
from oomph.data.pieces import CHUNK_BYTES, cut, whole
from oomph.data.sources import ReadOptions
from oomph.data.streams import FileStream
from oomph.data.tokenizer import tokenizer_of
from oomph.errors import InputError
from refusals import refused


def tokens(folder: Path) -> bytes:
    """The text of a set of bytes that has no validation split, its ends of text as 0."""
    return (folder / "train.bin").read_bytes()[::2]


def tokenizer_json(path: Path) -> str:
    import tokenizers

    words = {"[UNK]": 0, "a": 1, "<eos>": 2, "</s>": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.save(str(path))
    return str(path)


def test_a_sets_tokenizer_keeps_its_end_of_text(tmp_path: Path) -> None:
    source, spec = str(write_jsonl(tmp_path / "a.jsonl", ["a", "a"])), tokenizer_json(tmp_path / "tokenizer.json")
    prepare([source], tmp_path / "out", tokenizer=spec, end_of_text="[UNK]", val_fraction=0)  # not a usual name
    tokenizer = tokenizer_of(tmp_path / "out", None, None)
    assert tokenizer.end_of_text == 0 and tokenizer.decode([1]) == "a"


def test_another_end_of_text_is_another_set(tmp_path: Path) -> None:
    source, spec = str(write_jsonl(tmp_path / "a.jsonl", ["a", "a"])), tokenizer_json(tmp_path / "tokenizer.json")
    prepare([source], tmp_path / "out", tokenizer=spec, end_of_text="<eos>", val_fraction=0)
    assert np.fromfile(tmp_path / "out" / "train.bin", np.uint16).tolist() == [1, 2, 1, 2]
    with refused(found="end_of_text=3"):
        prepare([source], tmp_path / "out", tokenizer=spec, end_of_text="</s>", val_fraction=0)


@pytest.mark.parametrize("spec", ["gpt2", "bytes", "chars", "bpe:300"])
def test_an_end_of_text_beside_a_tokenizer_that_has_its_own_is_refused(tmp_path: Path, spec: str) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", ["a"]))
    with refused("--end_of_text <eos>", allowed="tokenizer.json"):
        prepare([source], tmp_path / "out", tokenizer=spec, end_of_text="<eos>")


@pytest.mark.parametrize(
    ("written", "number"), [("500000", 500_000), ("1e6", 10**6), ("500_000", 500_000), ("10M", 10**7), ("7", 7)]
)
def test_a_number_of_tokens_may_be_plain(written: str, number: int) -> None:
    assert verb._options(["a", "--out", "b", "--take", written]).take == number


@pytest.mark.parametrize("written", ["0", "-5", "1.5", "nan", "inf", "1e999", "many", ""])
def test_what_is_no_number_of_tokens_is_refused(written: str) -> None:
    with pytest.raises(InputError, match="a whole number of tokens"):
        verb._options(["a", "--out", "b", f"--take={written}"])


@pytest.mark.parametrize(
    ("spec", "name"), [("bpe:300", "tokenizer.json"), ("chars", "meta.pkl"), ("bytes", "meta.pkl")]
)
def test_a_set_without_its_vocabulary_file_is_not_called_finished(tmp_path: Path, spec: str, name: str) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", ["some text"] * 5))
    prepare([source], tmp_path / "out", tokenizer=spec)
    (tmp_path / "out" / name).unlink()
    with refused(found=name, allowed="--overwrite"):
        prepare([source], tmp_path / "out", tokenizer=spec)
    assert any(line.startswith(name) for line in check(tmp_path / "out").failures)


@pytest.mark.parametrize("suffix", ["GZ", "ZST"])
def test_a_compressed_file_may_be_named_in_capitals(tmp_path: Path, suffix: str) -> None:
    import zstandard

    content = b'{"text": "hello"}\n'
    (tmp_path / f"A.JSONL.{suffix}").write_bytes(
        gzip.compress(content) if suffix == "GZ" else zstandard.compress(content)
    )
    prepare([str(tmp_path / f"A.JSONL.{suffix}")], tmp_path / "out", tokenizer="bytes", val_fraction=0)
    assert tokens(tmp_path / "out") == b"hello\0"


def test_counts_are_of_what_was_taken(tmp_path: Path) -> None:
    rows = [json.dumps({"text": text}) for text in ("four", "", "sixsix", "", "more")]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, "{]"]))
    done = prepare(
        [str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer="bytes", take=8, val_fraction=0, skip_broken=True
    )
    counts = done.manifest.counts
    assert (counts.documents, counts.empty, counts.broken) == (2, 1, 0)
    assert counts.text_bytes == 4 + 6 * 3 // 7


@pytest.mark.parametrize(("spec", "words"), [("bytes", 257), ("bpe:300", 300)])
def test_nanogpt_and_the_plan_find_the_same_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, words: int
) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", [f"some text {number}" for number in range(999)]))
    done = prepare([source], tmp_path / "data" / "mine", tokenizer=spec)
    meta = pickle.loads((tmp_path / "data" / "mine" / "meta.pkl").read_bytes())
    assert meta == {"vocab_size": done.manifest.vocab_size}
    assert done.manifest.vocab_size <= words
    monkeypatch.chdir(tmp_path)
    assert from_dict({"dataset": "mine"}).config.vocab_size == meta["vocab_size"]


def test_gpt2s_vocabulary_is_nanogpts_own_and_needs_no_meta_pkl(tmp_path: Path, gpt2_dir: Path) -> None:
    prepare([str(write_jsonl(tmp_path / "a.jsonl", ["a"]))], tmp_path / "out", tokenizer_dir=gpt2_dir)
    assert not (tmp_path / "out" / "meta.pkl").exists()


def test_a_document_of_a_million_spaces_is_text_like_any_other(tmp_path: Path, gpt2_dir: Path, reference: Any) -> None:
    text = "a" + " " * 1_000_000 + "b"
    source = str(write_jsonl(tmp_path / "a.jsonl", [text]))
    done = prepare([source], tmp_path / "out", tokenizer_dir=gpt2_dir, val_fraction=0)
    ids = np.fromfile(tmp_path / "out" / "train.bin", np.uint16).tolist()
    assert reference.decode(ids[:-1]) == text
    assert ids[-1] == reference.eot_token
    assert (done.manifest.counts.documents, done.manifest.counts.text_bytes) == (1, len(text))


def test_a_large_document_that_is_cut_is_the_same_document() -> None:
    text = "naïve text é " * 60_000
    pieces = list(cut(whole(text, 0.5)))
    assert "".join(piece.text for piece in pieces) == text
    assert len(pieces) > 1
    assert max(len(piece.text.encode()) for piece in pieces) <= CHUNK_BYTES
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.end_of_text for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_large_rows_of_a_parquet_file_come_a_few_at_once(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from oomph.data.sources import resolve

    texts = [os.urandom(2**17).hex() for _ in range(20)] + ["small"] * 10
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", use_dictionary=False)
    (source,) = resolve([str(tmp_path / "a.parquet")], ReadOptions()).sources
    chunks = list(source.chunks({}, 0.0))
    assert max(chunk.size_bytes for chunk in chunks) <= 2 * CHUNK_BYTES
    found = [piece.text for chunk in chunks for part in chunk.parts for piece in part.pieces(0.0)]  # type: ignore[union-attr]
    assert found == texts
    for number, chunk in enumerate(chunks):
        assert [rest.parts for rest in source.chunks(chunk.at, 0.0)] == [rest.parts for rest in chunks[number + 1 :]]


def test_a_highly_compressed_file_is_read_in_small_portions(tmp_path: Path) -> None:
    import tracemalloc

    import zstandard

    (tmp_path / "a.txt.zst").write_bytes(zstandard.ZstdCompressor(level=1).compress(bytes(2**28)))
    stream = FileStream(tmp_path / "a.txt.zst", {})
    tracemalloc.start()
    size = sum(len(data) for data in iter(lambda: stream.read(2**18), b""))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    stream.close()
    assert size == 2**28
    assert peak < 2**27


@pytest.mark.parametrize(
    ("row", "found"),
    [
        (b'\xef\xbb\xbf{"other": 1}', "other"),
        (b'{"other": ' + b"9" * 5000 + b"}", "other"),
        (b'{"text": ' + b"9" * 5000 + b"}", "a int"),
        (b'{"other": ' + b"[" * 5000 + b"]" * 5000 + b"}", ""),
    ],
)
def test_an_odd_row_without_text_is_named_by_its_line(tmp_path: Path, row: bytes, found: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(row + b"\n")
    with refused("a.jsonl:1", found=found):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer="bytes")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_byte_order_mark_before_json_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hello", "n": ' + b"9" * 5000 + b"}\n")
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer="bytes", val_fraction=0)
    assert tokens(tmp_path / "out") == b"hello\0"


@pytest.mark.parametrize("key", ['a "quoted" key', "back\\slash", "", "ключ", "two\nlines"])
def test_any_key_may_hold_the_text(tmp_path: Path, key: str) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", ["hello"], key=key))
    prepare([source], tmp_path / "out", tokenizer="bytes", val_fraction=0, reading=ReadOptions(text_key=key))
    assert tokens(tmp_path / "out") == b"hello\0"


@pytest.mark.parametrize("kind", ["list", "struct", "number"])
def test_a_column_that_is_not_text_is_named(tmp_path: Path, kind: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(
        pa.table({"text": {"list": [["a"]], "struct": [{"string": "a"}], "number": [1]}[kind]}), tmp_path / "a.parquet"
    )
    with refused("a.parquet", allowed="string"):
        prepare([str(tmp_path / "a.parquet")], tmp_path / "out", tokenizer="bytes")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_parquet_text_that_is_no_utf8_is_replaced_and_counted(tmp_path: Path, kind: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pa.array([b"good", None, b"bad \xff"], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 3, rows.buffers())
    if kind == "large_string":
        column = pa.Array.from_buffers(pa.large_string(), 3, rows.cast(pa.large_binary()).buffers())
    if kind == "dictionary":
        column = column.dictionary_encode()
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    done = prepare([str(tmp_path / "a.parquet")], tmp_path / "out", tokenizer="bytes", val_fraction=0)
    assert tokens(tmp_path / "out") == "good\0bad \ufffd\0".encode()
    assert (done.manifest.counts.repaired, done.manifest.counts.empty) == (1, 1)


def test_a_file_name_that_is_no_utf8_is_a_name_like_any_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    try:
        Path(folder).mkdir()
    except OSError:  # macOS has no such names
        return
    Path(folder, "a.txt").write_text("hello " * 50)
    for _ in range(2):
        assert verb.run([folder, "--out", f"{folder}/out", "--tokenizer=bytes", "--json"]) == 0
    assert verb.run(["info", f"{folder}/out"]) == 0
    assert "caf\\xe9" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 300, "~nobody-of-that-name/a.txt", "zero\0byte"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError):
        prepare([name], tmp_path / "out", tokenizer="bytes")


def test_a_closed_standard_input_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "oomph", "data", "-", "--out", str(tmp_path / "out"), "--tokenizer=bytes"]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *command], check=False, capture_output=True, text=True)
    assert (done.returncode, "standard input is closed" in done.stderr) == (2, True)


@pytest.mark.parametrize("damage", ["splits", "sources", "nesting", "bytes"])
def test_a_damaged_manifest_is_named(tmp_path: Path, damage: str) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", ["some text"]))
    prepare([source], tmp_path / "out", tokenizer="bytes")
    file = tmp_path / "out" / "meta.json"
    content = json.loads(file.read_bytes())
    if damage == "splits":
        del content["splits"]["val"]
    content["recipe"]["sources"] = 5 if damage == "sources" else content["recipe"]["sources"]
    written = json.dumps(content).encode()
    if damage in ("nesting", "bytes"):
        odd = b"[" * 9999 + b"]" * 9999 if damage == "nesting" else b'"\xff"'
        written = written.replace(b'"take": null', b'"take": ' + odd)
    file.write_bytes(written)
    for look in (info, check, lambda path: prepare([source], path, tokenizer="bytes")):
        with refused("meta.json"):
            look(tmp_path / "out")


def test_a_read_error_while_learning_leaves_nothing_unfinished(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"this is not what its name says")
    with refused("a.jsonl.gz"):
        prepare([str(tmp_path / "a.jsonl.gz")], tmp_path / "out", tokenizer="chars")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("arguments", "words"), [([], "resumes"), (["--overwrite"], "starts over")])
def test_an_interruption_says_what_the_same_call_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("oomph.data.task._append", interrupted)
    source = str(write_jsonl(tmp_path / "a.jsonl", ["some text"]))
    assert verb.run([source, "--out", str(tmp_path / "out"), "--tokenizer=bytes", *arguments]) == 130
    assert f"the same command {words}" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "words"), [("text".encode("utf-16"), "UTF-16"), (b"te\0xt", "zero bytes")])
def test_a_file_that_does_not_look_like_text_is_noted(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    said: list[str] = []
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer="bytes", say=said.append)
    assert any(line.startswith("NOTE") and words in line for line in said)


def test_a_validation_split_that_take_does_not_reach_is_explained(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 100)
    done = prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer="bytes", take=100)
    assert any("--take" in note for note in done.notes)


@pytest.mark.parametrize("option", ["--separator", "--text_key"])
def test_an_argument_that_is_no_utf8_is_refused(option: str) -> None:
    with pytest.raises(InputError, match="UTF-8 text"):
        verb._options(["a", "--out", "b", option, os.fsdecode(b"caf\xe9")])
