"""Put what commands print today into the pages that show it: `make refresh`.

A console block with one `$ oomph …` command and lines below it shows that command's output; the lines are replaced by
what it prints now. The tables of docs/block.md are computed, and the example notebook is run too.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import block
import notebook

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = re.compile(r"(```console\n\$ (oomph [^\n]*)\n)((?!\$)[^`].*?)(```)", flags=re.DOTALL)
WIDTH = "100"  # columns


def shown(page: Path) -> Iterator[tuple[str, str]]:
    """(command, its output) of each block of a page that shows one."""
    for found in SHOWN.finditer(page.read_text(encoding="utf-8")):
        yield found[2], found[3]


def printed(command: str) -> str:
    """What the command prints in the project's folder, trailing spaces apart."""
    words = [str(Path(sys.executable).with_name("oomph")), *shlex.split(command)[1:]]
    environment = os.environ | {"COLUMNS": WIDTH, "NO_COLOR": "1"}
    done = subprocess.run(words, check=False, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode not in (0, 1):  # 1: the honest answer that a run does not fit
        sys.exit(f"{command}\n{done.stderr}")
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.strip().splitlines())


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(SHOWN.sub(lambda found: found[1] + printed(found[2]) + found[4], text), encoding="utf-8")
    block.refresh()
    notebook.refresh()


if __name__ == "__main__":
    main()
