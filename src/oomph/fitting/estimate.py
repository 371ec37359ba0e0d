"""What a candidate takes, told from models of two and three layers: milliseconds where a full simulation takes tens.

A step's time is a sum over blocks, so it is a straight line in the number of blocks and in how many of them are
checkpointed. What is allocated at one moment is such a line too, and the peak is the largest of them: the line of any
one moment, carried on to the full depth, is never above the peak. That makes `floor_bytes` a safe bound: what
exceeds the card by it exceeds the card.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from oomph.config import TrainConfig
from oomph.devices import Device
from oomph.predict import clock
from oomph.predict.memory import CUDA_ROUNDING_BYTES, find_peak
from oomph.step import gpt
from oomph.step.ops import Step

SHALLOW = 2  # layers; one more, and one of those checkpointed, give the slopes
NOMINAL_FLOPS_PER_S = 1e13  # ranks settings on a card whose rates nobody gave
NOMINAL_LAUNCH_S = 1e-5

replace = msgspec.structs.replace


class Sketch:
    """The step of one config: its time, its peak and where that is, each worked out when it is first asked for."""

    def __init__(self, config: TrainConfig, device: Device) -> None:
        self._config = config
        self._device = device
        self._on_cpu = device.kind == "cpu"
        self._step = gpt.build(config, cuda=not self._on_cpu)

    @cached_property
    def step_s(self) -> float:
        """The likely seconds, as a plan has them."""
        times = clock.predict_times(self._step, self._config, self._device)
        return times.likely.step_s if times is not None else _nominal_s(self._step)

    @cached_property
    def peak(self) -> tuple[int, str, str]:
        """Bytes allocated at the peak, and its section and operation: the moment, whatever the depth."""
        peak = find_peak(self._step, 1 if self._on_cpu else CUDA_ROUNDING_BYTES)
        return peak.allocated_bytes, peak.section.name, peak.op.name

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes allocated before the step begins: weights, the optimizer's state."""
        return sum(buffer.bytes for buffer in self._step.resident)


class Estimator:
    """Sketches of configs on one device, each drawn once."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._known: dict[TrainConfig, Sketch] = {}

    def exact(self, config: TrainConfig) -> Sketch:
        """The step at full depth."""
        config = replace(config, expandable_segments=False)  # the operations are the same
        sketch = self._known.get(config)
        if sketch is None:
            sketch = self._known[config] = Sketch(config, self.device)
        return sketch

    def step_s(self, config: TrainConfig) -> float:
        """Seconds a step, nearly: the head and the ends from a shallow model, the blocks by their slope."""
        if config.n_layer <= SHALLOW + 1:
            return self.exact(config).step_s
        base, deeper, checkpointed = (self.exact(each).step_s for each in _shallow(config))
        depth, again = config.n_layer - SHALLOW, config.checkpoint_layers
        return base + depth * (deeper - base) + again * (checkpointed - deeper)

    def floor_bytes(self, config: TrainConfig) -> int:
        """What is allocated at the peak, at least."""
        if config.n_layer <= SHALLOW + 1:
            return self.exact(config).peak[0]
        sketches = [self.exact(each) for each in _shallow(config)]
        if len({sketch.peak[1:] for sketch in sketches}) == 1:
            return self.lean_bytes(config)
        # Several moments are no one line; what is there before the step begins is.
        base, deeper = (sketch.resident_bytes for sketch in sketches[:2])
        return base + (config.n_layer - SHALLOW) * (deeper - base)

    def lean_bytes(self, config: TrainConfig) -> int:
        """What is allocated at the peak, nearly, for comparing candidates by it."""
        if config.n_layer <= SHALLOW + 1:
            return self.exact(config).peak[0]
        base, deeper, checkpointed = (self.exact(each).peak[0] for each in _shallow(config))
        depth, again = config.n_layer - SHALLOW, config.checkpoint_layers
        return base + depth * (deeper - base) + again * (checkpointed - deeper)


def _shallow(config: TrainConfig) -> tuple[TrainConfig, TrainConfig, TrainConfig]:
    """Two layers, three layers, and three of which one is checkpointed: the first block is not like the others."""
    return (
        replace(config, n_layer=SHALLOW, checkpoint_layers=0),
        replace(config, n_layer=SHALLOW + 1, checkpoint_layers=0),
        replace(config, n_layer=SHALLOW + 1, checkpoint_layers=1),
    )


def _nominal_s(step: Step) -> float:
    """Seconds on a card of no importance."""
    total = 0.0
    for section in step.sections:
        flops = sum(op.flops for op in section.ops)
        total += section.times * (flops / NOMINAL_FLOPS_PER_S + len(section.ops) * NOMINAL_LAUNCH_S)
    return total
