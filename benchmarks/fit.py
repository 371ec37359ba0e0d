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

from oomph.fitting.cards import Cards, which_cards
from oomph.fitting.fit import fit
from oomph.fitting.result import Fit

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "fineweb_124m.py"
DEEP = {"n_layer": 60, "batch_size": 16, "gradient_accumulation_steps": 32}
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 128, "block_size": 256, "vocab_size": 65, "batch_size": 4}


def measure(name: str, make: Callable[[], Fit | Cards], runs: int) -> None:
    wall, processor = [], []
    for _ in range(runs):
        start, start_processor = time.perf_counter(), time.process_time()
        found = make()
        wall.append(time.perf_counter() - start)
        processor.append(time.process_time() - start_processor)
    size = f"{len(found.cards):,} cards" if isinstance(found, Cards) else f"{found.evaluated:,} settings"
    print(
        f"{name:<44} {size:>16}   wall min {min(wall):5.2f} s, median {median(wall):5.2f} s   "
        f"processor min {min(processor):5.2f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    measure("the 12-layer GPT on an RTX 4070", lambda: fit(EXAMPLE, "RTX 4070"), runs)
    measure("GPT-2 medium on an RTX 3090", lambda: fit("gpt2-medium", "RTX 3090"), runs)
    measure("GPT-2 XL on 6 GB, where nothing fits", lambda: fit("gpt2-xl", "RTX 2060 6GB"), 1)
    measure("the largest model, RTX 4070", lambda: fit(EXAMPLE, "RTX 4070", largest=True), runs)
    measure("the largest model, tiny and deep, RTX 4070", lambda: fit(TINY, "RTX 4070", largest=True), runs)
    measure("from nothing: 10 B tokens in 20 h, RTX 4070", lambda: fit(None, "RTX 4070", tokens=10e9, hours=20), runs)
    measure("60 layers of GPT-2's width on an RTX 4070", lambda: fit(DEEP, "RTX 4070"), 1)
    measure("the 12-layer GPT on every card", lambda: which_cards(EXAMPLE), 1)
    measure("the same in 40 h", lambda: which_cards(EXAMPLE, hours=40), 1)


if __name__ == "__main__":
    main()
