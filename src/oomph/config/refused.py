"""Settings that a plan can price and no program can run."""

from __future__ import annotations

from oomph.config.load import LoadedConfig
from oomph.errors import Problem


def refused(loaded: LoadedConfig, on_cpu: bool) -> list[Problem]:
    """Every reason why the config's trainer will not run it on this kind of device."""
    config, problems = loaded.config, []

    def add(key: str, what: str, allowed: str) -> None:
        where = loaded.sources[key] if loaded.said(key) else key
        problems.append(Problem(where, what, found=str(getattr(config, key)), allowed=allowed))

    if config.trainer == "oomph" and config.return_logits:
        add("return_logits", "oomph train never returns logits", "return_logits = False")
    if config.dtype == "float16" and not config.autocast:
        what = "float16 weights cannot be trained: their gradients underflow"
        add("dtype", what, "autocast = True, or dtype = 'bfloat16'")
    if on_cpu and config.attention == "efficient":
        add("attention", "PyTorch has no memory-efficient attention on a CPU", "flash or math")
    return problems
