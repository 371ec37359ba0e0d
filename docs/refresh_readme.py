"""Put what the command prints today into the README's first example.

make readme
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = re.compile(r"(```console\n\$ (oomph plan [^\n]*)\n).*?(```)", flags=re.DOTALL)


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    shown = EXAMPLE.search(text)
    if shown is None:
        sys.exit("README.md has no console block that begins with an oomph plan command")
    command = [str(Path(sys.executable).with_name("oomph")), *shlex.split(shown[2])[1:]]
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    printed = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment).stdout
    lines = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    readme.write_text(text[: shown.start()] + shown[1] + lines + "\n" + shown[3] + text[shown.end() :])


if __name__ == "__main__":
    main()
