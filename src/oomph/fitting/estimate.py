"""What a candidate takes, told from models of two to four layers: milliseconds where a full simulation takes tens.

A step's time is a sum over blocks, so it is a straight line in the number of blocks and in how many of them are
checkpointed. What is allocated at one moment is such a line too, and the peak is the largest of them: the line of any
one moment, carried on to the full depth, is never above the peak. That makes `floor_bytes` a safe bound: what
exceeds the card by it exceeds the card.
"""

from __future__ import annotations

from functools import cached_property
from typing import TypeVar

import msgspec

from oomph.config import TrainConfig
from oomph.devices import Device
from oomph.predict import clock
from oomph.predict.memory import CUDA_ROUNDING_BYTES, find_moment
from oomph.step import gpt
from oomph.step.ops import Section, Step

SHALLOW = 2  # layers; models of one and two more give the slopes
BRIEF = 2  # micro-steps that are written out
NOMINAL_FLOPS_PER_S = 1e13  # ranks settings on a card whose rates nobody gave
NOMINAL_LAUNCH_S = 1e-5

replace = msgspec.structs.replace
Figure = TypeVar("Figure", int, float)


class Sketch:
    """The step of one config: its time, its peak and where that is, each worked out when it is first asked for."""

    def __init__(self, config: TrainConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._on_cpu = clock.device.kind == "cpu"

    @cached_property
    def step_s(self) -> float:
        """The likely seconds, as a plan has them."""
        return self._clock.step_s(self._config)

    @cached_property
    def peak(self) -> tuple[int, str, str]:
        """Bytes allocated at the peak, and its section and operation: the moment, whatever the depth."""
        rounding_bytes = 1 if self._on_cpu else CUDA_ROUNDING_BYTES
        peak_bytes, section_index, op_index = find_moment(self._step, rounding_bytes)
        section = self._step.sections[section_index]
        return peak_bytes, section.name, _from_the_end(section.ops[op_index].name, self._config.n_layer)

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes allocated before the step begins: weights, the optimizer's state."""
        return sum(buffer.bytes for buffer in self._step.resident)

    @cached_property
    def _step(self) -> Step:
        """The step with two micro-steps at most: those after the first are alike."""
        return gpt.build(_briefly(self._config), cuda=not self._on_cpu)


class Clock:
    """Seconds of steps on one device. Micro-steps do not depend on the optimizer, nor its update on the batch: each is
    timed once."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._micro_steps: dict[TrainConfig, list[float]] = {}
        self._updates: dict[TrainConfig, float] = {}

    def step_s(self, config: TrainConfig) -> float:
        """The likely seconds of one optimizer step."""
        alike = replace(_briefly(config), optimizer="adamw", optimizer_loop="fused")
        micro_steps = self._micro_steps.get(alike)
        if micro_steps is None:
            micro_steps = self._micro_steps[alike] = self._timed(alike, alike)[:-1]
        count = max(1, config.gradient_accumulation_steps // config.world_size)
        return micro_steps[0] + (count - 1) * micro_steps[-1] + self._update_s(config)

    def _update_s(self, config: TrainConfig) -> float:
        """Of the optimizer with what comes before it: found behind the smallest eager micro-step."""
        alike = replace(
            config, batch_size=1, gradient_accumulation_steps=config.world_size, loss_chunk=0, checkpoint_layers=0
        )
        seconds = self._updates.get(alike)
        if seconds is None:
            seconds = self._updates[alike] = self._timed(replace(alike, compile=False), alike)[-1]
        return seconds

    def _timed(self, config: TrainConfig, as_if: TrainConfig) -> list[float]:
        """Seconds of each section of a config's step, under the host's costs of another."""
        step = gpt.build(config, cuda=self.device.kind != "cpu", evaluates=False)
        seconds = []
        for section in step.sections:
            alone = Step((), (Section(section.name, section.ops),))
            times = clock.likely_seconds(alone, as_if, self.device)
            seconds.append(times.step_s if times is not None else _nominal_s(alone))
        return seconds


def _from_the_end(name: str, layers: int) -> str:
    """An operation's name with its block counted from the last one: the same moment at any depth."""
    room, _, rest = name.partition(".")
    index, _, inside = rest.partition(".")
    return f"{room}.{int(index) - layers}.{inside}" if room == "h" and index.isdecimal() else name


def _briefly(config: TrainConfig) -> TrainConfig:
    """The config with no more than two micro-steps to a step."""
    most = BRIEF * config.world_size
    return replace(config, gradient_accumulation_steps=most) if config.gradient_accumulation_steps > most else config


class Estimator:
    """Sketches of configs on one device, each drawn once."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._clock = Clock(device)
        self._known: dict[TrainConfig, Sketch] = {}

    def exact(self, config: TrainConfig) -> Sketch:
        """The step at full depth."""
        config = replace(config, expandable_segments=False)  # the operations are the same
        sketch = self._known.get(config)
        if sketch is None:
            sketch = self._known[config] = Sketch(config, self._clock)
        return sketch

    def step_s(self, config: TrainConfig) -> float:
        """Seconds a step, nearly: the head and the ends from a shallow model, the blocks by their slope."""
        if _is_shallow(config):
            return self.exact(config).step_s
        return _carried_on(config, [self.exact(each).step_s for each in _shallow(config)])

    def floor_bytes(self, config: TrainConfig) -> int:
        """What is allocated at the peak, at least."""
        if _is_shallow(config):
            return self.exact(config).peak[0]
        sketches = [self.exact(each) for each in _shallow(config)]
        if len({sketch.peak[1:] for sketch in sketches}) == 1:
            return self.lean_bytes(config)
        # Several moments are no one line; what is there before the step begins is.
        base, deeper = (sketch.resident_bytes for sketch in sketches[:2])
        return base + (config.n_layer - SHALLOW) * (deeper - base)

    def lean_bytes(self, config: TrainConfig) -> int:
        """What is allocated at the peak, nearly, for comparing candidates by it."""
        if _is_shallow(config):
            return self.exact(config).peak[0]
        return _carried_on(config, [self.exact(each).peak[0] for each in _shallow(config)])


def _is_shallow(config: TrainConfig) -> bool:
    """Whether the config is no deeper than the models it would be told from."""
    return config.n_layer <= SHALLOW + (2 if config.checkpoint_layers else 1)


def _shallow(config: TrainConfig) -> list[TrainConfig]:
    """Two layers and three; where blocks are checkpointed, also four of which one is, and two are: the first block is
    not like the others, whether it is kept or computed again."""
    base = replace(config, n_layer=SHALLOW, checkpoint_layers=0)
    models = [base, replace(base, n_layer=SHALLOW + 1)]
    again = [replace(base, n_layer=SHALLOW + 2, checkpoint_layers=count) for count in (1, 2)]
    return [*models, *again] if config.checkpoint_layers else models


def _carried_on(config: TrainConfig, figures: list[Figure]) -> Figure:
    """What the shallow models take, along a straight line to the config's depth and its checkpointed blocks."""
    base, deeper = figures[:2]
    if not config.checkpoint_layers:
        return base + (config.n_layer - SHALLOW) * (deeper - base)
    one, two = figures[2:]
    return one + (config.n_layer - SHALLOW - 2) * (deeper - base) + (config.checkpoint_layers - 1) * (two - one)


def _nominal_s(step: Step) -> float:
    """Seconds on a card of no importance."""
    total = 0.0
    for section in step.sections:
        flops = sum(op.times * op.flops for op in section.ops)
        total += section.times * (flops / NOMINAL_FLOPS_PER_S + sum(op.times for op in section.ops) * NOMINAL_LAUNCH_S)
    return total
