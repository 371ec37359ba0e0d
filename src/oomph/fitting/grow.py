"""The largest model that fits and trains in time: the widest, the deepest, the largest in GPT-2's proportions. Also
the shapes to try, and the settings for a size.

Sources, each named where it is used:
- Radford et al. 2019 (GPT-2), table 2: the proportions of depth and width.
- Brown et al. 2020 (GPT-3, arXiv 2005.14165), table 2.1 and appendix B: learning rates, batch, warm-up, decay.
- Kaplan et al. 2020 (arXiv 2001.08361): section 3.1, proportions matter little; equation D.1, learning rate by size.
- Hoffmann et al. 2022 (Chinchilla, arXiv 2203.15556), table 3: about 20 tokens a parameter for the compute.
- Muennighoff et al. 2023 (arXiv 2305.16264): up to 4 passes over the data are about as good as new data.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import inf, log

import msgspec

from oomph.config import LoadedConfig, TrainConfig
from oomph.config.settle import left_open
from oomph.fitting.result import KeyValue, Option
from oomph.fitting.search import Searcher, boundary
from oomph.fitting.space import (
    HEAD_SIZE,
    Ladder,
    TrainingProgram,
    asked_of,
    batches,
    changes_between,
    of_width,
    programs,
    with_changes,
)
from oomph.planning.plan import Plan, tokens_per_step
from oomph.step.parameters import count_printed
from oomph.units import counted

TOKENS_PER_PARAMETER = 20.0  # Chinchilla
GOOD_PASSES = 4.0  # Muennighoff et al.
GPT3_RATES = ((768, 6.0e-4), (1024, 3.0e-4), (1536, 2.5e-4), (2048, 2.0e-4), (2560, 1.6e-4), (4096, 1.2e-4))
LOWEST_RATE = 1e-5  # Kaplan's line ends below zero
BATCH_TOKENS = 524_288  # GPT-3's half a million, up to 760 M parameters
FEWEST_STEPS = 5_000  # a run of fewer steps learns little from each: the batch is made smaller instead
WARMUP_TOKENS = 375_000_000  # GPT-3
WARMUP_SHARE = 0.05  # of a short run
WIDEST = 32_768  # a width no single card trains
IN_PROPORTION = "the largest in GPT-2's proportions"
TRIED = ("batch_size", "gradient_accumulation_steps", "compile", "expandable_segments", "checkpoint_layers")
NEARLY_ORDERED = 3  # sizes of a ladder are only nearly in order of cost: this many more are tried


class DepthAndWidth(msgspec.Struct, frozen=True, order=True):
    """Depth and width."""

    n_layer: int
    n_embd: int

    @property
    def block_parameters(self) -> int:
        """Parameters without the embeddings."""
        return 12 * self.n_layer * self.n_embd**2


def usual_depth(width: int) -> int:
    """The layers that GPT-2's family has at a width: width / 64 up to 768, then 12 more for each 256."""
    if width <= 768:
        return max(1, round(width / 64))
    return 12 + round((width - 768) * 12 / 256)


def proportioned(vocab_size: int, widest: int = 4096) -> list[DepthAndWidth]:
    """Shapes near GPT-2's proportions, the smallest first: each width with its usual depth ± a quarter."""
    shapes = set()
    for width in range(HEAD_SIZE * 2, widest + 1, HEAD_SIZE):
        depth = usual_depth(width)
        shapes |= {
            DepthAndWidth(layers, width) for layers in range(max(1, round(depth * 0.75)), round(depth * 1.25) + 1)
        }
    return sorted(shapes, key=lambda shape: (shape.block_parameters + vocab_size * shape.n_embd, shape.n_layer))


def learning_rate(width: int, block_parameters: float) -> float:
    """The peak learning rate at half a million tokens a step: GPT-3's by width, interpolated in the logarithm;
    below its smallest, Kaplan's 0.003239 - 0.0001395 ln N for N parameters without embeddings."""
    if width < GPT3_RATES[0][0]:
        return float(f"{max(LOWEST_RATE, 0.003239 - 0.0001395 * log(max(1.0, block_parameters))):.1e}")
    for (low, low_rate), (high, high_rate) in pairwise(GPT3_RATES):
        if width <= high:
            share = log(width / low) / log(high / low)
            return float(f"{low_rate * (high_rate / low_rate) ** share:.1e}")
    return GPT3_RATES[-1][1]


def rate_source(width: int) -> str:
    """The source of that learning rate."""
    return "Brown et al. 2020, table 2.1" if width >= GPT3_RATES[0][0] else "Kaplan et al. 2020, equation D.1"


def batch_sequences(tokens: float, block_size: int) -> int:
    """Sequences per step: half a million tokens, or, for a short run, the largest power of two that leaves enough
    steps."""
    most = max(1, int(min(BATCH_TOKENS, tokens / FEWEST_STEPS)) // block_size)
    return 1 << (most.bit_length() - 1)


def schedule(rate: float, tokens: float, sequences: int, block_size: int) -> dict[str, int | float]:
    """Steps, learning rate, warm-up and evaluations of a run over that many tokens with that peak rate."""
    steps = max(1, -(-int(tokens) // (sequences * block_size)))
    warmup = min(WARMUP_TOKENS / (sequences * block_size), steps * WARMUP_SHARE)
    return {
        "max_iters": steps,
        "lr_decay_iters": steps,
        "learning_rate": rate,
        "min_lr": float(f"{rate / 10:.1e}"),  # GPT-3 ends at a tenth
        "warmup_iters": max(1, round(warmup)),
        "eval_interval": _round_down(max(1, steps // 40)),
    }


def _round_down(number: int) -> int:
    """The number rounded down to one digit: 524 becomes 500."""
    scale: int = 10 ** (len(str(number)) - 1)
    return number // scale * scale


@dataclass(frozen=True)
class Limits:
    """The hours a run may take, and its tokens."""

    hours: float | None
    tokens: float | None  # None: 20 per parameter in a proposal, else as the config says


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
        self.tell = tell  # called with what is being tried
        self.as_asked = as_asked  # keep the micro-batch and all else as in the config
        self.searcher = searcher
        self.limits = limits
        self.proposing = proposing
        self.evaluated = 0
        self._plans: dict[DepthAndWidth, Plan | None] = {}
        self._fitting: dict[DepthAndWidth, bool] = {}

    def plan(self, shape: DepthAndWidth) -> Plan | None:
        """The model of that shape at the fastest setting that surely fits, or at one that is in time; None if none
        does."""
        if shape not in self._plans:
            loaded, every = self._tried(shape)
            fits = self.searcher.peak_ever_fits(every)
            plan = self.searcher.fastest(loaded, every, safe=True) if fits else None
            self._plans[shape] = plan and self.searcher.in_time(loaded, every, plan, self.limits.hours, safe=True)
        return self._plans[shape]

    def _ladders(self, loaded: LoadedConfig) -> list[Ladder]:
        """The settings a size is tried with. In a proposed run, keys that were given are kept."""
        every = programs(loaded, self.searcher.device)
        program = every[asked_of(every, loaded)]
        if self.as_asked:
            return [_alone(program.settled)]
        given = [key for key in TRIED if self.proposing and self.loaded.said(key)]
        return list(_settings(program, given))

    def config(self, shape: DepthAndWidth) -> LoadedConfig:
        """The run with a model of that shape, and with a suitable schedule if the run is a proposal."""
        changes = {"n_layer": shape.n_layer, **of_width(self.loaded.config, shape.n_embd)}
        checkpointed = self.loaded.config.checkpoint_layers
        if checkpointed:
            every = checkpointed >= self.loaded.config.n_layer
            changes["checkpoint_layers"] = shape.n_layer if every else min(checkpointed, shape.n_layer)
        if self.proposing:
            changes |= self._run(shape, with_changes(self.loaded, changes).config)
        return with_changes(self.loaded, changes)

    def _run(self, shape: DepthAndWidth, config: TrainConfig) -> dict[str, KeyValue]:
        """The batch and the schedule, except for keys that were given: the steps follow from the batch."""
        given = self.loaded.said
        tokens = self.limits.tokens or TOKENS_PER_PARAMETER * count_printed(config)
        sequences = batch_sequences(inf if given("max_iters") else tokens, config.block_size)
        size, micro_steps = self._batch(sequences, config)
        if given("max_iters"):
            tokens = config.max_iters * size * micro_steps * config.block_size
        rate = config.learning_rate if given("learning_rate") else learning_rate(shape.n_embd, shape.block_parameters)
        run: dict[str, KeyValue] = {"batch_size": size, "gradient_accumulation_steps": micro_steps}
        run |= schedule(rate, tokens, size * micro_steps, config.block_size)
        return {key: value for key, value in run.items() if not given(key)}

    def _batch(self, sequences: int, config: TrainConfig) -> tuple[int, int]:
        """The micro-batch and micro-steps closest to that many sequences, but not above; given keys are kept."""
        micro_steps = config.gradient_accumulation_steps
        size = config.batch_size if self.loaded.said("batch_size") else 1
        if not self.loaded.said("gradient_accumulation_steps"):
            return size, max(1, sequences // (size * config.world_size)) * config.world_size
        return (size if self.loaded.said("batch_size") else max(1, sequences // micro_steps)), micro_steps

    def will_do(self, shape: DepthAndWidth) -> bool:
        """Whether the model surely fits and trains in time and, in a proposal, has enough tokens for its size."""
        if not self._could(shape):
            return False
        if self.limits.hours is None and shape not in self._plans:
            return self._fits(shape)
        plan = self.plan(shape)
        if plan is None:
            return False
        return self.limits.hours is None or (plan.time is not None and plan.time.hours <= self.limits.hours)

    def _fits(self, shape: DepthAndWidth) -> bool:
        """Whether some setting of that shape surely fits: far cheaper than finding the fastest."""
        if shape not in self._fitting:
            self._fitting[shape] = self.searcher.ever_fits(*self._tried(shape), safe=True)
        return self._fitting[shape]

    def _tried(self, shape: DepthAndWidth) -> tuple[LoadedConfig, list[Ladder]]:
        """The run with a model of that shape, and the settings it is tried with, each counted once."""
        self.tell(f"{shape.n_layer:,} layers × {shape.n_embd:,}")
        loaded = self.config(shape)
        every = self._ladders(loaded)
        if shape not in self._fitting:
            self.evaluated += sum(each.settings for each in every)
        return loaded, every

    def _could(self, shape: DepthAndWidth) -> bool:
        """False if the tokens are too few for such a model, or its weights, gradients and Adam's state too large."""
        if self.proposing:
            config = self.config(shape).config
            tokens = self.limits.tokens or config.max_iters * tokens_per_step(config)
            if TOKENS_PER_PARAMETER * count_printed(config) > tokens:
                return False
        return 16 * shape.block_parameters <= self.searcher.room_bytes or self.loaded.config.optimizer != "adamw"

    def _guess(self, sizes: Sequence[DepthAndWidth], fragmented: float) -> int:
        """How many of the sizes will do, estimated from models of few layers."""
        if self.searcher.safe_room_bytes <= 0:
            return 0
        fragmented *= self.searcher.room_bytes / self.searcher.safe_room_bytes  # they have to fit surely

        def fails(shape: DepthAndWidth) -> bool:
            if not self._could(shape):
                return True
            loaded, hours = self.config(shape), self.limits.hours
            most_s = inf if hours is None else hours * 3600 / loaded.config.max_iters
            return not self.searcher.seems_to_do(self._ladders(loaded), most_s, fragmented)

        return bisect_left(sizes, True, key=fails)

    def last(self, sizes: Sequence[DepthAndWidth]) -> DepthAndWidth | None:
        """The largest of increasing sizes that will do: memory and time grow with size. It is guessed first, then its
        neighbours are searched."""
        guess = self._guess(sizes, 1.0)
        self.searcher.fragmented = 1.0
        if guess and not self.will_do(sizes[guess - 1]):
            guess = self._guess(sizes, self.searcher.fragmented)  # with the fragmentation just simulated
        number = boundary(sizes, guess, self.will_do)
        near = range(number, min(number + NEARLY_ORDERED, len(sizes)))
        last = max([number - 1, *(place for place in near if self.will_do(sizes[place]))])
        return sizes[last] if last >= 0 else None

    def last_planned(self, sizes: Sequence[DepthAndWidth]) -> tuple[DepthAndWidth, Plan] | None:
        """The last that will do, with its plan."""
        shape = self.last(sizes)
        plan = self.plan(shape) if shape is not None else None
        return (shape, plan) if shape is not None and plan is not None else None


def _alone(config: TrainConfig) -> Ladder:
    """A ladder of this one setting."""
    return Ladder(config, (config.checkpoint_layers,), (config.expandable_segments,))


def _settings(program: TrainingProgram, given: Container[str]) -> Iterator[Ladder]:
    """Every micro-batch, compiled and not, with each kind of segments; also with all blocks checkpointed, if the
    program can. Given keys are kept."""
    base = program.settled
    counts = {base.checkpoint_layers}
    if base.n_layer in program.checkpoint_layers and "checkpoint_layers" not in given:
        counts.add(base.n_layer)
    fixed = "batch_size" in given or "gradient_accumulation_steps" in given  # the sequences per step are fixed already
    sizes = [(base.batch_size, base.gradient_accumulation_steps)] if fixed else batches(base)
    segments = (base.expandable_segments,) if "expandable_segments" in given else program.expandable_segments
    compiling = (base.compile,) if "compile" in given else program.compile
    for (size, micro_steps), compiled in product(sizes, compiling):
        batch = {"batch_size": size, "gradient_accumulation_steps": micro_steps}
        lowest = msgspec.structs.replace(base, **batch, compile=compiled)
        yield Ladder(lowest, tuple(sorted(counts)), segments, left_open(program.loaded))


def growing(sizer: Sizer) -> dict[str, Callable[[], tuple[DepthAndWidth, Plan] | None]]:
    """The ways to grow a config's model, by name."""
    config = sizer.loaded.config
    plain = Sizer(sizer.loaded, sizer.searcher, sizer.limits, sizer.proposing, sizer.tell, as_asked=True)
    batch = f"{config.batch_size} × {config.gradient_accumulation_steps}"
    layers = counted(config.n_layer, "layer")
    widths = [DepthAndWidth(config.n_layer, width) for width in range(HEAD_SIZE, WIDEST, HEAD_SIZE)]
    width = max(HEAD_SIZE, config.n_embd // HEAD_SIZE * HEAD_SIZE)
    depths = [DepthAndWidth(layers, width) for layers in range(1, 1025)]
    return {
        IN_PROPORTION: lambda: sizer.last_planned(proportioned(config.vocab_size)),
        f"the widest of {layers}": lambda: sizer.last_planned(widths),
        f"the deepest of width {width}": lambda: sizer.last_planned(depths),
        f"the widest of {layers} at {batch} as asked": lambda: plain.last_planned(widths),
        f"the deepest of width {width} at {batch} as asked": lambda: plain.last_planned(depths),
    }


def as_option(name: str, plan: Plan, now: Plan, effect: str) -> Option:
    """A model of another size, as an option beside the requested one."""
    changes = changes_between(now.config, plan.config, now.loaded.said)
    return Option(name, changes, "different", plan, now.memory.total_mib - plan.memory.total_mib, effect, "")
