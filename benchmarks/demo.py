"""The demo's two predictions, over several runs: how far the memory of the process and the step are off.

    python benchmarks/demo.py [--runs 5] [--steps 150] [--cache]

Half of the table is measured as the machine is, half with a program that keeps one core busy. Each run trains
examples/tiny_python.toml, shorter than `make demo` does, in a process of its own. The CPU's rates are measured anew at
the start of each half; `--cache` takes those of the user's cache, as a second run of the demo does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
MEMORY_GOAL, STEP_GOAL = 0.08, 0.10
SPIN = "while True: pass"


def oomph(*arguments: str, folder: str) -> str:
    """What the command prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "oomph", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


@contextmanager
def beside(programs: int) -> Iterator[None]:
    """That many programs, each of which keeps one core busy."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(programs)]
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.wait()


def run(folder: str, steps: int) -> dict[str, Any]:
    """The result.json of one run."""
    config = str(ROOT / "examples" / "tiny_python.toml")
    keys = [f"--max_iters={steps}", f"--eval_interval={steps}", "--eval_iters=5"]
    found: dict[str, Any] = json.loads(oomph("train", config, "--overwrite", "--json", *keys, folder=folder))
    return found


def show(kind: str, results: list[dict[str, Any]]) -> None:
    """One line a run, and the median and the worst of each figure."""
    errors: dict[str, list[float]] = {"memory_mib": [], "step_ms": []}
    for result in results:
        cells = []
        for name, found in errors.items():
            figure = result[name]
            found.append(figure["error"])
            cells.append(f"{figure['predicted']:>8.1f}{figure['actual']:>8.1f}{figure['error']:>+8.1%}")
        print(f"{kind:<8}{''.join(cells)}{result['waited']:>9.0%}")
    for (name, found), goal in zip(errors.items(), (MEMORY_GOAL, STEP_GOAL), strict=True):
        worst = max(map(abs, found))
        reached = "reached" if worst <= goal else "missed"
        middle = median(map(abs, found))
        print(f"{kind:<8}{name}: median {middle:.1%}, worst {worst:.1%}, goal {goal:.0%}: {reached}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of each kind")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--cache", action="store_true", help="the CPU's rates of the user's cache")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; predicted, measured, error; waited for the CPU")
    print(f"{'':<8}{'the process, MiB':>24}{'a step, ms':>24}{'waited':>9}")
    with tempfile.TemporaryDirectory() as folder:
        oomph("data", "builtin:python", "--out", "data/python", "--tokenizer", "bytes", folder=folder)
        for kind, programs in (("as it is", 0), ("busy", 1)):
            if not options.cache:
                os.environ["XDG_CACHE_HOME"] = str(Path(folder) / f"cache {programs}")
            with beside(programs):
                show(kind, [run(folder, options.steps) for _ in range(options.runs)])


if __name__ == "__main__":
    main()
