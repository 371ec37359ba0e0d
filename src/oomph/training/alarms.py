"""Alarms during a run: a loss or a gradient norm far above its usual level. They are reported, and change nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MEMORY = 0.98  # decay of the moving mean and deviation: they follow the last 50 steps
_WARM_UP = 100  # steps until both are known
_DEVIATIONS = 8.0  # above the mean: batches differ by 2 or 3
_LEAST_RISE = 0.1  # of the mean, if steps hardly differ
_PAUSE = 100  # steps between two alarms for one figure


@dataclass
class Level:
    """The usual level of a figure, and the steps since its last alarm. A checkpoint holds it."""

    mean: float = 0.0
    variance: float = 0.0
    steps: int = 0
    told: int = _PAUSE

    def is_spike(self, value: float) -> bool:
        """Take the next value; returns whether it is far above the usual level and worth reporting."""
        limit = self.mean + max(_DEVIATIONS * math.sqrt(self.variance), _LEAST_RISE * abs(self.mean))
        spike = self.steps >= _WARM_UP and value > limit
        memory = min(_MEMORY, self.steps / (self.steps + 1))
        away = (min(value, limit) if spike else value) - self.mean  # one spike does not become the usual level
        self.mean += (1 - memory) * away
        self.variance = memory * (self.variance + (1 - memory) * away * away)
        self.steps += 1
        self.told = 0 if spike and self.told >= _PAUSE else self.told + 1
        return self.told == 0

    def state(self) -> list[float]:
        """The state as plain numbers for a checkpoint."""
        return [self.mean, self.variance, self.steps, self.told]


class Alarms:
    """Alarms for the loss and the gradient norm of a run."""

    def __init__(self, state: dict[str, list[float]]) -> None:
        """`state` is that of an earlier process, or empty."""
        self.levels = {name: Level() for name in ("loss", "gradient norm")}
        for name, (mean, variance, steps, told) in state.items():
            self.levels[name] = Level(mean, variance, int(steps), int(told))

    def check(self, loss: float, grad_norm: float) -> list[str]:
        """The messages to report about a step."""
        found = {"loss": loss, "gradient norm": grad_norm}
        usual = {name: level.mean for name, level in self.levels.items()}
        return [
            f"the {name} is {value:.4g}, far above its usual {usual[name]:.4g}"
            for name, value in found.items()
            if math.isfinite(value) and self.levels[name].is_spike(value)
        ]

    def state(self) -> dict[str, list[float]]:
        """The state as plain values for a checkpoint."""
        return {name: level.state() for name, level in self.levels.items()}
