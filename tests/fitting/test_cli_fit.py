"""`oomph fit` as a user runs it: what it prints, where, and its exit code."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import oomph
from oomph.cli import fit as command
from oomph.errors import InputError
from oomph.fitting.result import Fit
from oomph.fitting.verdict import LINES
from oomph.report.document import Document
from oomph.report.fit import document
from oomph.report.markdown import to_markdown
from oomph.report.terminal import to_text

ROOT = Path(__file__).parent.parent.parent
COMMANDS = re.findall(r"^\$ oomph fit (.*)$", (ROOT / "docs" / "fit.md").read_text(), flags=re.MULTILINE)
SMALL = [
    "--n_layer=2", "--n_head=2", "--n_embd=128", "--block_size=128", "--vocab_size=512", "--batch_size=4",
    "--gradient_accumulation_steps=2",
]  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = command.run(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("columns", [80, 110])
def test_the_report_keeps_to_the_width_and_opens_with_the_verdict(
    run_d: Fit, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = to_text(document(run_d), everything=True).splitlines()
    assert lines[0].startswith("✓ ")
    assert max(map(len, lines)) <= columns
    table = re.sub(r"\s+", " ", "\n".join(lines))
    headings = ("tokens/s", "hours", "saved") if columns > 100 else ("tokens/s", "hours")
    for figure in (*headings, "8 × 64", "4 × 128", "2 × 256", "9 layers", "width 512"):
        assert figure in table
    table = "\n".join(lines)
    assert all(line in table for line in LINES)


def test_markdown_has_every_option_with_its_effect(run_d: Fit) -> None:
    text = to_markdown(document(run_d))
    assert text.startswith("## ✅")
    assert all(option.effect in text for option in run_d.options)
    assert sum(text.count(f"\n| {mark}") for mark in "✓?✗★") == len(run_d.options)


def test_what_fits_exits_0_and_json_is_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *SMALL, "--gpu", "RTX 4070", "--json")
    result = json.loads(out)
    assert code == 0
    assert result["options"][result["best"]]["fits"] is True


def test_what_fits_nowhere_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *SMALL, "--n_embd=4096", "--gpu_mib=900", "--gpu_tflops=9", "--gpu_gbs=200")
    assert code == 1
    assert out.startswith("✗ No")


def test_the_best_option_is_written_and_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "best.py"
    code, _, err = run(capsys, *SMALL, "--gpu", "RTX 4070", "--write", str(target))
    assert code == 0
    assert "wrote" in err
    assert oomph.plan(target, "RTX 4070").memory.fits


def test_another_option_is_written_by_its_number(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "other.toml"
    _, out, _ = run(capsys, *SMALL, "--gpu", "RTX 4070", "--json", "--write", str(target), "--option", "2")
    wanted = json.loads(out)["options"][1]
    assert oomph.plan(target, "RTX 4070").config.batch_size == wanted["batch_size"]


@pytest.mark.parametrize("name", ["x.txt", "missing/x.py", "."])
def test_a_file_that_cannot_be_written_is_refused_before_the_search(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "fit", lambda *_, **__: pytest.fail("searched first"))
    with pytest.raises(InputError):
        command.run([*SMALL, "--gpu", "RTX 4070", "--write", name])


@pytest.mark.parametrize("form", ["--json", "--markdown", "--gpu_watts=200"])
def test_a_reader_who_leaves_does_not_change_the_exit_code(form: str) -> None:
    card = ["--gpu_mib=4000", "--gpu_tflops=20", "--gpu_gbs=300"]
    arguments = [sys.executable, "-m", "oomph", "fit", *SMALL, *card, form]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
    assert (process.returncode, said) == (0, b"")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gpu", "all", "--largest"],
        ["--gpu", "all", "--write", "x.py"],
        ["--gpu", "4070", "--option", "1"],
        ["--gpu", "4070", "--write", "x.py", "--option", "99"],
        ["--gpu", "4070", "--hours", "-1"],
        ["--gpu", "4070", "--tokens", "many"],
        ["--gpu", "4070", "--tokens", "1e30"],
        ["--gpu", "4070", "--overwrite"],
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    with pytest.raises(InputError):
        command.run([*SMALL, *arguments])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--gpu", "4070", "--write", "x.json", "--batch_size=0"], ["x.json", "batch_size"]),
        (["--gpu", "no such card", "--write", "x.json"], ["x.json", "no such card"]),
        (["--gpu", "all", "--write", "x.py", "--largest"], ["--write", "--largest"]),
        (
            ["--gpu", "40700", "--write", "x.json", "--batch_size=0", "--foo=1", "--option", "2"],
            ["40700", "x.json", "batch_size", "--foo"],
        ),
        (["--gpu", "40700", "--foo=1", "--tokens", "many"], ["40700", "--foo", "tokens"]),
        (
            [
                "--gpu",
                "40700",
                "--write",
                "x.json",
                "--batch_size=0",
                "--tokens",
                "many",
                "--hours",
                "-3",
                "--option",
                "0",
            ],
            ["40700", "x.json", "batch_size", "--tokens", "--hours", "--option"],
        ),
        (["--gpu", "40700", "--tokens", "1e30"], ["40700", "tokens"]),
    ],
)
def test_everything_that_is_wrong_is_told_at_once(arguments: list[str], told: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        command.run([*SMALL, *arguments])
    assert all(any(each in str(problem) for problem in caught.value.problems) for each in told)


def test_a_number_of_a_card_that_is_wrong_is_told_once() -> None:
    with pytest.raises(InputError) as caught:
        command.run([*SMALL, "--gpu_mib", "lots"])
    assert len(caught.value.problems) == 1


def test_the_line_about_the_file_says_that_it_is_another_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    card = ["--gpu_mib=900", "--gpu_tflops=9", "--gpu_gbs=200"]
    code, _, told = run(capsys, *SMALL, "--n_embd=2048", *card, "--write", str(tmp_path / "best.py"))
    assert code == 1
    written = oomph.load_config([str(tmp_path / "best.py")]).config
    assert (written.n_layer, written.n_embd) != (2, 2048)
    assert re.search(r"best\.py: option \d+; ", told)  # and what it changes


def test_the_line_about_the_file_names_the_values_that_no_longer_follow(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = tmp_path / "run.py"
    source.write_text("max_iters = 1000\nwarmup_iters = max_iters // 10\n")
    target = tmp_path / "new.py"
    _, _, told = run(capsys, str(source), *SMALL, "--gpu", "4070", "--tokens", "100M", "--write", str(target))
    assert "warmup_iters = 100" in told
    assert oomph.plan(target, "RTX 4070").config.warmup_iters == 100


@pytest.fixture(scope="module")
def huge() -> Document:
    small = {"n_layer": 2, "n_head": 2, "n_embd": 128, "batch_size": 100_000, "gradient_accumulation_steps": 1000}
    return document(oomph.fit(small, "RTX 4070"))


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_huge_numbers_leave_the_table_readable(huge: Document, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = to_text(huge, everything=True)
    assert max(len(line) for line in text.splitlines()) <= columns
    assert "…" not in text
    assert "100000 × 1000" in text


def test_what_is_being_tried_is_said_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(capsys, *SMALL, "--gpu", "4070", "--json")[2] == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    code, out, told = run(capsys, *SMALL, "--gpu", "4070", "--json")
    assert code == 0
    assert json.loads(out)["options"]
    assert re.search(r"trying [\d,]+ settings of oomph", told)
    assert told.endswith("\r\x1b[K")  # and the line is left clean


def test_tokens_are_understood_as_people_write_them() -> None:
    assert command.amount("10B") == 10e9
    assert command.amount("3.68b") == 3.68e9
    assert command.amount("524288") == 524288


@pytest.mark.slow
@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_command_of_the_documentation_runs(
    arguments: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, *shlex.split(arguments))
    assert code == 0
    assert out.startswith("✓")


@pytest.mark.slow
def test_which_cards_would_do_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *SMALL, "--gpu", "all", "--all")
    assert code == 0
    assert "cards would do" in out
    assert "GeForce RTX 4070" in out
