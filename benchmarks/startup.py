"""How long the command takes to answer, cold, and how long one plan takes in Python.

    .venv/bin/python benchmarks/startup.py [--runs 20]

Each command runs in a new process; the minimum and the median of wall time are printed beside a bare interpreter's.
Goals: 400 ms a command, 20 ms a plan.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
OOMPH = Path(sys.executable).with_name("oomph")


def wall_ms(command: list[str]) -> float:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run(
        command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT, env=environment
    )
    return (time.perf_counter() - start) * 1e3


def call_ms(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def report(name: str, goal_ms: float | None, samples: list[float]) -> None:
    goal = f"goal {goal_ms:.0f}" if goal_ms else ""
    print(f"{name:<58} min {min(samples):7.1f} ms   median {median(samples):7.1f} ms   {goal}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    example = "examples/fineweb_124m.py"
    commands = {
        "python -c pass": ([sys.executable, "-c", "pass"], None),
        "oomph --help": ([str(OOMPH), "--help"], 400.0),
        f"oomph plan {example} --gpu 4070 --json": ([str(OOMPH), "plan", example, "--gpu", "4070", "--json"], 400.0),
        f"oomph plan {example} --gpu 4070": ([str(OOMPH), "plan", example, "--gpu", "4070"], None),
        "oomph gpus": ([str(OOMPH), "gpus"], None),
    }
    for command, _ in commands.values():
        wall_ms(command)  # compiles the bytecode
    for name, (command, goal_ms) in commands.items():
        report(name, goal_ms, [wall_ms(command) for _ in range(runs)])

    import oomph

    card = oomph.find_gpu("RTX 4070")
    configs = [oomph.load_config(str(ROOT / example), [("batch_size", str(n), "")]) for n in range(1, runs + 2)]
    oomph.plan(configs[0], card)
    samples = [call_ms(partial(oomph.plan, config, card)) for config in configs[1:]]  # each a new config
    report("oomph.plan(config, device)", 20.0, samples)
    print("torch imported:", "torch" in sys.modules)


if __name__ == "__main__":
    main()
