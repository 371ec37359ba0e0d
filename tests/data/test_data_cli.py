"""`oomph data` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from data_helpers import write_jsonl

from oomph.cli import data as verb
from oomph.data.task import PreparationProgress
from oomph.errors import InputError
from refusals import refused


@pytest.fixture
def made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    source = write_jsonl(tmp_path / "a.jsonl", ["some text", "more text"] * 100)
    assert verb.run([str(source), "--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--val-fraction=0.5"]) == 0
    capsys.readouterr()
    return tmp_path / "out"


def test_results_go_to_stdout_and_decisions_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["some text"] * 10)
    assert verb.run([str(source), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]) == 0
    out, err = capsys.readouterr()
    assert "train      100 tokens (100) in 10 documents" in out
    assert "split by hash, 0.50%" in err
    assert "NOTE: " in err and "--val_fraction" in err


def test_json_holds_the_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["some text"] * 10)
    verb.run([str(source), "--out", str(tmp_path / "out"), "--tokenizer=bytes", "--take=0.05k", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["manifest"]["splits"]["train"]["tokens"] == 50
    assert result["already"] is False


def test_a_second_call_says_that_it_is_finished(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = made.parent / "a.jsonl"
    assert verb.run([str(source), "--out", str(made), "--tokenizer", "bytes", "--val_fraction=0.5"]) == 0
    assert "is finished already" in capsys.readouterr().out


def test_info_shows_what_a_set_holds(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.run(["info", str(made)]) == 0
    assert "vocabulary 257 ids as uint16" in capsys.readouterr().out
    assert verb.run(["info", str(made), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["documents"] == 200


def test_check_answers_with_its_exit_code(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.run(["check", str(made)]) == 0
    content = (made / "train.bin").read_bytes()
    (made / "train.bin").write_bytes(b"\x00\x00" + content[2:])
    assert verb.run(["check", str(made)]) == 1
    assert "WRONG  train.bin: SHA-256" in capsys.readouterr().out
    (made / "train.bin").write_bytes(b"\xff\xff" + content[2:])
    (made / "val.bin").write_bytes(b"x")
    assert verb.run(["check", str(made), "--json"]) == 1
    failures = json.loads(capsys.readouterr().out)["failures"]
    assert any(line.startswith("train.bin") and "65,535" in line and "257" in line for line in failures)
    assert any(line.startswith("val.bin: 1 bytes") for line in failures)


def test_check_of_a_changed_vocabulary_file_fails(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["some text"] * 10)
    verb.run([str(source), "--out", str(tmp_path / "out"), "--tokenizer", "chars"])
    assert verb.run(["check", str(tmp_path / "out")]) == 0
    (tmp_path / "out" / "meta.pkl").write_bytes(b"nonsense")
    assert verb.run(["check", str(tmp_path / "out")]) == 1


def test_check_of_an_unfinished_set_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("".join('{"text": "some text"}\n' for _ in range(20_000)) + "broken\n")
    with refused(f"{source}:20001"):
        verb.run([str(source), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"])
    assert verb.run(["check", str(tmp_path / "out")]) == 1
    assert verb.run(["info", str(tmp_path / "out")]) == 0
    assert "unfinished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "x"], "SOURCE"),
        (["a.txt"], "--out"),
        (["a.txt", "--out", "x", "--take", "many"], "3.68B"),
        (["a.txt", "--out", "x", "--take", "0.5"], "whole number"),
        (["a.txt", "--out", "x", "--tokeniser", "gpt2"], "did you mean --tokenizer"),
        (["a.txt", "--out", "x", "--batch_size=3"], "a config key"),
        (["a.txt", "--out", "x", "--separator", ""], "at least one character"),
        (["builtin:python", "--out", "x", "--workers", "0", "--tokenizer", "bytes"], "1 to 1024"),
        (["builtin:python", "--out", "x", "--val_fraction", "1", "--tokenizer", "bytes"], "from 0 to below 1"),
        (["check", "no/such/folder"], "no train.bin"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        verb.run(arguments)


def test_escapes_of_a_separator_are_understood() -> None:
    assert verb._escapes(r"\n\n") == "\n\n"
    assert verb._escapes(r"a\\nb") == r"a\nb"


def test_the_progress_line_has_the_share_the_rate_and_the_time_left() -> None:
    progress = PreparationProgress(True, 100 * 2**20, None, 0, 0)
    assert progress.line(25 * 2**20, 6_000_000, 5.0) == (
        " 25.0%  25 MiB read  6.00 M tokens  5.0 MiB/s  1.20 M tokens/s  15 s to go"
    )


def test_the_time_left_is_that_of_whatever_ends_first() -> None:
    progress = PreparationProgress(True, 100 * 2**20, 8_000_000, 0, 0)
    assert progress.line(25 * 2**20, 6_000_000, 6.0).startswith(" 75.0%")
    assert progress.line(25 * 2**20, 6_000_000, 6.0).endswith("2 s to go")


def test_importing_the_room_brings_in_no_heavy_library() -> None:
    program = (
        "import sys, oomph.data, oomph.cli.data\n"
        "print([name for name in ('torch', 'numpy', 'tiktoken', 'tokenizers', 'pyarrow') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout == "[]\n"
