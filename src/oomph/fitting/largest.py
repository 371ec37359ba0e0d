"""The largest model that fits and trains in time: the widest, the deepest, the largest in GPT-2's proportions; and a
whole run proposed from nothing but a card, a time and a number of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

import msgspec

from oomph.config import LoadedConfig, TrainConfig
from oomph.fitting import shapes
from oomph.fitting.result import Option, Value
from oomph.fitting.search import Searcher, boundary
from oomph.fitting.shapes import Shape
from oomph.fitting.space import Ladder, Program, asked_of, batches, changes_between, programs, with_changes
from oomph.planner import Plan, tokens_per_step
from oomph.step.params import count_nanogpt

WIDEST = 32_768  # a width no single card trains
IN_PROPORTION = "the largest in GPT-2's proportions"
TRIED = ("batch_size", "gradient_accumulation_steps", "compile", "expandable_segments", "checkpoint_layers")
NEARLY_ORDERED = 3  # sizes of a ladder are in order of their cost only nearly: so many more are looked at


@dataclass(frozen=True)
class Limits:
    """What a run may take, and how long it is."""

    hours: float | None
    tokens: float | None  # None: 20 a parameter, in a proposal; as the config says, otherwise


class Sizer:
    """Model sizes tried on one device, each at its fastest setting."""

    def __init__(
        self,
        loaded: LoadedConfig,
        searcher: Searcher,
        limits: Limits,
        proposing: bool,
        tell: Callable[[str], None],
        as_asked: bool = False,
    ) -> None:
        self.loaded = loaded
        self.tell = tell  # what is being tried
        self.as_asked = as_asked  # the micro-batch and all else stay as the config has them
        self.searcher = searcher
        self.limits = limits
        self.proposing = proposing
        self.evaluated = 0
        self._plans: dict[Shape, Plan | None] = {}

    def plan(self, shape: Shape) -> Plan | None:
        """The model of that shape at the fastest setting that fits, or at one that is in time; None where none does."""
        if shape not in self._plans:
            loaded = self.config(shape)
            every = self._ladders(loaded)
            self.evaluated += sum(each.settings for each in every)
            self.tell(f"{shape.n_layer:,} layers × {shape.n_embd:,}")
            fits = self.searcher.peak_ever_fits(every)
            plan = self.searcher.fastest(loaded, every) if fits else None
            self._plans[shape] = plan and self.searcher.in_time(loaded, every, plan, self.limits.hours)
        return self._plans[shape]

    def _ladders(self, loaded: LoadedConfig) -> list[Ladder]:
        """The settings a size is tried with. In a run that is ours to propose, keys that were given stay."""
        every = programs(loaded, self.searcher.device)
        program = every[asked_of(every, loaded)]
        if self.as_asked:
            return [_alone(program.settled)]
        given = [key for key in TRIED if self.proposing and self.loaded.said(key)]
        return list(_settings(program, given))

    def config(self, shape: Shape) -> LoadedConfig:
        """The run with a model of that shape, and the schedule that suits it where the run is ours to propose."""
        changes: dict[str, Value] = dict(shape.changes())
        checkpointed = self.loaded.config.checkpoint_layers
        if checkpointed:
            changes["checkpoint_layers"] = min(checkpointed, shape.n_layer)
        if self.proposing:
            changes |= self._run(shape, with_changes(self.loaded, changes).config)
        return with_changes(self.loaded, changes)

    def _run(self, shape: Shape, config: TrainConfig) -> dict[str, Value]:
        """The batch and the schedule, with the keys that were given as they are: the steps follow from the batch."""
        given = self.loaded.said
        tokens = self.limits.tokens or shapes.TOKENS_PER_PARAMETER * count_nanogpt(config)
        sequences = shapes.batch_sequences(inf if given("max_iters") else tokens, config.block_size)
        size, micro_steps = self._batch(sequences, config)
        if given("max_iters"):
            tokens = config.max_iters * size * micro_steps * config.block_size
        rate = config.learning_rate if given("learning_rate") else shapes.learning_rate(shape)
        run: dict[str, Value] = {"batch_size": size, "gradient_accumulation_steps": micro_steps}
        run |= shapes.schedule(rate, tokens, size * micro_steps, config.block_size)
        return {key: value for key, value in run.items() if not given(key)}

    def _batch(self, sequences: int, config: TrainConfig) -> tuple[int, int]:
        """The micro-batch and its steps that come nearest to so many sequences from below; what was given stays."""
        micro_steps = config.gradient_accumulation_steps
        size = config.batch_size if self.loaded.said("batch_size") else 1
        if not self.loaded.said("gradient_accumulation_steps"):
            return size, max(1, sequences // (size * config.world_size)) * config.world_size
        return (size if self.loaded.said("batch_size") else max(1, sequences // micro_steps)), micro_steps

    def will_do(self, shape: Shape) -> bool:
        """Whether the model fits and is trained in time, and, proposed, has the tokens a model of its size wants."""
        if not self._could(shape):
            return False
        plan = self.plan(shape)
        if plan is None:
            return False
        return self.limits.hours is None or (plan.time is not None and plan.time.hours <= self.limits.hours)

    def _could(self, shape: Shape) -> bool:
        """False where the tokens are too few for such a model, or its weights, gradients and Adam's state too many."""
        if self.proposing:
            config = self.config(shape).config
            tokens = self.limits.tokens or config.max_iters * tokens_per_step(config)
            if shapes.TOKENS_PER_PARAMETER * count_nanogpt(config) > tokens:
                return False
        return 16 * shape.block_parameters <= self.searcher.room_bytes or self.loaded.config.optimizer != "adamw"

    def _guess(self, sizes: Sequence[Shape], fragmented: float) -> int:
        """How many of the sizes will do, as far as models of few layers tell."""

        def fails(shape: Shape) -> bool:
            if not self._could(shape):
                return True
            loaded, hours = self.config(shape), self.limits.hours
            most_s = inf if hours is None else hours * 3600 / loaded.config.max_iters
            return not self.searcher.seems_to_do(self._ladders(loaded), most_s, fragmented)

        return bisect_left(sizes, True, key=fails)

    def last(self, sizes: Sequence[Shape]) -> Shape | None:
        """The last of growing sizes that will do: memory and time grow with them. Which it is is guessed first; those
        about it are searched."""
        guess = self._guess(sizes, 1.0)
        self.searcher.fragmented = 1.0
        if guess and not self.will_do(sizes[guess - 1]):
            guess = self._guess(sizes, self.searcher.fragmented)  # as what was just simulated is
        number = boundary(sizes, guess, self.will_do)
        near = range(number, min(number + NEARLY_ORDERED, len(sizes)))
        last = max([number - 1, *(place for place in near if self.will_do(sizes[place]))])
        return sizes[last] if last >= 0 else None

    def last_planned(self, sizes: Sequence[Shape]) -> tuple[Shape, Plan] | None:
        """The last that will do, with its plan."""
        shape = self.last(sizes)
        plan = self.plan(shape) if shape is not None else None
        return (shape, plan) if shape is not None and plan is not None else None


def _alone(config: TrainConfig) -> Ladder:
    """One setting and no other."""
    return Ladder(config, (config.checkpoint_layers,), (config.expandable_segments,))


def _settings(program: Program, given: Container[str]) -> Iterator[Ladder]:
    """Every micro-batch, compiled and not, each kind of segments; for oomph also all blocks checkpointed. Keys that
    are given stay as they are."""
    base = program.settled
    counts = {base.checkpoint_layers}
    if base.trainer == "oomph" and "checkpoint_layers" not in given:
        counts.add(base.n_layer)
    fixed = "batch_size" in given or "gradient_accumulation_steps" in given  # the sequences to a step are, already
    sizes = [(base.batch_size, base.gradient_accumulation_steps)] if fixed else batches(base)
    segments = (base.expandable_segments,) if "expandable_segments" in given else program.expandable_segments
    compiling = (base.compile,) if "compile" in given else program.compile
    for (size, micro_steps), compiled in product(sizes, compiling):
        batch = {"batch_size": size, "gradient_accumulation_steps": micro_steps}
        yield Ladder(msgspec.structs.replace(base, **batch, compile=compiled), tuple(sorted(counts)), segments)


def growing(sizer: Sizer) -> dict[str, Callable[[], tuple[Shape, Plan] | None]]:
    """The ways to grow a config's model, by name."""
    config = sizer.loaded.config
    plain = Sizer(sizer.loaded, sizer.searcher, sizer.limits, sizer.proposing, sizer.tell, as_asked=True)
    batch = f"{config.batch_size} × {config.gradient_accumulation_steps}"
    layers = f"{config.n_layer} layer{'s' * (config.n_layer != 1)}"
    widths = [Shape(config.n_layer, width) for width in range(shapes.HEAD_SIZE, WIDEST, shapes.HEAD_SIZE)]
    width = max(shapes.HEAD_SIZE, config.n_embd // shapes.HEAD_SIZE * shapes.HEAD_SIZE)
    depths = [Shape(layers, width) for layers in range(1, 1025)]
    return {
        IN_PROPORTION: lambda: sizer.last_planned(shapes.ladder(config.vocab_size)),
        f"the widest of {layers}": lambda: sizer.last_planned(widths),
        f"the deepest of width {width}": lambda: sizer.last_planned(depths),
        f"the widest of {layers} at {batch} as asked": lambda: plain.last_planned(widths),
        f"the deepest of width {width} at {batch} as asked": lambda: plain.last_planned(depths),
    }


def as_option(name: str, plan: Plan, now: Plan, effect: str) -> Option:
    """A model of another size, as an option beside what was asked."""
    changes = changes_between(now.config, plan.config)
    return Option(name, changes, "different", plan, now.memory.total_mib - plan.memory.total_mib, effect, "")
