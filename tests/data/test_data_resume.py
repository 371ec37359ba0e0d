"""Killed, interrupted or failed at any moment: the next call ends with the bytes of an undisturbed run."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from data_helpers import token_files, write_jsonl

from oomph.data import DataError, check, prepare, task
from oomph.data.sources import ReadOptions
from refusals import refused


class Stop(BaseException):
    """As sudden as Ctrl-C."""


def stop_after(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """Let so many blocks be written, then stop between the writing and the next block."""
    real, left = task._append, blocks

    def append(*arguments: Any) -> bool:
        nonlocal left
        if left == 0:
            raise Stop
        left -= 1
        return real(*arguments)

    monkeypatch.setattr(task, "_append", append)


def sources_of(tmp_path: Path, kind: str, documents: list[str]) -> tuple[list[str], ReadOptions]:
    if kind == "parquet" or kind == "hf":
        import pyarrow
        from pyarrow import parquet

        (tmp_path / "hub").mkdir(exist_ok=True)
        parquet.write_table(pyarrow.table({"text": documents}), tmp_path / "hub" / "train.parquet", row_group_size=100)
        return [f"hf:{tmp_path / 'hub'}" if kind == "hf" else str(tmp_path / "hub")], ReadOptions()
    if kind == "text":
        (tmp_path / "a.txt").write_bytes("".join(documents).encode())
        (tmp_path / "b.txt").write_bytes("".join(documents[:30]).encode())
        return [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], ReadOptions()
    if kind == "separated":
        (tmp_path / "a.txt").write_bytes("\0".join(documents).encode())
        return [str(tmp_path / "a.txt")], ReadOptions(separator="\0")
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    if kind == "gz":
        import gzip

        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        return [str(tmp_path / "a.jsonl.gz")], ReadOptions()
    return ["-"] if kind == "-" else [str(path)], ReadOptions(format="jsonl")


@pytest.mark.parametrize("kind", ["jsonl", "gz", "parquet", "hf", "text", "separated", "-"])
def test_stopped_after_any_chunk_the_next_run_resumes(
    tmp_path: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    names, reading = sources_of(tmp_path, kind, documents * 3)

    def call(out: Path) -> Any:
        monkeypatch.setattr(
            sys, "stdin", io.TextIOWrapper(io.BytesIO((tmp_path / "a.jsonl").read_bytes() if kind == "-" else b""))
        )
        return prepare(names, out, tokenizer="bytes", val_fraction=0.1, reading=reading, split="hash", workers=1)

    wanted = call(tmp_path / "wanted")
    for blocks in (0, 1, 2):
        with monkeypatch.context() as patch:
            stop_after(patch, blocks)
            with pytest.raises(Stop):
                call(tmp_path / "out")
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".unfinished"]
    done = call(tmp_path / "out")
    assert done.resumed_tokens > 0
    assert token_files(tmp_path / "out") == token_files(tmp_path / "wanted")
    assert done.manifest.counts == wanted.manifest.counts
    assert done.manifest.splits == wanted.manifest.splits
    assert not (tmp_path / "out" / ".unfinished").exists()


def test_a_source_that_changed_under_an_unfinished_set_is_refused(
    tmp_path: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", documents))
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(Stop):
            prepare([source], tmp_path / "out", tokenizer="bytes", workers=1)
    write_jsonl(tmp_path / "a.jsonl", documents[1:])
    with refused(f"--out {tmp_path / 'out'}", found="a.jsonl", allowed="--overwrite"):
        prepare([source], tmp_path / "out", tokenizer="bytes", workers=1)
    assert not prepare([source], tmp_path / "out", tokenizer="bytes", overwrite=True).resumed_tokens


@pytest.mark.parametrize("harm", ["cut", "changed"])
def test_unfinished_files_that_do_not_match_the_journal_are_made_again(
    tmp_path: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", documents))
    prepare([source], tmp_path / "wanted", tokenizer="bytes")
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stop):
            prepare([source], tmp_path / "out", tokenizer="bytes", workers=1)
    file = tmp_path / "out" / ".unfinished" / "train.bin"
    content = file.read_bytes()
    file.write_bytes(content[:-10] if harm == "cut" else b"\0\0" + content[2:])
    said: list[str] = []
    assert prepare([source], tmp_path / "out", tokenizer="bytes", say=said.append).resumed_tokens == 0
    assert any("starting over" in line for line in said)
    assert token_files(tmp_path / "out") == token_files(tmp_path / "wanted")


def test_killed_between_two_final_names_the_next_call_moves_the_rest(
    tmp_path: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", documents))
    real = Path.replace

    def replace(path: Path, target: Path) -> Path:
        if target.name == "val.bin" and target.parent == tmp_path / "out":
            raise Stop
        return real(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        with pytest.raises(Stop):
            prepare([source], tmp_path / "out", tokenizer="bytes")
    assert not (tmp_path / "out" / "meta.json").exists()
    prepare([source], tmp_path / "out", tokenizer="bytes")
    assert check(tmp_path / "out").failures == []


def test_a_broken_line_stops_the_work_and_skipping_it_resumes(tmp_path: Path, documents: list[str]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:70], b'{"text": "cut sho\n', *lines[70:]]))
    prepare([str(path)], tmp_path / "wanted", tokenizer="bytes", skip_broken=True)
    with refused("a.jsonl:71"):
        prepare([str(path)], tmp_path / "out", tokenizer="bytes")
    done = prepare([str(path)], tmp_path / "out", tokenizer="bytes", skip_broken=True)
    assert done.manifest.counts.broken == 1
    assert done.resumed_tokens > 0
    assert token_files(tmp_path / "out") == token_files(tmp_path / "wanted")


def test_a_worker_that_dies_loses_nothing(
    tmp_path: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(
        write_jsonl(tmp_path / "a.jsonl", documents * 12)
    )  # so much that work is left when the first is killed
    real = task._append

    def append(*arguments: Any) -> bool:
        for worker in multiprocessing.active_children()[:1]:
            worker.kill()
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(task, "_append", append)
        with pytest.raises(DataError, match="--workers"):
            prepare([source], tmp_path / "out", tokenizer="bytes", workers=2)
    prepare([source], tmp_path / "out", tokenizer="bytes", workers=2)
    prepare([source], tmp_path / "wanted", tokenizer="bytes")
    assert token_files(tmp_path / "out") == token_files(tmp_path / "wanted")


SCRIPT = """
import json, sys
from oomph.data import prepare
if __name__ == "__main__":
    prepare(journal_seconds=0.02, **json.loads(sys.argv[1]))
"""


def start(**arguments: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SCRIPT, json.dumps(arguments)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, err = process.communicate()
    assert process.returncode == 0, err


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    try:
        return [int(number) for number in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    except OSError:
        return []


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["gpt2", "bpe:512"])
def test_twenty_kills_do_not_change_the_bytes(
    tmp_path: Path, gpt2_dir: Path, documents: list[str], tokenizer: str
) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", documents * (6 if tokenizer == "gpt2" else 2)))
    settings = {
        "names": [source],
        "tokenizer": tokenizer,
        "tokenizer_dir": str(gpt2_dir),
        "val_fraction": 0.1,
        "workers": 2,
    }
    began = time.monotonic()
    finish(start(out=str(tmp_path / "wanted"), **settings))
    whole_run = time.monotonic() - began
    draw = random.Random(7)
    kills, begun, fresh, orphans = 0, 0, 0, []
    while kills < 20 or (not begun and kills < 60):  # on a busy machine most come before the first token
        out = tmp_path / f"out{fresh}"
        process = start(out=str(out), **settings)
        time.sleep(draw.uniform(0, whole_run))
        orphans += workers_of(process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            kills += 1
            assert not (out / "meta.json").exists() or check(out).failures == []
            journal = out / ".unfinished" / "journal.json"
            begun += journal.exists() and json.loads(journal.read_bytes())["splits"]["train"]["tokens"] > 0
        if (out / "meta.json").exists():  # finished between two kills: begin another
            assert token_files(out) == token_files(tmp_path / "wanted")
            fresh += 1
    assert begun > 0, "no kill came while tokens were being written"
    finish(start(out=str(tmp_path / f"out{fresh}"), **settings))
    assert token_files(tmp_path / f"out{fresh}") == token_files(tmp_path / "wanted")
    deadline = time.monotonic() + 10
    while any(
        Path(f"/proc/{number}/cmdline").exists() and b"oomph.data" in Path(f"/proc/{number}/cmdline").read_bytes()
        for number in orphans
    ):
        assert time.monotonic() < deadline, "workers outlive the call that started them"
        time.sleep(0.1)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_done(tmp_path: Path, documents: list[str]) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", documents * 4))
    arguments = ["data", source, "--out", str(tmp_path / "out"), "--tokenizer", "bpe:512", "--workers", "2"]
    program = "import sys; from oomph.cli import main as m; m.VERBS['data'] = ''; sys.exit(m.main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, start_new_session=True
    )
    while (
        not (tmp_path / "out" / ".unfinished" / "train.bin").exists()
        or not (tmp_path / "out" / ".unfinished" / "train.bin").stat().st_size
    ):
        time.sleep(0.02)
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: workers get it too
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert b"the same command resumes" in err
    assert b"Traceback" not in err
    journal = json.loads((tmp_path / "out" / ".unfinished" / "journal.json").read_bytes())
    assert journal["splits"]["train"]["tokens"] > 0
    assert prepare([source], tmp_path / "out", tokenizer="bpe:512").resumed_tokens > 0
