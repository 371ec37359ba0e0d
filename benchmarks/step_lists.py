"""How long the sources of op lists take for GPT-2 124M: the arithmetic with its folds, and both traces.

    python benchmarks/step_lists.py [--no_compiled]

CPU seconds of this process, since other programs may share the machine; a trace's include PyTorch's own lazy imports.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import oomph
from oomph.config.schema import TrainConfig

LAYERS = (12, 24, 48, 96)
GOALS_S = {"eager trace": 3.0, "compiled trace": 20.0, "arithmetic and folds": 0.020}
SIZES = itertools.count(16)
KEYS: dict[str, Any] = {"batch_size": 16, "block_size": 1024, "dtype": "bfloat16"}


def spent(work: Callable[[], object], times: int = 1) -> float:
    """CPU seconds of the quickest of some runs."""
    found = []
    for _ in range(times):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def arithmetic(layers: int, compile_: bool) -> Callable[[], object]:
    """A whole plan by arithmetic: both steps' lists, memory, allocator, time, money.

    Of another batch size each time, for a plan that is asked for again is partly remembered.
    """
    keys = KEYS | {"n_layer": layers, "compile": compile_}
    return lambda: oomph.plan(keys | {"batch_size": next(SIZES)}, "RTX 4090")


def traces() -> dict[str, Callable[[], object]]:
    """GPT-2 124M's own model, eager and compiled, on fake tensors."""
    import torch
    from torch.nn import functional as F

    from oomph.step.trace.eager.program import trace
    from oomph.step.trace.inductor.program import compiled_run
    from oomph.training.model import GPT

    class ReturnsLogits(GPT):
        """As nanoGPT's step does."""

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            logits = self.lm_head(self.trunk(tokens))
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    config = TrainConfig(**KEYS, return_logits=True, loss_chunk=0, optimizer_loop="fused")
    batch = [torch.zeros(16, 1024, dtype=torch.long) for _ in range(2)]
    return {
        "eager trace": lambda: trace(lambda: ReturnsLogits(config), batch, accumulation=40),
        "compiled trace": lambda: compiled_run(lambda: ReturnsLogits(config), batch, accumulation=40),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no_compiled", action="store_true", help="leave out the compiled trace, which takes longest")
    options = parser.parse_args()
    for compile_ in (False, True):
        how = "compiled" if compile_ else "eager"
        arithmetic(12, compile_)()  # imports
        seconds = {layers: spent(arithmetic(layers, compile_), 5) for layers in LAYERS}
        print(f"plan by arithmetic, {how}: goal {GOALS_S['arithmetic and folds'] * 1e3:.0f} ms at 12 layers")
        for layers, each in seconds.items():
            print(f"  {layers:>3} layers  {each * 1e3:7.1f} ms   {each / layers * 1e3:5.2f} ms a layer")
    for name, work in traces().items():
        if not (options.no_compiled and name == "compiled trace"):
            print(f"{name}: {spent(work):.1f} s, goal {GOALS_S[name]:.0f} s")


if __name__ == "__main__":
    main()
