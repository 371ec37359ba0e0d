"""oomph: what training a GPT needs, before it runs.

    import oomph
    plan = oomph.plan("gpt2", gpu="RTX 4070", batch_size=8)
    plan.memory.fits, plan.time.hours

    plan(config, gpu, **keys)    what a run needs: memory, hours, money       -> Plan
    fit(config, gpu, **keys)     the settings that fit the card, ranked       -> Fit
    explain(log, gpu)            what happened in a run, and what would help  -> Explanation
    compare([log, log])          runs side by side                            -> Comparison
    check(config, **keys)        a few real steps held against the plan       -> Check
    train(config)                a Plan carried out
    trace(model, batch)          any nn.Module as the operations of its step

Results have `to_dict()`, the JSON of the command line, and show themselves as reports in a notebook. Only `check`,
`trace` and `train` import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomph.checking.check import Check as Check
    from oomph.checking.check import check as check
    from oomph.config import TrainConfig as TrainConfig
    from oomph.config import load as load_config
    from oomph.devices import Device as Device
    from oomph.devices import find as find_gpu
    from oomph.errors import InputError as InputError
    from oomph.fitting.fit import fit as fit
    from oomph.fitting.result import Fit as Fit
    from oomph.planning.plan import Plan as Plan
    from oomph.planning.plan import plan as plan
    from oomph.report.failures import explain_failures as explain_failures
    from oomph.runs.compare import Comparison as Comparison
    from oomph.runs.compare import compare as compare
    from oomph.runs.explain import Explanation as Explanation
    from oomph.runs.explain import explain as explain
    from oomph.step.trace.eager.program import trace as trace
    from oomph.training.run import train as train

__version__ = "0.1.0"

# Public names and where they live: imported when they are first used, so that `import oomph` takes no time.
_HOMES = {
    "Check": ("oomph.checking.check", "Check"),
    "Comparison": ("oomph.runs.compare", "Comparison"),
    "Explanation": ("oomph.runs.explain", "Explanation"),
    "Device": ("oomph.devices", "Device"),
    "Fit": ("oomph.fitting.result", "Fit"),
    "InputError": ("oomph.errors", "InputError"),
    "Plan": ("oomph.planning.plan", "Plan"),
    "TrainConfig": ("oomph.config", "TrainConfig"),
    "check": ("oomph.checking.check", "check"),
    "fit": ("oomph.fitting.fit", "fit"),
    "compare": ("oomph.runs.compare", "compare"),
    "explain": ("oomph.runs.explain", "explain"),
    "explain_failures": ("oomph.report.failures", "explain_failures"),
    "find_gpu": ("oomph.devices", "find"),
    "load_config": ("oomph.config", "load"),
    "plan": ("oomph.planning.plan", "plan"),
    "train": ("oomph.training.run", "train"),  # imports torch
    "trace": ("oomph.step.trace.eager.program", "trace"),  # imports torch
}
__all__ = [
    "Check",
    "Comparison",
    "Device",
    "Explanation",
    "Fit",
    "InputError",
    "Plan",
    "TrainConfig",
    "__version__",
    "check",
    "compare",
    "explain",
    "explain_failures",
    "find_gpu",
    "fit",
    "load_config",
    "plan",
    "trace",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'oomph' has no attribute '{name}'")
    module, attribute = _HOMES[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
