"""`fit`: the best setting that fits the card, at the same effective batch, and what every other option would gain."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from oomph import config as configs
from oomph.config import LoadedConfig, TrainConfig
from oomph.config.schema import MANY_STEPS
from oomph.devices import Device
from oomph.errors import InputError, Problem
from oomph.fitting import verdict
from oomph.fitting.estimate import replace
from oomph.fitting.propose import grow, propose
from oomph.fitting.result import KINDS, Fidelity, Fit, KeyValue, Option
from oomph.fitting.search import Searcher, boundary, is_evaluating, is_late, is_safe
from oomph.fitting.space import (
    ARITHMETIC,
    HEAD_SIZE,
    SAME,
    Ladder,
    SearchRow,
    TrainingProgram,
    asked_of,
    batches,
    changes_between,
    different_rows,
    ladders,
    nearly_rows,
    of_width,
    programs,
    resized,
    same_rows,
    shallower,
    together,
    variant,
    with_changes,
)
from oomph.planning.plan import Plan, choose_device, tokens_per_step
from oomph.step.collector import uncollected

NEARLY_AS_FAST = 0.05  # the safest option gives up at most this share of the best one's speed
CONTEXT_STEP = 64  # tokens: contexts are tried in multiples of it
WORTH_A_CHANGE = 0.01  # a setting that surely fits is not changed for a smaller gain
SMALL_BATCHES = 4  # a smaller model is searched with this many of the smallest micro-batches


def fit(
    config: LoadedConfig | TrainConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    gpu: Device | str | None = None,
    *,
    reserve_mib: float = 0.0,
    tokens: float | None = None,
    hours: float | None = None,
    largest: bool = False,
    model: str | None = None,
    progress: Callable[[str], None] | None = None,
    **keys: Any,
) -> Fit:
    """The settings with which `config` trains on `gpu`, ranked, each simulated in full.

    `config`, `gpu`, `model` and `keys` are as `plan` takes them. `reserve_mib` is kept free for the desktop and other
    programs; `tokens` sets the length of the run; `hours` is the time it may take. `largest` asks for the largest model
    instead. If no model is given, but tokens or hours are, one is proposed. `progress` is called with what is being
    tried. Raises `InputError` with every problem.
    """
    loaded = configs.as_loaded(config, keys, model)
    if largest and loaded.model is not None:
        what, allowed = "a traced model has one size", "a model that is described"
        raise InputError(Problem("largest", what, f"model {loaded.model}", allowed))
    tell = progress or (lambda _: None)
    check_tokens(loaded, tokens)
    searcher = Searcher(choose_device(gpu, loaded.config), reserve_mib, loaded.model)
    with uncollected():
        if (tokens or hours) and not names_a_model(loaded):
            return propose(loaded, searcher, tokens, hours, tell)
        loaded = with_tokens(loaded, tokens)
        return grow(loaded, searcher, hours, tell) if largest else _Fitting(loaded, searcher, hours, tell).answer()


def names_a_model(loaded: LoadedConfig) -> bool:
    """Whether the user said what to train: a file, a preset or a shape."""
    given = bool(loaded.files) or loaded.model is not None
    return given or any(loaded.said(key) for key in ("n_layer", "n_head", "n_embd"))


def check_tokens(loaded: LoadedConfig, tokens: float | None) -> None:
    """Refuse a run of more steps than a config may have, and one whose length is given twice. `tokens` override a
    config's own length."""
    if tokens is None:
        return
    most = MANY_STEPS * tokens_per_step(loaded.config)
    problems = []
    if not 0 < tokens <= most:
        problems.append(Problem("tokens", "is out of range", found=f"{tokens:g}", allowed=f"up to {most:.3g}"))
    where = loaded.sources["max_iters"]
    if where.startswith("--") or (loaded.said("max_iters") and not names_a_model(loaded)):
        found = f"tokens = {tokens:g} and max_iters = {loaded.config.max_iters}"
        problems.append(Problem("max_iters", "gives the run's length, and so do tokens", found, "one of the two"))
    if problems:
        raise InputError(problems)


def with_tokens(loaded: LoadedConfig, tokens: float | None) -> LoadedConfig:
    """The run with the length of that many tokens, and its schedule scaled to it."""
    check_tokens(loaded, tokens)
    if tokens is None:
        return loaded
    steps = max(1, -(-int(tokens) // tokens_per_step(loaded.config)))
    ends_together = loaded.config.lr_decay_iters == loaded.config.max_iters or not loaded.said("lr_decay_iters")
    changes: dict[str, KeyValue] = {"max_iters": steps}
    return with_changes(loaded, changes | ({"lr_decay_iters": steps} if ends_together else {}))


class _Fitting:
    """One fit under way: the options found so far, each under the config it runs."""

    def __init__(
        self,
        loaded: LoadedConfig,
        searcher: Searcher,
        hours: float | None,
        tell: Callable[[str], None],
    ) -> None:
        self.tell = tell
        self.loaded = loaded
        self.searcher = searcher
        self.hours = hours
        self.programs = programs(loaded, searcher.device)
        self.asked = asked_of(self.programs, loaded)
        self.now = searcher.plan(loaded)
        self.found: dict[TrainConfig, Option] = {}
        self.evaluated = 0

    def answer(self) -> Fit:
        for row in same_rows(self.programs, self.asked):
            self.add(row)
        fastest = {key: self.search(program) for key, program in self.programs.items()}
        nearly = list(nearly_rows(self.programs, self.asked, self.searcher.device.has_bf16))
        for row in nearly:
            self.add(row)
            self.search_with(row)
        both = together(nearly)
        if both is not None and not any(option.fits for option in self.found.values()):
            self.add(both)
            self.search_with(both)
        for row in different_rows(self.programs[self.asked]):
            self.add(row)
            if "method" in row.changes and not any(fastest.values()):
                self.search_with(row)
        if not any(fastest.values()):
            for row in nearest_rows(list(self.programs.values())[-1], self.searcher, self.tell):
                self.add(row)
        self.tell("what leaves more room")
        self._make_room()
        options = self._ranked()
        best = self._best(options)
        safest = self._safest(options, best)
        options = [verdict.with_reason(option, options, best, safest, self.hours) for option in options]
        return Fit(
            loaded=self.loaded,
            now=self.now,
            options=tuple(options),
            best=best,
            safest=safest,
            evaluated=self.evaluated + len(self.found),
            verdict=verdict.verdict(self.now, options, best, self.hours),
            why=tuple(verdict.why(self.now, options, best, safest, self.hours)),
            hours_limit=self.hours,
        )

    def add(self, row: SearchRow) -> None:
        """Simulate an option and keep it, unless there is one with the same config already."""
        program = self.programs[row.program]
        self.tell(f"{row.name}, {program.key}")
        self._keep(row.name, self.searcher.plan(with_changes(program.loaded, row.changes)), row.kind, row.effect)

    def _keep(self, name: str, plan: Plan, kind: Fidelity, effect: str) -> None:
        if plan.config not in self.found:
            changes = changes_between(self.now.config, plan.config, self.now.loaded.said)
            saved_mib = self.now.memory.total_mib - plan.memory.total_mib
            self.found[plan.config] = Option(name, changes, kind, plan, saved_mib, effect, "")

    def _ranked(self) -> list[Option]:
        return sorted(self.found.values(), key=_rank)

    def search(self, program: TrainingProgram) -> bool:
        """Keep the fastest of a program's settings and return True; if nothing fits, the leanest, and False."""
        every = list(ladders(program))
        settings = sum(each.settings for each in every)
        self.evaluated += settings
        self.tell(f"{settings:,} settings of {program.key}")
        fastest = self.searcher.fastest(program.loaded, every)
        if fastest is None:
            wanted = program.key in with_a_leanest(self.programs, self.asked)
            leanest = self.searcher.roomiest(program.loaded, every) if wanted else None
            if leanest is not None:
                self._keep("the leanest setting", leanest, "same", SAME)
            return False
        self._keep("the fastest that fits", fastest, "same", SAME)
        self._keep("in time", self.searcher.in_time(program.loaded, every, fastest, self.hours), "same", SAME)
        return True

    def search_with(self, row: SearchRow) -> None:
        """Keep the best setting with a change: every batch, checkpoint and chunk is searched with it."""
        program = variant(self.programs[row.program], row.changes, self.searcher.device)
        every = list(ladders(program))
        settings = sum(each.settings for each in every)
        self.evaluated += settings
        self.tell(f"{settings:,} settings of {program.key} with {row.name}")
        fastest = self.searcher.fastest(program.loaded, every)
        if fastest is not None:
            self._keep(f"{row.name}, the fastest that fits", fastest, row.kind, row.effect)

    def _make_room(self) -> None:
        """Keep options that leave more room than the best: nearly as fast, or the fastest with a sure margin. If the
        best one's program has no setting with such a margin, the other programs are tried."""
        options = self._ranked()
        best = self._best(options)
        if best is None or options[best].kind == "different":
            return
        chosen = options[best]
        own = self._program_behind(chosen)
        if is_evaluating(chosen.plan):
            soonest = self.searcher.soonest(own.loaded, ladders(own), chosen.plan)
            self._keep("the fewest hours", soonest, chosen.kind, chosen.effect)
        if chosen.plan.time is not None:
            slowest_s = chosen.plan.time.step_ms / 1e3 * (1 + NEARLY_AS_FAST)
            roomiest = self.searcher.roomiest(own.loaded, ladders(own), slowest_s)
            if roomiest is not None:
                self._keep("the most room", roomiest, chosen.kind, chosen.effect)
        options = self._ranked()
        if self._safest(options, self._best(options)) is not None or self._keep_safe(own, chosen):
            return
        for key, program in self.programs.items():
            if key != program_of(chosen):
                self._keep_safe(program, None)

    def _keep_safe(self, program: TrainingProgram, like: Option | None) -> bool:
        """Keep a program's fastest setting with a sure margin, of the kind and effect of `like`; False if none."""
        safe = self.searcher.fastest(program.loaded, ladders(program), safe=True)
        if safe is not None:
            kind, effect = (like.kind, like.effect) if like is not None else ("same", SAME)
            self._keep("the fastest with a sure margin", safe, kind, effect)
        return safe is not None

    def _program_behind(self, option: Option) -> TrainingProgram:
        """The program that runs the option, with the option's changes to the arithmetic."""
        program, config = self.programs[program_of(option)], option.plan.config
        if option.kind == "same":
            return program
        return variant(program, {name: getattr(config, name) for name in ARITHMETIC}, self.searcher.device)

    def _best(self, options: list[Option]) -> int | None:
        """The fastest that surely fits, is in time and runs under the requested program; else the next best program,
        then what changes the mathematics. A config that surely fits as it is stays, unless another is faster by
        more than `WORTH_A_CHANGE`."""
        fitting = [index for index, option in enumerate(options) if option.fits]
        if not fitting:
            return None
        same = [index for index in fitting if options[index].kind == "same"]  # even if late, it is what was requested
        late = same or fitting
        in_time = [index for index in late if not is_late(options[index].plan, self.hours)] or late
        preferred = [self.asked, *(key for key in self.programs if key != self.asked)]
        places = {key: place for place, key in enumerate(preferred)}

        def order(index: int) -> tuple[bool, int, bool, bool, bool, int, float]:
            option = options[index]
            resized = "n_layer" in option.changes or "n_embd" in option.changes  # fine-tuning keeps the model
            retries, unsure = option.plan.memory.retries > 0, not is_safe(option.plan)
            place = places[program_of(option)]
            coarser = self.now.config.autocast and not option.plan.config.autocast  # known to reach a worse loss
            kind, speed = KINDS.index(option.kind), option.tokens_per_s or 0.0
            return retries, kind, resized, coarser, unsure, place, -speed

        best = min(in_time, key=order)
        unchanged = next((index for index in in_time if not options[index].changes), None)
        if unchanged is not None and is_safe(options[unchanged].plan):
            gain = (options[best].tokens_per_s or 1.0) / (options[unchanged].tokens_per_s or 1.0) - 1
            sooner = (options[best].hours or 0.0) < (options[unchanged].hours or 0.0)  # evaluations use a larger batch
            return best if gain > WORTH_A_CHANGE and sooner else unchanged
        return best

    def _safest(self, options: list[Option], best: int | None) -> int | None:
        """Of the options of the best one's program and kind that fit even if the prediction misses: the most room among
        those nearly as fast, else the fastest; None if there is none."""
        if best is None:
            return None
        chosen = options[best]
        enough = (chosen.tokens_per_s or 0.0) / (1 + NEARLY_AS_FAST)
        safe = [
            index
            for index, option in enumerate(options)
            if option.fits and is_safe(option.plan) and _training(option) == _training(chosen)
        ]
        quick = [index for index in safe if (options[index].tokens_per_s or 0.0) >= enough]
        if quick:
            return max(quick, key=lambda index: options[index].plan.memory.headroom_mib or 0.0)
        return max(safe, key=lambda index: options[index].tokens_per_s or 0.0, default=None)


def program_of(option: Option) -> str:
    """The key of the program that runs an option."""
    return "patched" if option.patched else option.trainer


def _training(option: Option) -> tuple[str, ...]:
    """What is common to options that differ only in speed and room."""
    config = option.plan.config
    return option.kind, program_of(option), *(str(getattr(config, name)) for name in ARITHMETIC)


def with_a_leanest(found: Iterable[str], asked: str) -> list[str]:
    """The programs whose leanest setting is searched if nothing fits, the requested one first. The patched one only if
    it was requested: patching is pointless if the run still does not fit."""
    return [asked, *(key for key in found if key not in (asked, "patched"))]


def _rank(option: Option) -> tuple[bool, int, float]:
    return not option.fits, KINDS.index(option.kind), -(option.tokens_per_s or 0.0)


def nearest_rows(program: TrainingProgram, searcher: Searcher, tell: Callable[[str], None]) -> Iterator[SearchRow]:
    """The deepest and the widest model that fit, each with its own settings; for fine-tuning, the longest context.
    `tell` is called with what is being tried."""
    base = program.settled
    if program.loaded.model is not None:
        return
    if base.method != "full":
        tell(f"contexts of fewer than {base.block_size} tokens")
        blocks, short = _largest((base.block_size - 1) // CONTEXT_STEP, _of_context, program, searcher)
        if short is not None:
            effect = f"sees {blocks * CONTEXT_STEP:,} tokens of {base.block_size:,}"
            changes = changes_between(base, short.config, program.loaded.said)
            yield SearchRow("the longest context that fits", program.key, changes, "different", effect)
        return
    tell(f"models of fewer than {base.n_layer} layers")
    layers, shallow = _largest(base.n_layer - 1, lambda n: shallower(base, n), program, searcher)
    if shallow is not None:
        effect = f"a smaller model: {layers} layers of {base.n_layer}"
        changes = changes_between(base, shallow.config, program.loaded.said)
        yield SearchRow("the deepest that fits", program.key, changes, "different", effect)
    tell(f"models narrower than {base.n_embd}")
    top = (base.n_embd - 1) // HEAD_SIZE
    heads, narrow = _largest(top, lambda n: of_width(base, n * HEAD_SIZE), program, searcher)
    if narrow is not None:
        effect = f"a smaller model: width {heads * HEAD_SIZE} of {base.n_embd}"
        changes = changes_between(base, narrow.config, program.loaded.said)
        yield SearchRow("the widest that fits", program.key, changes, "different", effect)


def _of_context(blocks: int) -> dict[str, KeyValue]:
    return {"block_size": blocks * CONTEXT_STEP}


def _largest(
    top: int, change: Callable[[int], dict[str, KeyValue]], program: TrainingProgram, searcher: Searcher
) -> tuple[int, Plan | None]:
    """The largest number up to `top` whose model fits with a small micro-batch, and its plan at the fastest of those.

    Memory grows with the number. The last that fits is guessed from the leanest setting of the whole model; its
    neighbours are tried at their own leanest settings, and the last that fits is searched.
    """
    leanest = searcher.roomiest(program.loaded, ladders(program))
    if leanest is None:
        return 0, None
    fragmented = leanest.memory.reserved_mib / leanest.memory.allocated_mib

    def seems_to_fit(number: int) -> bool:
        smaller = replace(leanest.config, **change(number))
        again = min(smaller.checkpoint_layers, smaller.n_layer)
        return searcher.seems_to_fit(replace(smaller, checkpoint_layers=again), fragmented)

    def settings(number: int) -> tuple[LoadedConfig, list[Ladder]]:
        smaller = resized(program, change(number), searcher.device)
        small = {size for size, _ in batches(smaller.settled)[-SMALL_BATCHES:]}
        return smaller.loaded, [each for each in ladders(smaller) if each.config.batch_size in small]

    numbers = range(1, top + 1)
    guess = bisect_left(numbers, True, key=lambda number: not seems_to_fit(number))
    number = boundary(numbers, guess, lambda number: searcher.ever_fits(*settings(number)))
    return number, searcher.fastest(*settings(number)) if number else None
