"""Fits whose answer is a model: the largest that a config can grow to, or a whole proposed run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from oomph.config import LoadedConfig
from oomph.fitting.grow import (
    FEWEST_STEPS,
    GOOD_PASSES,
    IN_PROPORTION,
    TOKENS_PER_PARAMETER,
    DepthAndWidth,
    Limits,
    Sizer,
    as_option,
    growing,
    learning_rate,
    proportioned,
    rate_source,
)
from oomph.fitting.result import Fit, Option
from oomph.fitting.search import Searcher, is_safe
from oomph.fitting.verdict import name_of, setting
from oomph.planning.plan import PROGRAMS, Plan
from oomph.units import count, counted, figure

MAKES_ROOM = ("compile", "expandable_segments", "checkpoint_layers")  # keys varied for a size, beside the batch
NEIGHBOURS = 2  # sizes shown on either side of the proposed one


def grow(loaded: LoadedConfig, searcher: Searcher, hours: float | None, tell: Callable[[str], None]) -> Fit:
    """The widest, the deepest and the best-proportioned model that fits, with the config's batch and tokens. `tell` is
    called with what is being tried."""
    now = searcher.plan(loaded)
    sizer = Sizer(loaded, searcher, Limits(hours, None), proposing=False, tell=tell)
    options: list[Option] = []
    for name, find in growing(sizer).items():
        found = find()
        if found is not None and all(option.plan is not found[1] for option in options):
            options.append(as_option(name, found[1], now, _advice(*found)))
    options = [msgspec.structs.replace(option, reason=_merit(option)) for option in options]
    limit = f" and trains in {hours:g} h" if hours is not None else ""
    if not options:
        verdict = f"No: no model of heads of 64 fits {now.cards}{limit} with this batch and these tokens"
    else:
        first = options[0]
        verdict = f"{_superlative(first)} that fits {now.cards}{limit}: {describe(first.plan)}{_with(first)}"
    return Fit(
        loaded=loaded,
        now=now,
        options=tuple(options),
        best=0 if options else None,
        safest=_safest(options),
        evaluated=sizer.evaluated,
        verdict=verdict,
        why=tuple(_why_largest(now, options)),
        hours_limit=hours,
        seeks_a_model=True,
    )


def propose(
    loaded: LoadedConfig,
    searcher: Searcher,
    tokens: float | None,
    hours: float | None,
    tell: Callable[[str], None],
) -> Fit:
    """A model and a run for a card, a time and a number of tokens; `loaded` holds any other settings."""
    sizer = Sizer(loaded, searcher, Limits(hours, tokens), proposing=True, tell=tell)
    ladder = proportioned(loaded.config.vocab_size)
    best = sizer.last(ladder)
    place = ladder.index(best) if best is not None else 0
    plans = [(shape, sizer.plan(shape)) for shape in _near(ladder, place)]
    chosen = sizer.plan(best) if best is not None else None
    smallest = sizer.plan(ladder[0])
    now = chosen or smallest or searcher.plan(sizer.config(ladder[0]))
    base = searcher.plan(loaded)
    options = [
        _proposal(as_option(_size(shape), plan, base, _advice(shape, plan)), shape == best, hours)
        for shape, plan in plans
        if plan is not None
    ]
    options.sort(key=lambda option: (option.plan is not chosen, -option.plan.model.params_nanogpt))
    return Fit(
        loaded=loaded,
        now=now,
        options=tuple(options),
        best=0 if chosen is not None else None,
        safest=0 if chosen is not None and is_safe(chosen) else None,
        evaluated=sizer.evaluated,
        verdict=f"Train {describe(chosen)}{_with(options[0])}" if chosen is not None else _refusal(now, sizer.limits),
        why=tuple(_why_proposed(chosen, loaded, sizer.limits)) if chosen is not None else _cure(now, sizer.limits),
        hours_limit=hours,
        seeks_a_model=True,
        proposed=True,
    )


def describe(plan: Plan) -> str:
    """A model and its setting on one line."""
    config = plan.config
    model = f"{counted(config.n_layer, 'layer')} × {config.n_embd}, {count(plan.model.params_nanogpt)} parameters"
    batch = f"{config.batch_size} × {config.gradient_accumulation_steps} sequences"
    hours = f", {plan.time.hours:,.1f} h" if plan.time else ""
    return f"{model}, as {batch} in {plan.memory.total_mib:,.0f} MiB{hours}"


def _with(option: Option) -> str:
    """The settings for the model beside the batch."""
    changes = {key: value for key, value in option.changes.items() if key in MAKES_ROOM}
    return f", with {setting(changes)}" if changes else ""


def _merit(option: Option) -> str:
    return "in GPT-2's proportions" if option.name == IN_PROPORTION else option.name


def _superlative(option: Option) -> str:
    """What distinguishes the first model; others may have more parameters in untried proportions."""
    if option.name == IN_PROPORTION:
        return "The largest model in GPT-2's proportions"
    return f"{option.name[0].upper()}{option.name[1:]}"


def _size(shape: DepthAndWidth) -> str:
    return f"{counted(shape.n_layer, 'layer')} × {shape.n_embd}"


def _near(ladder: list[DepthAndWidth], place: int) -> list[DepthAndWidth]:
    """The proposed size, and clearly smaller and larger ones, to show the trade-off."""
    sizes = [ladder[place]]
    for direction in (-1, 1):
        reached, steps = place, 0
        for index in range(place + direction, len(ladder) if direction > 0 else -1, direction):
            grown = ladder[index].block_parameters / ladder[reached].block_parameters
            if steps < NEIGHBOURS and max(grown, 1 / grown) >= 1.35:
                sizes.append(ladder[index])
                reached, steps = index, steps + 1
    return sizes


def _proposal(option: Option, chosen: bool, hours: float | None) -> Option:
    if chosen:
        reason = "proposed"
    elif hours is not None and (option.hours or 0.0) > hours:
        reason = f"takes longer than {hours:g} h"
    elif option.plan.data.tokens_per_param < TOKENS_PER_PARAMETER:
        reason = "too large for the tokens"
    else:
        reason = "smaller: it learns less from the same tokens"
    return msgspec.structs.replace(option, reason=reason)


def _advice(shape: DepthAndWidth, plan: Plan) -> str:
    per = plan.data.tokens_per_param
    rate = learning_rate(shape.n_embd, shape.block_parameters)
    return f"{figure(per)} tokens a parameter; a learning rate of {rate:g} suits this width"


def _parameters(option: Option) -> int:
    return option.plan.model.params_nanogpt


def _safest(options: list[Option]) -> int | None:
    """The option with the most room, if that exceeds the prediction's error."""
    safe = [place for place, option in enumerate(options) if is_safe(option.plan)]
    return max(safe, key=lambda place: options[place].plan.memory.headroom_mib or 0.0, default=None)


def _refusal(smallest: Plan, limits: Limits) -> str:
    """Which of the limits even the smallest model exceeds."""
    size = f"{counted(smallest.config.n_layer, 'layer')} × {smallest.config.n_embd}"
    if _too_few_tokens(smallest, limits):
        wanted = TOKENS_PER_PARAMETER * smallest.model.params_nanogpt
        tokens = limits.tokens or smallest.data.total_tokens
        return (
            f"No: {count(tokens)} {'token is' if tokens == 1 else 'tokens are'} too few: the "
            f"smallest that is proposed, {size} with {count(smallest.model.params_nanogpt)} parameters, wants "
            f"{count(wanted)}, 20 a parameter"
        )
    if not is_safe(smallest):
        surely = " surely" if smallest.memory.fits else ""
        return f"No: even {describe(smallest)} does not{surely} fit {smallest.cards}"
    if smallest.time is None:
        return f"No: how long even {size} takes on {smallest.cards} is not known, so no hours can be kept"
    return f"No: even {describe(smallest)}, takes longer on {smallest.cards} than the {limits.hours:g} h given"


def _cure(smallest: Plan, limits: Limits) -> tuple[str]:
    """What the user would have to change."""
    if _too_few_tokens(smallest, limits):
        return ("give it more tokens or steps, or name the model with a config or --n_layer and --n_embd",)
    if not is_safe(smallest):
        batch = "a smaller batch_size, " if smallest.config.batch_size > 1 else ""  # above 1 only if the user set it
        return (f"give it {batch}a shorter block_size or a larger card",)
    if smallest.time is None:
        return ("give the card's --gpu_tflops and --gpu_gbs",)
    return ("give it more hours, fewer tokens or a faster card",)


def _too_few_tokens(smallest: Plan, limits: Limits) -> bool:
    wanted = TOKENS_PER_PARAMETER * smallest.model.params_nanogpt
    return (limits.tokens or smallest.data.total_tokens) < wanted


def _why_largest(now: Plan, options: list[Option]) -> Iterator[str]:
    config = now.config
    asked = "fits as it is" if now.memory.fits else "does not fit as it is"
    batch = f"{config.batch_size} × {config.gradient_accumulation_steps}"
    yield f"asked: {counted(config.n_layer, 'layer')} × {config.n_embd}, {batch}; it {asked}"
    if options and (greatest := max(options, key=_parameters)) is not options[0]:
        yield (
            f"more parameters, in other proportions: {greatest.name}, {count(_parameters(greatest))} where the first "
            f"option has {count(_parameters(options[0]))}"
        )
    for option in options:
        shape = DepthAndWidth(option.plan.config.n_layer, option.plan.config.n_embd)
        yield f"{option.name} ({_size(shape)}, {name_of(option)}): {option.effect}"
    yield (
        "heads are of 64, as every GPT-2 has them: tensor cores and flash attention run them at full speed; depth and "
        "width may be traded within wide bounds at equal size (Kaplan et al. 2020, section 3.1)"
    )


def _why_proposed(plan: Plan, loaded: LoadedConfig, limits: Limits) -> Iterator[str]:
    data, hours, length = plan.data, limits.hours, _length(plan, loaded, limits)
    yield f"tokens: {count(data.total_tokens)}, {length}; that is {figure(data.tokens_per_param)} a parameter"
    kept = [f"trains in {hours:g} h" if hours is not None else "", "fits", "has 20 tokens a parameter or more"]
    yield f"size: the largest near GPT-2's proportions that {', '.join(limit for limit in kept if limit)}"
    if data.epochs is not None:
        more = (
            "more than the 4 that are about as good as new data: get more data, or train a larger model on fewer tokens"
        )
        good = "within the 4 that are about as good as new data" if data.epochs <= GOOD_PASSES else more
        yield f"data: {data.epochs:.2f} passes over {count(data.dataset_tokens or 0)}, {good} (Muennighoff et al. 2023)"
    yield _rate(plan, loaded)
    yield _batch(plan, loaded)


def _length(plan: Plan, loaded: LoadedConfig, limits: Limits) -> str:
    """What the length of the run is based on."""
    if limits.tokens is None:
        given = f"max_iters = {plan.config.max_iters} as given"
        return given if loaded.said("max_iters") else "20 a parameter (Hoffmann et al. 2022, Chinchilla)"
    if plan.data.total_tokens <= 1.01 * limits.tokens:
        return "as asked"
    return f"the {count(limits.tokens)} asked for in whole steps"


def _rate(plan: Plan, loaded: LoadedConfig) -> str:
    config = plan.config
    source = rate_source(config.n_embd)
    origin = "as given" if loaded.said("learning_rate") else f"for this size ({source})"
    end = f"{config.min_lr:g} as given" if loaded.said("min_lr") else "a tenth"
    top = f"learning rate: {config.learning_rate:g} {origin}"
    return f"{top}, decayed to {end}, after {config.warmup_iters} steps of warm-up"


def _batch(plan: Plan, loaded: LoadedConfig) -> str:
    config = plan.config
    keys = [key for key in ("batch_size", "gradient_accumulation_steps") if loaded.said(key)]
    step = f"batch: {plan.data.tokens_per_step:,} tokens a step"
    rule = f"half a million up to 760 M parameters; less for a run of fewer than {FEWEST_STEPS:,} steps"
    source = "" if len(keys) == 2 else f" (Brown et al. 2020: {rule})"
    choice = f"{' and '.join(keys)} as given" if keys else f"the fastest that fits under {PROGRAMS[config.trainer]}"
    return f"{step}{source}, in {config.batch_size} × {config.gradient_accumulation_steps}, {choice}"
