"""Full disks, files that cannot be read, text that is none: a clear message, and nothing half-written."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from data_helpers import token_files, write_jsonl

from oomph.data import DataError, check, prepare
from oomph.data.sources import ReadOptions
from refusals import refused

LIMITED = """
import json, resource, signal, sys
from oomph.data import DataError, prepare
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
try:
    prepare(**json.loads(sys.argv[1]))
except DataError as error:
    print(error)
    sys.exit(3)
"""


@pytest.mark.parametrize("limit_bytes", [100, 300_000, 1_200_000])
def test_a_failed_write_is_explained_and_finished_work_is_kept(
    tmp_path: Path, documents: list[str], limit_bytes: int
) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", documents))
    settings: dict[str, Any] = {"names": [source], "tokenizer": "bytes", "val_fraction": 0.1}
    prepare(out=tmp_path / "wanted", **settings)
    command = [sys.executable, "-c", LIMITED, json.dumps({"out": str(tmp_path / "out"), **settings}), str(limit_bytes)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "cannot be written" in said
    assert not any((tmp_path / "out" / name).exists() for name in ("train.bin", "val.bin", "meta.json"))
    prepare(out=tmp_path / "out", **settings)
    assert token_files(tmp_path / "out") == token_files(tmp_path / "wanted")


def test_a_full_disk_is_named(tmp_path: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The token file leads to /dev/full, which has no room for a single byte."""
    from oomph.data import work

    source = str(write_jsonl(tmp_path / "a.jsonl", documents))
    real = work.TokenFiles._open

    def to_full(self: Any, name: str, split: Any) -> Any:
        digest = real(self, name, split)
        if name == "train":
            self._files[name].close()
            self._files[name] = open("/dev/full", "wb", buffering=0)  # noqa: PTH123, SIM115
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(work.TokenFiles, "_open", to_full)
        with pytest.raises(DataError, match="No space left on device"):
            prepare([source], tmp_path / "out", tokenizer="bytes")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".unfinished"]
    prepare([source], tmp_path / "out", tokenizer="bytes")
    assert check(tmp_path / "out").failures == []


def test_an_out_folder_that_cannot_be_made_is_refused(tmp_path: Path, documents: list[str]) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", documents))
    with refused("--out "):
        prepare([source], tmp_path / "a.jsonl" / "out", tokenizer="bytes")


def test_a_file_that_fails_while_it_is_read_is_named(tmp_path: Path) -> None:
    """/proc/self/mem opens, and fails at its first byte."""
    (tmp_path / "a.txt").symlink_to("/proc/self/mem")
    (tmp_path / "b.txt").write_text("b")
    with refused("a.txt", found="Input/output error"):
        prepare([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], tmp_path / "out", tokenizer="bytes")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_file_that_was_cut_short_is_named(tmp_path: Path, documents: list[str], suffix: str) -> None:
    import zstandard

    content = write_jsonl(tmp_path / "a.jsonl", documents).read_bytes()
    packed = gzip.compress(content) if suffix == "gz" else zstandard.compress(content)
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(packed[:-100])
    with refused("a.jsonl"):
        prepare([str(path)], tmp_path / "out", tokenizer="bytes")
    assert not (tmp_path / "out" / "train.bin").exists()


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_file_that_is_not_what_its_name_says_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"this is plain text, whatever the name says, and long enough")
    with refused(name):
        prepare([str(tmp_path / name)], tmp_path / "out", tokenizer="bytes")


def test_invalid_utf8_is_replaced_counted_and_noted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\0bad \xff\xfe\0good")
    done = prepare(
        [str(tmp_path / "a.txt")],
        tmp_path / "out",
        tokenizer="bytes",
        val_fraction=0,
        reading=ReadOptions(separator="\0"),
    )
    assert done.manifest.counts.repaired == 1
    assert any("UTF-8" in note and "1 document" in note for note in done.notes)
    ids = (tmp_path / "out" / "train.bin").read_bytes()[::2]
    assert "bad \ufffd\ufffd".encode() in ids


def test_empty_files_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"text")
    (tmp_path / "c.jsonl").write_bytes(b"")
    done = prepare([str(tmp_path)], tmp_path / "out", tokenizer="bytes", val_fraction=0)
    assert (done.manifest.counts.documents, done.manifest.counts.empty) == (1, 1)


def test_no_text_at_all_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    with refused("SOURCE", found="empty documents"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer="bytes")
    assert list((tmp_path / "out").iterdir()) == []


def test_rows_that_are_no_documents_are_named_by_their_line(tmp_path: Path) -> None:
    for row, found in (("[1]", "a list"), ('{"text": 5}', "a int"), ("{]", "line 1 column 2")):
        (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n' + row + "\n")
        with refused("a.jsonl:3", found=found):
            prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer="bytes")


def test_broken_utf8_and_half_surrogates_inside_json_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x\xffy"}\n{"text": "x\\ud800y"}\n')
    done = prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer="bytes", val_fraction=0)
    ids = (tmp_path / "out" / "train.bin").read_bytes()[::2]
    assert ids.count("x\ufffdy".encode()) == 2
    assert done.manifest.counts.documents == 2


MEASURED = """
import json, re, resource, sys
from pathlib import Path
from oomph.data import prepare
from oomph.errors import InputError
from oomph.data.sources import ReadOptions
try:
    prepare(**json.loads(sys.argv[1]))
except InputError as error:
    print(error, file=sys.stderr)
# Not RUSAGE_SELF, which begins with the size of the process that started this one.
own = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
print(own + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peak_mib(**arguments: Any) -> tuple[int, str]:
    """Peak memory of the call and of its largest worker, and what it said."""
    command = [sys.executable, "-c", MEASURED, json.dumps(arguments)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    )
    return int(done.stdout) // 1024, done.stderr


@pytest.mark.slow
def test_a_line_of_a_gigabyte_is_text_like_any_other(tmp_path: Path) -> None:
    with (tmp_path / "a.txt").open("wb") as file:
        for _ in range(1024):
            file.write(b"word " * (2**20 // 5) + b"x")
    size = (tmp_path / "a.txt").stat().st_size
    peak, _ = peak_mib(names=[str(tmp_path / "a.txt")], out=str(tmp_path / "out"), tokenizer="bytes", workers=2)
    assert peak < 300
    assert sum((tmp_path / "out" / f"{name}.bin").stat().st_size for name in ("train", "val")) == 2 * size


@pytest.mark.slow
def test_a_json_line_of_a_gigabyte_is_refused_or_skipped_in_bounded_memory(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.write(b'{"text": "first"}\n{"text": "')
        for _ in range(1024):
            file.write(b"x" * 2**20)
        file.write(b'"}\n{"text": "last"}\n')
    settings = {
        "names": [str(tmp_path / "a.jsonl")],
        "out": str(tmp_path / "out"),
        "tokenizer": "bytes",
        "val_fraction": 0,
    }
    peak, said = peak_mib(**settings)
    assert "a.jsonl:2: " in said and "64 MiB" in said
    assert peak < 600
    peak, said = peak_mib(**settings, skip_broken=True)
    assert peak < 600
    assert (tmp_path / "out" / "train.bin").read_bytes()[::2] == b"first\x00last\x00"


@pytest.mark.slow
def test_a_word_without_end_is_cut_and_nothing_of_it_is_lost(tmp_path: Path, gpt2_dir: Path, reference: Any) -> None:
    import numpy as np

    text = "a" * 3_000_000
    (tmp_path / "a.txt").write_text(text)
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer_dir=gpt2_dir)
    ids = np.concatenate([np.fromfile(tmp_path / "out" / f"{name}.bin", dtype=np.uint16) for name in ("train", "val")])
    assert reference.decode(ids.tolist()) == text
