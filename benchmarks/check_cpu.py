"""Predicted against measured on this CPU: `oomph check` over shapes that differ in what they spend memory and time on.

    python benchmarks/check_cpu.py [--trainer nanogpt] [--rounds 3] [--steps 8]

One thread, pinned to one core; the CPU's rates are measured anew at the start. A busy machine is corrected for as far
as Linux tells how long a step waited for its core; caches and memory are shared all the same, so the last column says
how busy it was. It reports, and gates nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from datetime import date

MEMORY_GOAL, TIME_GOAL = 0.03, 0.15
SHAPES: dict[str, dict[str, object]] = {
    "characters": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12, "vocab_size": 65},
    "bytes, the demo's": {
        "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 128, "batch_size": 16, "vocab_size": 256,
    },
    "words, short": {"n_layer": 2, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 4, "vocab_size": 50304},
    "words, wider": {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 128, "batch_size": 4, "vocab_size": 50304},
    "wide": {"n_layer": 2, "n_head": 8, "n_embd": 1024, "block_size": 64, "batch_size": 4, "vocab_size": 1024},
    "deep": {"n_layer": 24, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 4, "vocab_size": 1024},
    "long": {"n_layer": 2, "n_head": 4, "n_embd": 128, "block_size": 2048, "batch_size": 1, "vocab_size": 1024},
    "dropout and bias": {
        "n_layer": 4, "n_head": 4, "n_embd": 192, "block_size": 256, "batch_size": 2, "vocab_size": 1024,
        "dropout": 0.1, "bias": True,
    },
}  # fmt: skip
SHARED: dict[str, object] = {"device": "cpu", "compile": False, "gradient_accumulation_steps": 2}


def pin() -> None:
    """One thread on one core, here and in every process started from here."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def measure(trainer: str, rounds: int, steps: int) -> None:
    import oomph

    memory_errors, time_errors = [], []
    print(f"{'shape':<20}{'allocated, MiB':>24}{'process, MiB':>22}{'a step, ms':>24}{'waited':>9}")
    for name, shape in SHAPES.items():
        checks = [oomph.check(SHARED | shape | {"trainer": trainer}, steps=steps) for _ in range(rounds)]
        if failed := next((each.failure for each in checks if each.failure), None):
            print(f"{name:<20} failed: {failed}")
            continue
        quietest = min(checks, key=lambda each: each.waited)
        own_ms = statistics.median((each.measured.step_ms or 0) * (1 - each.waited) for each in checks)
        said_ms = quietest.predicted.step_ms or 0.0
        memory, time = quietest.error.allocated_mib or 0.0, said_ms / own_ms - 1
        memory_errors.append(abs(memory))
        time_errors.append(abs(time))
        said, was = quietest.predicted, quietest.measured
        print(
            f"{name:<20}{said.allocated_mib:>8.1f}{was.allocated_mib:>8.1f}{memory:>+8.1%}"
            f"{said.process_mib:>8.0f}{was.process_mib:>7.0f}{quietest.error.process_mib or 0:>+7.0%}"
            f"{said_ms:>9.1f}{own_ms:>8.1f}{time:>+7.0%}{quietest.waited:>9.0%}",
            flush=True,
        )
    worst, middle = max(memory_errors), statistics.median(time_errors)
    print(f"memory: worst {worst:.1%}, goal {MEMORY_GOAL:.0%}: {'reached' if worst <= MEMORY_GOAL else 'missed'}")
    print(f"time: median {middle:.1%}, goal {TIME_GOAL:.0%}: {'reached' if middle <= TIME_GOAL else 'missed'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", choices=("nanogpt", "oomph"), action="append", help="default: both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    pin()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for trainer in options.trainer or ("nanogpt", "oomph"):
            print(f"\n{trainer}, {date.today()}, load {os.getloadavg()[0]:.1f}: predicted, measured, error")
            measure(trainer, options.rounds, options.steps)


if __name__ == "__main__":
    main()
