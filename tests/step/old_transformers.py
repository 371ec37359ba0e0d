"""Small models of the transformers on PYTHONPATH: traced, run for real, and traced as compiled. Prints JSON.

PYTHONPATH=<folder of that transformers>:src:tests/step python tests/step/old_transformers.py llama gpt2
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import transformers
from hf_models import Hf, changes, peak
from torch import Tensor, nn

from oomph.step.ops import Kernel, Step
from oomph.step.trace.eager.program import trace
from oomph.step.trace.inductor.program import compiled

PRECISIONS = ("float32", "autocast")


class Called(nn.Module):
    """A model called with ids and labels in order."""

    def __init__(self, model: Hf) -> None:
        super().__init__()
        self.model = model.build()

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        result: Any = self.model(input_ids=ids, labels=labels)
        return result.logits, result.loss


def facts(model: Hf) -> dict[str, Any]:
    """Peaks in bytes, traced and seen by the profiler; of a card's step, attention kernels and number of gradients."""
    found: dict[str, Any] = {}
    for precision in PRECISIONS:
        seen = peak(changes(model.traced(cuda=False, precision=precision, micro_steps=2)))
        found[precision] = (seen, peak(model.profiled(precision, micro_steps=2)))
    batch = tuple(model.inputs().values())
    for make, more in ((trace, {}), (compiled, {"evaluation": False})):
        step: Step = make(lambda: Called(model), batch, **more)  # type: ignore[operator]
        names = {op.name.rpartition(".")[2].strip("_") for op in step.sections[0].ops if op.kernel is Kernel.ATTENTION}
        found[make.__name__] = sorted(names)
        added = {op.name for op in step.sections[1].ops if op.name.endswith(".grad")}
        found[f"{make.__name__} gradients"] = len(added)
    found["parameters"] = len(list(model.build().parameters()))
    return found


def main() -> None:
    """Facts of each family asked for."""
    warnings.simplefilter("ignore")
    models = {family: Hf(family, kv_heads=None if family == "gpt2" else 2) for family in sys.argv[1:]}
    found = {family: facts(model) for family, model in models.items()}
    print(json.dumps({"version": transformers.__version__, "families": found}))


if __name__ == "__main__":
    main()
