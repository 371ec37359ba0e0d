"""What docs/check.md shows is run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOC = (Path(__file__).parents[2] / "docs" / "check.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent


@pytest.mark.slow
def test_the_commands_and_the_python_shown_run(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    shown = re.findall(r"```sh\noomph (.*?)\n```", DOC, flags=re.DOTALL)
    assert len(shown) == 2
    (python,) = re.findall(r"```python\n(.*?)```", DOC, flags=re.DOTALL)
    commands = [[str(BIN / "oomph"), *shlex.split(line)] for line in shown]
    for command in (*commands, [sys.executable, "-c", python]):
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
