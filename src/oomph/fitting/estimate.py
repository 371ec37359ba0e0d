"""What a candidate takes, told from models of a few layers: milliseconds where a full simulation takes tens.

A step's time is a sum over blocks, so it is a straight line in the number of blocks and in how many of them are
checkpointed. What is allocated at one moment is such a line too, and the peak is the largest of them: the line of any
one moment, carried on to the full depth, is not above the peak. Compiled, blocks take turns in whose buffers they
reuse, so that the line goes through every second depth, and is only nearly straight: `floor_bytes` is a bound to
within `slack_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import ceil

import msgspec

from oomph.config import TrainConfig
from oomph.devices import Device
from oomph.predict import clock
from oomph.predict.memory import CUDA_ROUNDING_BYTES, find_moment
from oomph.step import gpt
from oomph.step.ops import Phase, Section, Step

SHALLOW = 2  # layers; models of one and two more give the slopes of the time
FEWEST = 2  # blocks that are kept, and that are checkpointed, of models that give the slopes of the memory
SLACK = 1.01  # a compiled step's peak is above its bound divided by this
ENDS_SLACK = 1.1  # where all blocks but one are checkpointed, or all; seen at most: 1.04
KEPT_SLACK = 1.05  # where none is; seen at most: 1.01
BRIEF = 2  # micro-steps that are written out
NOMINAL_FLOPS_PER_S = 1e13  # ranks settings on a card whose rates nobody gave
NOMINAL_LAUNCH_S = 1e-5

replace = msgspec.structs.replace


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
    def peak(self) -> tuple[int, str, str, Phase]:
        """Bytes allocated at the peak, and its section, operation and phase: the moment, whatever the depth."""
        rounding_bytes = 1 if self._on_cpu else CUDA_ROUNDING_BYTES
        peak_bytes, section_index, op_index = find_moment(self._step, rounding_bytes)
        section = self._step.sections[section_index]
        op = section.ops[op_index]
        return peak_bytes, section.name, _from_the_end(op.name, self._config.n_layer), op.phase

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
        """What is allocated at the peak, at least: eager, without fail; compiled, see `slack_of`."""
        sketches, line = self._along(config)
        if len({sketch.peak[1:] for sketch in sketches}) == 1:
            return line([_peak_bytes(sketch) for sketch in sketches])
        # Several moments are no one line; what is there before the step begins is.
        return line([_resident_bytes(sketch) for sketch in sketches])

    def lean_bytes(self, config: TrainConfig) -> int:
        """What is allocated at the peak, nearly, for comparing candidates by it."""
        sketches, line = self._along(config)
        return line([_peak_bytes(sketch) for sketch in sketches])

    def fewest_checkpointed(self, config: TrainConfig, room_bytes: float) -> int:
        """Of a setting that keeps every block: how many must be checkpointed at least, all but the last in question.

        At the moment of its peak a checkpointed block saves what it holds there at most; the weights stay.
        """
        sketches, line = self._along(config)
        if len(sketches) == 1 or len({sketch.peak[1:] for sketch in sketches}) > 1:
            return 0
        peaks, weights = ([figure(each) for each in sketches] for figure in (_peak_bytes, _resident_bytes))
        missing = line(peaks) / slack_of(config) - room_bytes
        held = (peaks[1] - peaks[0] - (weights[1] - weights[0])) / period_of(config)
        if missing <= 0:
            return 0
        return min(config.n_layer, ceil(missing / held)) if held > 0 else config.n_layer

    def _along(self, config: TrainConfig) -> tuple[list[Sketch], Callable[[list[int]], int]]:
        """The small models that tell a config's memory, and the line through their figures to the config itself: from
        the first, so many steps to more kept blocks and so many to more checkpointed ones."""
        period = period_of(config)
        again, kept = config.checkpoint_layers, config.n_layer - config.checkpoint_layers
        few_again, few_kept = _fewest(again, period), _fewest(kept, period)
        shapes, steps = [(few_kept, few_again)], []
        if kept > few_kept:
            shapes.append((few_kept + period, few_again))
            steps.append((kept - few_kept) // period)
        if again > few_again:
            shapes.append((few_kept, few_again + period))
            steps.append((again - few_again) // period)
        models = [replace(config, n_layer=sum(shape), checkpoint_layers=shape[1]) for shape in shapes]

        def line(figures: list[int]) -> int:
            return figures[0] + sum(
                times * (figure - figures[0]) for times, figure in zip(steps, figures[1:], strict=True)
            )

        return [self.exact(each) for each in models], line


def _peak_bytes(sketch: Sketch) -> int:
    return sketch.peak[0]


def _resident_bytes(sketch: Sketch) -> int:
    return sketch.resident_bytes


def slack_of(config: TrainConfig) -> float:
    """By what factor the bound may exceed the peak."""
    if not config.compile:
        return 1.0
    if not config.checkpoint_layers:
        return KEPT_SLACK
    return SLACK if config.n_layer - config.checkpoint_layers >= FEWEST else ENDS_SLACK


def period_of(config: TrainConfig) -> int:
    """After how many blocks a step's memory repeats itself."""
    return 2 if config.compile else 1


def _fewest(blocks: int, period: int) -> int:
    """As many blocks as a small model needs to stand for that many."""
    return blocks if blocks < FEWEST else FEWEST + (blocks - FEWEST) % period


def _is_shallow(config: TrainConfig) -> bool:
    """Whether the config is no deeper than the models its time would be told from."""
    return config.n_layer <= SHALLOW + (2 if config.checkpoint_layers else 1)


def _shallow(config: TrainConfig) -> list[TrainConfig]:
    """Two layers and three; where blocks are checkpointed, also four of which one is, and two are: the first block is
    not like the others, whether it is kept or computed again."""
    base = replace(config, n_layer=SHALLOW, checkpoint_layers=0)
    models = [base, replace(base, n_layer=SHALLOW + 1)]
    again = [replace(base, n_layer=SHALLOW + 2, checkpoint_layers=count) for count in (1, 2)]
    return [*models, *again] if config.checkpoint_layers else models


def _carried_on(config: TrainConfig, figures: list[float]) -> float:
    """Seconds of the shallow models, along a straight line to the config's depth and its checkpointed blocks."""
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
