"""The README's commands are run: what the front door promises must hold."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import refresh  # docs/refresh.py

ROOT = Path(__file__).parent.parent
README_PAGE = "README.md"
DOCS = [str(page.relative_to(ROOT)) for page in refresh.PAGES[1:] if any(refresh.shown(page))]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^\$ (oomph .*)$", README, flags=re.MULTILINE)
PYTHON = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
BIN = Path(sys.executable).parent


def test_the_readme_has_commands() -> None:
    assert len(COMMANDS) >= 5
    assert PYTHON


@pytest.mark.slow
def test_the_readmes_commands_run_one_after_another(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    for command in COMMANDS:
        done = subprocess.run(
            shlex.split(command), check=False, capture_output=True, text=True, cwd=tmp_path, env=environment
        )
        assert done.returncode in (0, 1), (command, done.stderr)  # 1: the honest answer that a run does not fit
        assert done.stdout, command


@pytest.mark.parametrize("code", PYTHON)
def test_readme_python_runs(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("page", [README_PAGE, *(pytest.param(page, marks=pytest.mark.slow) for page in DOCS)], ids=str)
def test_the_output_shown_is_the_output_printed(page: str) -> None:
    """What a page shows of a command is what the command prints today, the finishing dates apart."""
    for command, output in refresh.shown(ROOT / page):
        assert _lines(refresh.printed(command)) == _lines(output), command


def _lines(text: str) -> list[str]:
    dateless = re.sub(r"(Mon|Tue|Wed|Thu|Fri|Sat|Sun) \d\d \w{3} \d\d:\d\d", "DATE", text)
    return [line.rstrip() for line in dateless.strip().splitlines()]


def test_make_knows_the_targets_the_readme_names() -> None:
    for target in re.findall(r"^\$ make (\w+)$", README, flags=re.MULTILINE):
        subprocess.run(["make", "-n", target], check=True, capture_output=True, cwd=ROOT)
