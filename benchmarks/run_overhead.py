"""What `oomph run` costs a training step: the same CPU-bound loop with and without it, in turn.

    python benchmarks/run_overhead.py [--rounds 5] [--steps 200] [--ms 20]

The loop does the same work in every step, about so many milliseconds of it, and prints a nanoGPT line after each. Its
own processor time and clock per step are compared, the best of all rounds, so that the start of a process and other
programs do not count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LOOP = """
import json, sys, time
steps, work = int(sys.argv[1]), int(sys.argv[2])
began, cpu = time.perf_counter(), time.process_time()
for step in range(steps):
    for _ in range(work):
        sum(range(200))
    print(f"iter {step}: loss 3.1234, time 20.00ms, mfu 12.90%", flush=True)
took = {"clock": time.perf_counter() - began, "cpu": time.process_time() - cpu}
open(sys.argv[3], "w").write(json.dumps(took))
"""


def work_of(ms: float) -> int:
    """How often the loop adds up for about so many milliseconds of processor time."""
    began = time.process_time()
    for _ in range(20_000):
        sum(range(200))
    return round(20_000 * ms / 1e3 / (time.process_time() - began))


def measure(folder: Path, steps: int, work: int, watched: bool) -> dict[str, float]:
    """Seconds a step, by the clock and by processor time of the loop itself."""
    result = folder / "took.json"
    command = [sys.executable, "-c", LOOP, str(steps), str(work), str(result)]
    if watched:
        command = [sys.executable, "-m", "oomph", "run", "--log", str(folder / "run.log"), "--", *command]
    subprocess.run(command, check=True, capture_output=True)
    return {name: seconds / steps for name, seconds in json.loads(result.read_text()).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ms", type=float, default=20.0)
    options = parser.parse_args()
    work = work_of(options.ms)
    with tempfile.TemporaryDirectory() as folder:
        rounds = [
            {watched: measure(Path(folder), options.steps, work, watched) for watched in (False, True)}
            for _ in range(options.rounds)
        ]
    for name in ("cpu", "clock"):
        plain, watched = (
            min(each[kind][name] for each in rounds) for kind in (False, True)
        )  # others disturb, never help
        print(
            f"{name:6} {1e3 * plain:8.3f} ms a step, {1e3 * watched:8.3f} under oomph run: {watched / plain - 1:+.2%}"
        )


if __name__ == "__main__":
    main()
