"""The largest model that fits and trains in time: the widest, the deepest, the largest in GPT-2's proportions; and a
whole run proposed from nothing but a card, a time and a number of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import msgspec

from oomph import config as configs
from oomph.config import LoadedConfig, TrainConfig
from oomph.fitting import shapes
from oomph.fitting.result import Option, Value
from oomph.fitting.search import Searcher, boundary
from oomph.fitting.shapes import Shape
from oomph.fitting.space import Ladder, batches, changes_between, with_changes
from oomph.planner import Plan
from oomph.step.params import count_nanogpt

WIDEST = 32_768  # a width no single card trains
IN_PROPORTION = "the largest in GPT-2's proportions"
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
        """The model of that shape at the fastest setting that fits; None where none does."""
        if shape not in self._plans:
            loaded = self.config(shape)
            every = self._ladders(loaded)
            self.evaluated += sum(each.settings for each in every)
            self.tell(f"{shape.n_layer:,} layers × {shape.n_embd:,}")
            fits = self.searcher.peak_ever_fits(every)
            self._plans[shape] = self.searcher.fastest(loaded, every) if fits else None
        return self._plans[shape]

    def _ladders(self, loaded: LoadedConfig) -> list[Ladder]:
        settled = configs.settle(loaded, self.searcher.device).config
        return [_alone(settled)] if self.as_asked else list(_settings(settled))

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
        tokens = self.limits.tokens or shapes.TOKENS_PER_PARAMETER * count_nanogpt(config)
        sequences = shapes.batch_sequences(tokens, config.block_size)
        world = config.world_size
        sequences = -(-sequences // world) * world
        run: dict[str, Value] = {"batch_size": 1, "gradient_accumulation_steps": sequences}
        run |= shapes.schedule(shape, tokens, sequences, config.block_size)
        return {key: value for key, value in run.items() if not self.loaded.said(key)}

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
        if self.proposing and self.limits.tokens is not None:
            wanted = shapes.TOKENS_PER_PARAMETER * count_nanogpt(self.config(shape).config)
            if wanted > self.limits.tokens:
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


def _settings(base: TrainConfig) -> Iterator[Ladder]:
    """The settings a size is tried with: every micro-batch; for oomph also all blocks checkpointed."""
    counts = {base.checkpoint_layers, base.n_layer} if base.trainer == "oomph" else {base.checkpoint_layers}
    for size, micro_steps in batches(base):
        config = msgspec.structs.replace(base, batch_size=size, gradient_accumulation_steps=micro_steps)
        yield Ladder(config, tuple(sorted(counts)), (base.expandable_segments,))


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
