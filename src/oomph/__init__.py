"""oomph: what training a GPT needs, before it runs.

    import oomph
    plan = oomph.plan("gpt2", "RTX 4070")
    plan.memory.fits, plan.time.hours

Only `trace` and `train` import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from oomph.runs.compare import compare as compare
    from oomph.runs.explain import explain as explain
    from oomph.step.trace.eager import trace as trace
    from oomph.training.run import train as train

__version__ = "0.1.0"

# Public names and where they live: imported when they are first used, so that `import oomph` takes no time.
_HOMES = {
    "Device": ("oomph.devices", "Device"),
    "Fit": ("oomph.fitting.result", "Fit"),
    "InputError": ("oomph.errors", "InputError"),
    "Plan": ("oomph.planning.plan", "Plan"),
    "TrainConfig": ("oomph.config", "TrainConfig"),
    "check": ("oomph.checking.check", "check"),
    "fit": ("oomph.fitting.fit", "fit"),
    "compare": ("oomph.runs.compare", "compare"),
    "explain": ("oomph.runs.explain", "explain"),
    "find_gpu": ("oomph.devices", "find"),
    "load_config": ("oomph.config", "load"),
    "plan": ("oomph.planning.plan", "plan"),
    "train": ("oomph.training.run", "train"),  # imports torch
    "trace": ("oomph.step.trace.eager", "trace"),  # imports torch
}
__all__ = [
    "Device",
    "Fit",
    "InputError",
    "Plan",
    "TrainConfig",
    "__version__",
    "check",
    "compare",
    "explain",
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
