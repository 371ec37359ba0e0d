"""What a candidate takes, told from models of a few layers: milliseconds where a full simulation takes tens.

A step's time is a sum over blocks, so it is a straight line in the number of blocks and in how many of them are
checkpointed. What is allocated at one moment is such a line too, and the peak is the largest of them: the line of any
one moment, carried on to the full depth, is not above the peak. Compiled, blocks take turns in whose buffers they
reuse, so that the line goes through every second depth, and is only nearly straight: `floor_bytes` is a bound to
within `slack_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil

import msgspec

from oomph.config import TrainConfig
from oomph.devices import Device
from oomph.predict import clock
from oomph.predict.memory import CUDA_ROUNDING_BYTES, find_moment, rounded
from oomph.step import build as steps
from oomph.step.ops import Buffer, Kind, Phase, Section, Step

FEWEST = 2  # blocks that are kept, and that are checkpointed, of models that give the slopes
SLACK = 1.01  # a compiled step's peak is above its bound divided by this
ENDS_SLACK = 1.1  # where all blocks but one are checkpointed, or all; seen at most: 1.04
KEPT_SLACK = 1.05  # where none is; seen at most: 1.01
BRIEF = 2  # micro-steps that are written out
NOMINAL_FLOPS_PER_S = 1e13  # ranks settings on a card whose rates nobody gave
NOMINAL_LAUNCH_S = 1e-5

replace = msgspec.structs.replace


class Sketch:
    """What the micro-steps of one config take, or its whole step. Those after the first are alike, so that two speak
    for any number. It is the same for every GPU but for the seconds."""

    def __init__(self, config: TrainConfig, device: Device, whole: bool) -> None:
        """With `whole`, of the optimizer too."""
        self.config = config
        step = _build(config, device, whole)
        training = [each for each in step.sections if each.ops[0].phase is not Phase.EVAL]
        self._micro_steps: tuple[Section, ...] = tuple(training[:-1])
        if not whole:
            step = Step(step.resident, self._micro_steps)
        self.peak_bytes, section_index, op_index = find_moment(step, _rounding_bytes(device))
        section = step.sections[section_index]
        op = section.ops[op_index]
        # The moment, whatever the depth.
        self.peak_at = (section.name, _from_the_end(op.name, config.n_layer), op.phase)
        self.resident_bytes = _booked_bytes(step.resident, device)  # before the step: weights, the optimizer's state

    def works(self, device: Device) -> list[clock.Work]:
        """What the device has to do in the first micro-step and, where there are several, in a later one."""
        if self._micro_steps:
            self._works = clock.works_of(self._micro_steps, device)
            self._micro_steps = ()  # frees a long list that is no longer needed
        return self._works


class Update:
    """What the optimizer takes, with clipping and whatever the batch."""

    def __init__(self, config: TrainConfig, device: Device) -> None:
        """Found behind an eager micro-step; its time is that under the config."""
        self.config = config
        step = _build(replace(config, compile=False), device, whole=False)
        self.state_bytes = _booked_bytes([each for each in step.resident if each.kind is Kind.OPTIMIZER], device)
        self._works = clock.works_of(step.sections[-1:], device)

    def works(self, _: Device) -> list[clock.Work]:
        """What the device has to do."""
        return self._works


def _build(config: TrainConfig, device: Device, whole: bool) -> Step:
    """The step as a plan has it, or nearly. An evaluation keeps nothing for a backward: it takes less than training."""
    return steps.build(config, device.kind != "cpu", evaluates=False, threads=device.threads, nearly=not whole)


def _rounding_bytes(device: Device) -> int:
    return 1 if device.kind == "cpu" else CUDA_ROUNDING_BYTES


def _booked_bytes(buffers: Iterable[Buffer], device: Device) -> int:
    rounding_bytes = _rounding_bytes(device)
    return sum(rounded(buffer.bytes, rounding_bytes) for buffer in buffers)


def _from_the_end(name: str, layers: int) -> str:
    """An operation's name with its block counted from the last one: the same moment at any depth."""
    return ".".join([str(int(part) - layers) if part.isdecimal() else part for part in name.split(".")])


class Small(msgspec.Struct, frozen=True):
    """A model of few layers, which speaks for deeper ones."""

    config: TrainConfig
    peak_at: tuple[str, str, Phase]
    peak_bytes: int
    resident_bytes: int


class Estimator:
    """Sketches of configs on one device, each drawn once; those drawn for another GPU serve too."""

    def __init__(self, device: Device, other: Estimator | None = None) -> None:
        self.device = device
        alike = other is not None and (other.device.kind == "cpu") == (device.kind == "cpu")
        self._sketches: dict[tuple[TrainConfig, bool], Sketch] = other._sketches if other and alike else {}
        self._updates: dict[TrainConfig, Update] = other._updates if other and alike else {}
        self._seconds: dict[Sketch | Update, list[float]] = {}

    def exact(self, config: TrainConfig) -> Sketch:
        """The step at full depth."""
        return self._sketch(config, whole=True)

    def exact_s(self, config: TrainConfig) -> float:
        """Seconds a step, as a plan has them."""
        return self._step_s(self.exact(config), config)

    def _sketch(self, config: TrainConfig, whole: bool) -> Sketch:
        brief = min(config.gradient_accumulation_steps, BRIEF * config.world_size)
        config = replace(config, gradient_accumulation_steps=brief, expandable_segments=False)  # the same operations
        sketch = self._sketches.get((config, whole))
        if sketch is None:
            sketch = self._sketches[config, whole] = Sketch(config, self.device, whole)
        return sketch

    def _micro_steps_of(self, config: TrainConfig) -> Sketch:
        """A sketch of the micro-steps alone: no optimizer changes them, so that one serves them all."""
        return self._sketch(replace(config, optimizer="adamw", optimizer_loop="fused"), whole=False)

    def _update(self, config: TrainConfig) -> Update:
        one = {"batch_size": 1, "gradient_accumulation_steps": config.world_size}
        alike = replace(config, **one, loss_chunk=0, checkpoint_layers=0, expandable_segments=False)
        update = self._updates.get(alike)
        if update is None:
            update = self._updates[alike] = Update(alike, self.device)
        return update

    def _step_s(self, sketch: Sketch, config: TrainConfig) -> float:
        first_s, *later_s = self._sections_s(sketch)
        count = max(1, config.gradient_accumulation_steps // config.world_size)
        return first_s + (count - 1) * (later_s or [first_s])[0] + self._sections_s(self._update(config))[0]

    def _sections_s(self, part: Sketch | Update) -> list[float]:
        """Likely seconds of each section, run once."""
        seconds = self._seconds.get(part)
        if seconds is None:
            works = part.works(self.device)
            likely = clock.likely_sections_s(works, part.config, self.device)
            seconds = self._seconds[part] = likely if likely is not None else [_nominal_s(each) for each in works]
        return seconds

    def _small(self, config: TrainConfig) -> Small:
        sketch, update = self._micro_steps_of(config), self._update(config)
        more = update.state_bytes - self._update(sketch.config).state_bytes  # than the sketch's optimizer keeps
        return Small(config, sketch.peak_at, sketch.peak_bytes + more, sketch.resident_bytes + more)

    def step_s(self, config: TrainConfig) -> float:
        """Seconds a step, nearly."""
        models, line = self._along(config)
        return line([self._step_s(self._micro_steps_of(model.config), model.config) for model in models])

    def floor_bytes(self, config: TrainConfig) -> float:
        """What is allocated at the peak, at least: eager, without fail; compiled, see `slack_of`."""
        models, line = self._along(config)
        if len({model.peak_at for model in models}) == 1 and not _levels_off(config):
            return line([model.peak_bytes for model in models])
        # Several moments are no one line; what is there before the step begins is.
        return line([model.resident_bytes for model in models])

    def lean_bytes(self, config: TrainConfig) -> float:
        """What is allocated at the peak, nearly, for comparing candidates by it."""
        models, line = self._along(config)
        return line([model.peak_bytes for model in models])

    def fewest_checkpointed(self, config: TrainConfig, room_bytes: float) -> int:
        """Of a setting that keeps every block: how many must be checkpointed at least, all but the last in question.

        At the moment of its peak a checkpointed block saves what it holds there at most; the weights stay.
        """
        models, line = self._along(config)
        if len(models) == 1 or len({model.peak_at for model in models}) > 1:
            return 0
        missing = line([model.peak_bytes for model in models]) / slack_of(config) - room_bytes
        few, more = models
        held = more.peak_bytes - few.peak_bytes - (more.resident_bytes - few.resident_bytes)
        if missing <= 0:
            return 0
        return min(config.n_layer, ceil(missing / held * period_of(config))) if held > 0 else config.n_layer

    def _along(self, config: TrainConfig) -> tuple[list[Small], Callable[[list[float]], float]]:
        """The small models that tell what a config takes, and the line through their figures to the config itself: from
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

        def line(figures: list[float]) -> float:
            return figures[0] + sum(
                times * (figure - figures[0]) for times, figure in zip(steps, figures[1:], strict=True)
            )

        return [self._small(each) for each in models], line


def slack_of(config: TrainConfig) -> float:
    """By what factor the bound may exceed the peak."""
    if not config.compile:
        return 1.0
    if not config.checkpoint_layers:
        return KEPT_SLACK
    return SLACK if config.n_layer - config.checkpoint_layers >= FEWEST else ENDS_SLACK


def _levels_off(config: TrainConfig) -> bool:
    """Whether a deep model's peak may be far below the line: compiled, of scores that checkpointed blocks compute again
    only so many are kept for the next to overwrite."""
    return config.compile and config.checkpoint_layers > 0 and config.attention == "math"


def period_of(config: TrainConfig) -> int:
    """After how many blocks a step's memory repeats itself."""
    return 2 if config.compile else 1


def _fewest(blocks: int, period: int) -> int:
    """As many blocks as a small model needs to stand for that many."""
    return blocks if blocks < FEWEST else FEWEST + (blocks - FEWEST) % period


def _nominal_s(work: clock.Work) -> float:
    """Seconds on a card of no importance."""
    return sum(count * (op.flops / NOMINAL_FLOPS_PER_S + NOMINAL_LAUNCH_S) for _, op, count in work.ops)
