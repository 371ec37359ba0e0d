"""How long a fit takes, and how many settings it weighs in that time.

    .venv/bin/python benchmarks/fit.py [--runs 5]

Goal: at least 2,000 settings in under 2 s for a 12-layer GPT at 16 × 32 × 1024 tokens on an RTX 4070, the full
simulation of everything shown included. The minimum and the median of wall and processor time are printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from oomph.fitting import Fit, fit

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "fineweb_124m.py"


def measure(name: str, make: Callable[[], Fit], runs: int) -> None:
    wall, processor = [], []
    for _ in range(runs):
        start, start_processor = time.perf_counter(), time.process_time()
        found = make()
        wall.append(time.perf_counter() - start)
        processor.append(time.process_time() - start_processor)
    print(
        f"{name:<44} {found.evaluated:>7,} settings   wall min {min(wall):5.2f} s, median {median(wall):5.2f} s   "
        f"processor min {min(processor):5.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    measure("the 12-layer GPT on an RTX 4070", lambda: fit(EXAMPLE, "RTX 4070"), runs)
    measure("GPT-2 medium on an RTX 3090", lambda: fit("gpt2-medium", "RTX 3090"), runs)
    measure("GPT-2 XL on 6 GB, where nothing fits", lambda: fit("gpt2-xl", "RTX 2060 6GB"), 1)
    measure("the largest model, RTX 4070", lambda: fit(EXAMPLE, "RTX 4070", largest=True), runs)
    measure("from nothing: 10 B tokens in 20 h, RTX 4070", lambda: fit(None, "RTX 4070", tokens=10e9, hours=20), runs)


if __name__ == "__main__":
    main()
