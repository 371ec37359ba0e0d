"""Fits whose answer is a model: the largest that a config may grow to, or a whole run from nothing."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from oomph.config import LoadedConfig
from oomph.fitting import shapes
from oomph.fitting.largest import Limits, Sizer, as_option, growing
from oomph.fitting.result import Fit, Option
from oomph.fitting.search import Searcher
from oomph.fitting.shapes import Shape
from oomph.fitting.verdict import name_of
from oomph.planner import PROGRAMS, Plan
from oomph.units import count

NEIGHBOURS = 2  # sizes shown on either side of the proposed one


def grow(loaded: LoadedConfig, searcher: Searcher, hours: float | None) -> Fit:
    """The widest, the deepest and the best-proportioned model that fits, with the config's batch and tokens."""
    now = searcher.plan(loaded)
    sizer = Sizer(loaded, searcher, Limits(hours, None), proposing=False)
    options: list[Option] = []
    for name, find in growing(sizer).items():
        shape = find()
        plan = sizer.plan(shape) if shape is not None else None
        if shape is not None and plan is not None:
            options.append(as_option(name, plan, now, _advice(shape, plan)))
    options = [
        msgspec.structs.replace(option, reason="proportions that have proved themselves" if place == 0 else "fits")
        for place, option in enumerate(options)
    ]
    limit = f" and trains in {hours:g} h" if hours is not None else ""
    if not options:
        verdict = f"No: no model of heads of 64 fits {now.device.name}{limit} with this batch and these tokens"
    else:
        verdict = f"The largest model that fits {now.device.name}{limit}: {describe(options[0].plan)}"
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


def propose(loaded: LoadedConfig, searcher: Searcher, tokens: float | None, hours: float | None) -> Fit:
    """A model and a run for a card, a time and a number of tokens; `loaded` holds whatever else was said."""
    sizer = Sizer(loaded, searcher, Limits(hours, tokens), proposing=True)
    ladder = shapes.ladder(loaded.config.vocab_size)
    best = sizer.last(ladder)
    place = ladder.index(best) if best is not None else 0
    plans = [(shape, sizer.plan(shape)) for shape in _near(ladder, place)]
    chosen = sizer.plan(best) if best is not None else None
    now = chosen or searcher.plan(sizer.config(ladder[0]))
    base = searcher.plan(loaded)
    options = [
        _proposal(as_option(_size(shape), plan, base, _advice(shape, plan)), shape == best, hours, tokens)
        for shape, plan in plans
        if plan is not None
    ]
    options.sort(key=lambda option: (option.plan is not chosen, -option.plan.model.params_nanogpt))
    return Fit(
        loaded=loaded,
        now=now,
        options=tuple(options),
        best=0 if chosen is not None else None,
        safest=0 if chosen is not None else None,
        evaluated=sizer.evaluated,
        verdict=_verdict(now, chosen, hours),
        why=tuple(_why_proposed(chosen, best, tokens, hours)),
        hours_limit=hours,
        seeks_a_model=True,
        proposed=True,
    )


def describe(plan: Plan) -> str:
    """A model and its setting on one line."""
    config = plan.config
    model = f"{config.n_layer} layers × {config.n_embd}, {count(plan.model.params_nanogpt)} parameters"
    batch = f"{config.batch_size} × {config.gradient_accumulation_steps} sequences"
    hours = f", {plan.time.hours:,.1f} h" if plan.time else ""
    return f"{model}, as {batch} in {plan.memory.total_mib:,.0f} MiB{hours}"


def _size(shape: Shape) -> str:
    return f"{shape.n_layer} layers × {shape.n_embd}"


def _near(ladder: list[Shape], place: int) -> list[Shape]:
    """The proposed size, and smaller and larger ones a good step apart, for the trade to be seen."""
    sizes = [ladder[place]]
    for direction in (-1, 1):
        reached, steps = place, 0
        for index in range(place + direction, len(ladder) if direction > 0 else -1, direction):
            grown = ladder[index].block_parameters / ladder[reached].block_parameters
            if steps < NEIGHBOURS and max(grown, 1 / grown) >= 1.35:
                sizes.append(ladder[index])
                reached, steps = index, steps + 1
    return sizes


def _proposal(option: Option, chosen: bool, hours: float | None, tokens: float | None) -> Option:
    if chosen:
        reason = "proposed"
    elif hours is not None and (option.hours or 0.0) > hours:
        reason = f"takes longer than {hours:g} h"
    elif tokens is not None and option.plan.data.tokens_per_param < shapes.TOKENS_PER_PARAMETER:
        reason = "too large for the tokens"
    else:
        reason = "smaller: it learns less from the same tokens"
    return msgspec.structs.replace(option, reason=reason)


def _advice(shape: Shape, plan: Plan) -> str:
    per = plan.data.tokens_per_param
    return f"{per:,.0f} tokens a parameter; a learning rate of {shapes.learning_rate(shape):g} suits this width"


def _safest(options: list[Option]) -> int | None:
    room = [option.plan.memory.headroom_mib or 0.0 for option in options]
    return room.index(max(room)) if room else None


def _verdict(now: Plan, chosen: Plan | None, hours: float | None) -> str:
    if chosen is None:
        smallest = f"even {describe(now)} is too much for {now.device.name}"
        return f"No: {smallest}{f' in {hours:g} h' if hours is not None else ''}"
    return f"Train {describe(chosen)}"


def _why_largest(now: Plan, options: list[Option]) -> Iterator[str]:
    config = now.config
    asked = "fits as it is" if now.memory.fits else "does not fit as it is"
    batch = f"{config.batch_size} × {config.gradient_accumulation_steps}"
    yield f"asked: {config.n_layer} layers × {config.n_embd}, {batch}; it {asked}"
    for option in options:
        shape = Shape(option.plan.config.n_layer, option.plan.config.n_embd)
        yield f"{option.name} ({_size(shape)}, {name_of(option)}): {option.effect}"
    yield (
        "heads are of 64, as every GPT-2 has them: tensor cores and flash attention run them at full speed; depth and "
        "width may be traded within wide bounds at equal size (Kaplan et al. 2020, section 3.1)"
    )


def _why_proposed(plan: Plan | None, shape: Shape | None, tokens: float | None, hours: float | None) -> Iterator[str]:
    if plan is None or shape is None:
        yield "give it more hours, fewer tokens, a shorter block_size or a larger card"
        return
    data, config = plan.data, plan.config
    length = "as asked" if tokens is not None else "20 a parameter (Hoffmann et al. 2022, Chinchilla)"
    yield f"tokens: {count(data.total_tokens)}, {length}; that is {data.tokens_per_param:,.0f} a parameter"
    limits = [f"trains in {hours:g} h" if hours is not None else "", "fits", "has 20 tokens a parameter or more"]
    yield f"size: the largest near GPT-2's proportions that {', '.join(limit for limit in limits if limit)}"
    if data.epochs is not None:
        more = (
            "more than the 4 that are about as good as new data: get more data, or train a larger model on fewer tokens"
        )
        good = "within the 4 that are about as good as new data" if data.epochs <= shapes.GOOD_PASSES else more
        yield f"data: {data.epochs:.2f} passes over {count(data.dataset_tokens or 0)}, {good} (Muennighoff et al. 2023)"
    source = "Brown et al. 2020, table 2.1" if shape.n_embd >= 768 else "Kaplan et al. 2020, equation D.1"
    yield (
        f"learning rate: {config.learning_rate:g} for this size ({source}), decayed to a tenth, after "
        f"{config.warmup_iters} steps of warm-up"
    )
    yield (
        f"batch: {data.tokens_per_step:,} tokens a step (Brown et al. 2020: half a million up to 760 M parameters), "
        f"in {config.batch_size} × {config.gradient_accumulation_steps}, the fastest that fits under "
        f"{PROGRAMS[config.trainer]}"
    )
