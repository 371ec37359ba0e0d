"""Estimates of a candidate's memory and time from models of a few layers: milliseconds instead of tens of them.

A step's time is a sum over blocks, so it is a straight line in the number of blocks and in how many of them are
checkpointed. The memory allocated at one moment is such a line too, and the peak is the largest of them: the line of
any one moment, extended to the full depth, is not above the peak. Compiled blocks alternate in whose buffers they
reuse, so that the line goes through every second depth, and is only nearly straight: `floor_bytes` is a bound to
within `slack_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil

import msgspec

from oomph.config import TrainConfig
from oomph.devices import Device
from oomph.planning.plan import at_usual_length
from oomph.predict import clock
from oomph.predict.memory import CUDA_ROUNDING_BYTES, find_moment, rounded
from oomph.step import build as steps
from oomph.step.ops import Buffer, Kind, Phase, Section, Step
from oomph.step.trace.cache import OwnModel

FEWEST = 2  # kept blocks, and checkpointed ones, in the models that give the slopes
SLACK = 1.01  # a compiled step's peak is above its bound divided by this
ENDS_SLACK = 1.1  # if all blocks or all but one are checkpointed; largest seen: 1.04
KEPT_SLACK = 1.05  # if none is; largest seen: 1.01
BRIEF = 2  # micro-steps that are simulated
NOMINAL_FLOPS_PER_S = 1e13  # ranks settings on a card with unknown rates
NOMINAL_LAUNCH_S = 1e-5

replace = msgspec.structs.replace


class Sketch:
    """The memory and time of one config's micro-steps, or of its whole step. Micro-steps after the first are alike,
    so that two stand for any number. Only the seconds differ between GPUs."""

    def __init__(self, config: TrainConfig, device: Device, whole: bool, own: OwnModel | None = None) -> None:
        """`whole` includes the optimizer; `own` is traced in place of the config's model."""
        self.config = config
        step = _build(config, device, whole, own)
        training = [each for each in step.sections if each.ops[0].phase is not Phase.EVAL]
        self._micro_steps: tuple[Section, ...] = tuple(training[:-1])
        if not whole:
            step = Step(step.resident, self._micro_steps)
        self.peak_bytes, section_index, op_index = find_moment(step, _rounding_bytes(device))
        section = step.sections[section_index]
        op = section.ops[op_index]
        # Identifies the moment at any depth.
        self.peak_at = (section.name, _from_the_end(op.name, config.n_layer), op.phase)
        self.resident_bytes = _booked_bytes(step.resident, device)  # before the step: weights, the optimizer's state

    def works(self, device: Device) -> list[clock.Work]:
        """The device's work in the first micro-step and, if there are several, in a later one."""
        if self._micro_steps:
            self._works = clock.works_of(self._micro_steps, device)
            self._micro_steps = ()  # frees a long list that is no longer needed
        return self._works


class Update:
    """The optimizer's memory and time, with clipping; they do not depend on the batch."""

    def __init__(self, config: TrainConfig, device: Device, own: OwnModel | None = None) -> None:
        """Taken from a step with an eager micro-step, unless the model is traced; its time is for the config."""
        self.config = config
        step = _build(config if own is not None else replace(config, compile=False), device, False, own)
        self.state_bytes = _booked_bytes([each for each in step.resident if each.kind is Kind.OPTIMIZER], device)
        self._works = clock.works_of(step.sections[-1:], device)

    def works(self, _: Device) -> list[clock.Work]:
        """The device's work."""
        return self._works


def _build(config: TrainConfig, device: Device, whole: bool, own: OwnModel | None) -> Step:
    """The step nearly as in a plan. It omits evaluation, which keeps nothing for a backward and so takes less."""
    on_gpu = device.kind != "cpu"
    return steps.build(config, on_gpu, evaluates=False, threads=device.threads, nearly=not whole, own=own)


def _rounding_bytes(device: Device) -> int:
    return 1 if device.kind == "cpu" else CUDA_ROUNDING_BYTES


def _booked_bytes(buffers: Iterable[Buffer], device: Device) -> int:
    rounding_bytes = _rounding_bytes(device)
    return sum(rounded(buffer.bytes, rounding_bytes) for buffer in buffers)


def _from_the_end(name: str, layers: int) -> str:
    """An operation's name with its block counted from the last one: the same moment at any depth."""
    return ".".join([str(int(part) - layers) if part.isdecimal() else part for part in name.split(".")])


class Small(msgspec.Struct, frozen=True):
    """A model of few layers, which stands for deeper ones."""

    config: TrainConfig
    peak_at: tuple[str, str, Phase]
    peak_bytes: int
    resident_bytes: int


class Estimator:
    """Sketches of configs on one device, each made once; those made for another GPU are reused."""

    def __init__(self, device: Device, other: Estimator | None = None, own: OwnModel | None = None) -> None:
        self.device, self.own = device, own
        alike = other is not None and (other.device.kind == "cpu") == (device.kind == "cpu")
        self._sketches: dict[tuple[TrainConfig, bool], Sketch] = other._sketches if other and alike else {}
        self._updates: dict[TrainConfig, Update] = other._updates if other and alike else {}
        self._seconds: dict[Sketch | Update, list[float]] = {}

    def exact(self, config: TrainConfig) -> Sketch:
        """The step at full depth."""
        return self._sketch(config, whole=True)

    def exact_s(self, config: TrainConfig) -> float:
        """Seconds per step, as in a plan."""
        config = self._usual(config)
        return self._step_s(self.exact(config), config)

    def _usual(self, config: TrainConfig) -> TrainConfig:
        """The config of a mean batch, whose time counts; a traced model's is its own."""
        return config if self.own is not None else at_usual_length(config)

    def _sketch(self, config: TrainConfig, whole: bool) -> Sketch:
        brief = min(config.gradient_accumulation_steps, BRIEF * config.world_size)
        config = replace(config, gradient_accumulation_steps=brief, expandable_segments=False)  # the same operations
        sketch = self._sketches.get((config, whole))
        if sketch is None:
            sketch = self._sketches[config, whole] = Sketch(config, self.device, whole, self.own)
        return sketch

    def _micro_steps_of(self, config: TrainConfig) -> Sketch:
        """A sketch of the micro-steps alone, shared by all optimizers, which do not change them."""
        return self._sketch(replace(config, optimizer="adamw", optimizer_loop="fused"), whole=False)

    def _update(self, config: TrainConfig) -> Update:
        one = {"batch_size": 1, "gradient_accumulation_steps": config.world_size}
        alike = replace(config, **one, loss_chunk=0, checkpoint_layers=0, expandable_segments=False)
        if self.own is not None:  # another batch might need another trace
            alike = replace(config, gradient_accumulation_steps=config.world_size, expandable_segments=False)
        update = self._updates.get(alike)
        if update is None:
            update = self._updates[alike] = Update(alike, self.device, self.own)
        return update

    def _step_s(self, sketch: Sketch, config: TrainConfig) -> float:
        first_s, *later_s = self._sections_s(sketch)
        count = max(1, config.gradient_accumulation_steps // config.world_size)
        if config.world_size > 1 and later_s:  # only the last of them may reduce gradients
            return (count - 1) * first_s + later_s[-1] + self._sections_s(self._update(config))[0]
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
        more = update.state_bytes - self._update(sketch.config).state_bytes  # than the state of the sketch's optimizer
        return Small(config, sketch.peak_at, sketch.peak_bytes + more, sketch.resident_bytes + more)

    def step_s(self, config: TrainConfig) -> float:
        """Approximate seconds per step."""
        models, line = self._along(self._usual(config))
        return line([self._step_s(self._micro_steps_of(model.config), model.config) for model in models])

    def floor_bytes(self, config: TrainConfig) -> float:
        """A lower bound on the bytes allocated at the peak: strict if eager; compiled, see `slack_of`."""
        models, line = self._along(config)
        if len({model.peak_at for model in models}) == 1 and not _levels_off(config):
            return line([model.peak_bytes for model in models])
        # Peaks at different moments do not lie on one line; the memory before the step does.
        return line([model.resident_bytes for model in models])

    def lean_bytes(self, config: TrainConfig) -> float:
        """Approximate bytes allocated at the peak, for comparing candidates."""
        models, line = self._along(config)
        return line([model.peak_bytes for model in models])

    def fewest_checkpointed(self, config: TrainConfig, room_bytes: float) -> int:
        """A lower bound on the blocks to checkpoint, for a setting that keeps every block; not valid if all are.

        A checkpointed block saves at most what it holds at the moment of the peak; the weights stay.
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
        """The small models for a config, and the function that extrapolates their figures to it: from the first, by so
        many steps towards more kept blocks and so many towards more checkpointed ones. A traced model stands for
        itself."""
        if self.own is not None:
            return [self._small(config)], lambda figures: figures[0]
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
    """The factor by which the bound may exceed the peak."""
    if not config.compile:
        return 1.0
    if not config.checkpoint_layers:
        return KEPT_SLACK
    return SLACK if config.n_layer - config.checkpoint_layers >= FEWEST else ENDS_SLACK


def _levels_off(config: TrainConfig) -> bool:
    """Whether a deep model's peak may be far below the line: compiled, a limited number of recomputed attention scores
    is kept, and later blocks overwrite them."""
    return config.compile and config.checkpoint_layers > 0 and config.attention == "math"


def period_of(config: TrainConfig) -> int:
    """The number of blocks after which a step's memory pattern repeats."""
    return 2 if config.compile else 1


def _fewest(blocks: int, period: int) -> int:
    """How many blocks a small model needs to stand for that many."""
    return blocks if blocks < FEWEST else FEWEST + (blocks - FEWEST) % period


def _nominal_s(work: clock.Work) -> float:
    """Seconds on a nominal card, good only for ranking."""
    return sum(count * (op.flops / NOMINAL_FLOPS_PER_S + NOMINAL_LAUNCH_S) for _, op, count in work.ops)
