"""Every kind of source gives the same documents in the same order."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path

import pytest
from data_helpers import token_files, write_jsonl

from oomph.data import prepare
from oomph.data.sources import ReadOptions, resolve
from oomph.errors import InputError
from refusals import refused


@pytest.fixture
def wanted(tmp_path: Path, documents: list[str]) -> tuple[bytes, bytes]:
    """The token files of the documents, from plain JSON lines."""
    prepare(
        [str(write_jsonl(tmp_path / "wanted.jsonl", documents))],
        tmp_path / "wanted",
        tokenizer="bytes",
        val_fraction=0.1,
    )
    return token_files(tmp_path / "wanted")


def made_from(source: str | Path, out: Path, **reading: str) -> tuple[bytes, bytes]:
    prepare([str(source)], out, tokenizer="bytes", val_fraction=0.1, split="hash", reading=ReadOptions(**reading))
    return token_files(out)


def test_json_lines_compressed_with_gzip(tmp_path: Path, wanted: tuple[bytes, bytes]) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "wanted.jsonl").read_bytes()))
    assert made_from(tmp_path / "a.jsonl.gz", tmp_path / "out") == wanted


def test_json_lines_compressed_with_zstandard_in_two_frames(tmp_path: Path, wanted: tuple[bytes, bytes]) -> None:
    import zstandard

    content = (tmp_path / "wanted.jsonl").read_bytes()
    (tmp_path / "a.jsonl.zst").write_bytes(
        zstandard.compress(content[:300_000]) + zstandard.compress(content[300_000:])
    )
    assert made_from(tmp_path / "a.jsonl.zst", tmp_path / "out") == wanted


def test_parquet_in_many_row_groups(tmp_path: Path, wanted: tuple[bytes, bytes], documents: list[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"id": list(range(len(documents))), "text": documents})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    assert made_from(tmp_path / "a.parquet", tmp_path / "out") == wanted


def test_a_dataset_of_the_hub_from_a_local_folder(
    tmp_path: Path, wanted: tuple[bytes, bytes], documents: list[str]
) -> None:
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "hub").mkdir()
    for index in (0, 1):
        half = documents[index * 40 : 40 if index == 0 else None]
        parquet.write_table(
            pyarrow.table({"text": half}), tmp_path / "hub" / f"train-{index}.parquet", row_group_size=9
        )
    assert made_from(f"hf:{tmp_path / 'hub'}", tmp_path / "out") == wanted


def test_standard_input(tmp_path: Path, wanted: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO((tmp_path / "wanted.jsonl").read_bytes()))
    monkeypatch.setattr(sys, "stdin", stream)
    assert made_from("-", tmp_path / "out", format="jsonl") == wanted


def test_text_between_separators(tmp_path: Path, wanted: tuple[bytes, bytes], documents: list[str]) -> None:
    (tmp_path / "a.txt").write_bytes("<|sep|>".join(documents).encode())
    assert made_from(tmp_path / "a.txt", tmp_path / "out", separator="<|sep|>") == wanted


def test_a_folder_of_text_files_sorted_by_name(
    tmp_path: Path, wanted: tuple[bytes, bytes], documents: list[str]
) -> None:
    (tmp_path / "folder" / "sub").mkdir(parents=True)
    for number, text in enumerate(documents):
        (tmp_path / "folder" / "sub" / f"{number:04}.txt").write_bytes(text.encode())
    (tmp_path / "folder" / ".hidden.txt").write_text("not this")
    (tmp_path / "folder" / "picture.png").write_bytes(b"\x89PNG")
    assert made_from(tmp_path / "folder", tmp_path / "out") == wanted
    assert made_from(f"{tmp_path}/folder/**/*.txt", tmp_path / "glob") == wanted
    assert resolve([str(tmp_path / "folder")], ReadOptions()).ignored == [str(tmp_path / "folder" / "picture.png")]


def test_the_text_may_be_under_another_key(tmp_path: Path, wanted: tuple[bytes, bytes], documents: list[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", documents, key="content")
    assert made_from(tmp_path / "a.jsonl", tmp_path / "out", text_key="content") == wanted


def test_builtin_python_is_text_that_every_machine_has() -> None:
    sources = resolve(["builtin:python"], ReadOptions()).sources
    assert sum(source.size_bytes or 0 for source in sources) > 5_000_000
    assert [source.name for source in sources] == sorted(source.name for source in sources)


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    found = resolve([str(tmp_path / "a.txt"), str(tmp_path), f"{tmp_path}/*.txt"], ReadOptions())
    assert [source.name for source in found.sources] == [str(tmp_path / "a.txt")]


def test_all_problems_with_the_sources_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "books.txt").write_text("a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    names = ["-", "-", "builtin:pyhton", "bokks.txt", "empty", "*.xyz", "gone.txt"]
    with refused() as problems:
        resolve([name if name == "-" or ":" in name else str(tmp_path / name) for name in names], ReadOptions())
    assert [Path(problem.where).name for problem in problems] == names[1:]
    assert (problems[1].nearest, problems[2].nearest) == ("builtin:python", str(tmp_path / "books.txt"))


def test_a_missing_key_is_reported_with_the_keys_there_are(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x"], key="texts")
    with refused("a.jsonl:1", found="id, texts", nearest="texts"):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer="bytes")
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"id": [1], "body": ["x"]}), tmp_path / "a.parquet")
    with refused("a.parquet", found="id, body"):
        prepare([str(tmp_path / "a.parquet")], tmp_path / "out", tokenizer="bytes")
    with refused("a.parquet", found="int64", allowed="string"):
        prepare([str(tmp_path / "a.parquet")], tmp_path / "out", tokenizer="bytes", reading=ReadOptions(text_key="id"))


def test_a_null_text_is_an_empty_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": None}) + "\n" + json.dumps({"text": "ab"}) + "\n\n")
    done = prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer="bytes", val_fraction=0)
    assert (done.manifest.counts.empty, done.manifest.counts.documents) == (1, 1)


@pytest.mark.parametrize(
    ("library", "source", "extra"),
    [
        ("pyarrow.parquet", "a.parquet", "data"),
        ("zstandard", "a.jsonl.zst", "data"),
        ("datasets", "hf:a", "data"),
        ("numpy", "a.txt", "train"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, source: str, extra: str
) -> None:
    (tmp_path / "a.txt").write_text("a")
    if ":" not in source:
        (tmp_path / source).write_bytes(b"a")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError, match=rf"{library.partition('.')[0]}.*pip install 'oomph\[{extra}\]'"):
        prepare([source if ":" in source else str(tmp_path / source)], tmp_path / "out", tokenizer="bytes")
