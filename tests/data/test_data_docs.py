"""What docs/data.md shows is run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from oomph.cli import data as verb
from oomph.data import Manifest, prepare

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: list[str]) -> Path:
    """A folder with the files that the page speaks of."""
    monkeypatch.chdir(tmp_path)
    Path("input.txt").write_text(documents[0], encoding="utf-8")
    Path("books").mkdir()
    for number, text in enumerate(documents[:20]):
        Path("books", f"{number}.txt").write_text(text, encoding="utf-8")
    return tmp_path


def commands() -> list[list[str]]:
    blocks: list[str] = re.findall(r"```\n(.*?)```", PAGE, flags=re.S)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line.startswith("oomph data")]


def test_every_command_on_the_page_works(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = commands()
    assert len(shown) == 6
    for command in shown:
        arguments = command[2:]
        if arguments[0].startswith("hf:"):  # there is no hub here: its options are read, and the rest is tested apart
            assert verb._options(arguments).take == 3_680_000_000
        else:
            assert verb.run(arguments) == 0, command
    assert "ok     train.bin: SHA-256" in capsys.readouterr().out
    assert (here / "data" / "shakespeare_char" / "meta.pkl").exists()


def test_the_python_on_the_page_works(here: Path) -> None:
    prepare([str(here / "books")], here / "data" / "python", tokenizer="bytes")
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        names: dict[str, object] = {}
        exec(block, names)
        assert names["x"].shape == (6, 1024)  # type: ignore[attr-defined]


def test_every_field_of_the_manifest_is_on_the_page() -> None:
    for field in Manifest.__struct_fields__:
        assert f"`{field}" in PAGE
