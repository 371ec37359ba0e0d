"""`oomph train --find_lr`: a learning rate from a minute of training at rates that rise from step to step.

The range test of Smith (2017, "Cyclical Learning Rates for Training Neural Networks"): the loss falls while the rate is
too small, fastest near a good one, and rises once it is too large. Like fastai's `lr_find`, it proposes a tenth of the
rate at the lowest smoothed loss. Nothing is written, and the run itself begins with fresh weights.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from oomph import config as configs
from oomph.planning.plan import Config
from oomph.training.ranks.group import Ranks
from oomph.training.run import build
from oomph.training.setup import set_up
from oomph.training.start import Options, find_start
from oomph.training.trainer import NotFiniteError, Trainer

SECONDS = 60.0
LOWEST, HIGHEST = 1e-2, 1e2  # times the config's learning rate
FEWEST, MOST = 30, 100  # steps
_SMOOTHING = 0.9
_DIVERGED = 1.5  # times the lowest loss
_BELOW = 10.0  # the rate at the lowest loss is this many times the proposed one


@dataclass(frozen=True)
class FoundRate:
    """The losses of the test, and the keys it proposes."""

    rates: list[float]  # learning_rate at each step
    losses: list[float]  # of those steps, smoothed
    keys: dict[str, float]  # learning_rate, and Muon's own if it has one
    diverged: bool  # whether the loss rose again; if not, the proposal is only a lower bound


def find_lr(config: Config = None, options: Options | None = None, seconds: float | None = None) -> FoundRate:
    """Train for about `seconds` at rising rates. Raises `InputError` as `train` does."""
    options = options or Options(measure=False)
    start = find_start(configs.as_loaded(config), options)
    ranks = Ranks()
    setup = set_up(start.loaded, ranks, measure=False)
    trainer = build(setup, start.data(setup.loaded), ranks, start)
    return sweep(trainer, SECONDS if seconds is None else seconds)


def sweep(trainer: Trainer, seconds: float) -> FoundRate:
    """The test itself, on a trainer that has done no step yet."""
    config, top = trainer.config, trainer.config.learning_rate
    trainer.rate_at = lambda _: LOWEST * top
    trainer.train_step()  # compiles, or touches memory for the first time
    began = time.perf_counter()
    trainer.train_step()
    steps = round(min(MOST, max(FEWEST, seconds / (time.perf_counter() - began))))
    first = trainer.step
    trainer.rate_at = lambda step: top * LOWEST * (HIGHEST / LOWEST) ** ((step - first) / (steps - 1))
    rates: list[float] = []
    losses: list[float] = []
    diverged = False
    average = 0.0
    while len(rates) < steps and not diverged:
        try:
            result = trainer.train_step()
        except NotFiniteError:
            diverged = True
            break
        average = _SMOOTHING * average + (1 - _SMOOTHING) * result.loss
        rates.append(result.learning_rate)
        losses.append(average / (1 - _SMOOTHING ** len(rates)))
        diverged = losses[-1] > _DIVERGED * min(losses)
    best = rates[losses.index(min(losses))] / _BELOW if rates else LOWEST * top
    keys = {"learning_rate": rounded(best)}
    if config.optimizer == "muon" and config.matrix_lr is not None:
        keys["matrix_lr"] = rounded(config.matrix_lr * best / top)
    return FoundRate(rates, losses, keys, diverged or losses[-1] > 1.05 * min(losses))


def rounded(rate: float) -> float:
    """The rate to two digits: the test is no more exact than that."""
    return float(f"{rate:.1e}") if math.isfinite(rate) else rate


def lines(found: FoundRate, asked: dict[str, Any]) -> list[str]:
    """The lines that the command prints: losses at a few rates, and the keys to use."""
    every = max(1, len(found.rates) // 8)
    rows = [f"{rate:10.1e}  {loss:8.4f}" for rate, loss in list(zip(found.rates, found.losses, strict=True))[::every]]
    keys = " ".join(f"--{key}={value:g}" for key, value in found.keys.items())
    now = " ".join(f"--{key}={asked[key]:g}" for key in found.keys)
    rose = "" if found.diverged else "; the loss never rose, so larger ones may do as well"
    return ["learning_rate  loss, smoothed", *rows, f"→ {keys}  (the config has {now}){rose}"]


def asked_keys(config: Config) -> dict[str, Any]:
    """The config's own rates, for `lines`."""
    found: dict[str, Any] = msgspec.to_builtins(configs.as_loaded(config).config)
    return found
