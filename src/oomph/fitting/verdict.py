"""A fit in sentences: the verdict on one line, what explains it, a reason beside each option, and the patch that keeps
nanoGPT's training step from returning its logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from oomph.devices import Device, all_devices
from oomph.fitting.result import KeyValue, Option
from oomph.fitting.search import is_evaluating, is_safe
from oomph.planning.plan import PROGRAMS, Plan

WORTH_SAYING_MIB = 100.0
WORTH_SAYING_HOURS = 1.01  # times longer

# nanoGPT's model.py: the line of `forward` after which the patch goes, and the patch.
AFTER = "loss = F.cross_entropy("
LINES = (
    "            if self.training:",
    "                logits = None  # the training loop reads the loss alone",
)
PATCH = f"""\
model.py, in GPT.forward, right after the line that begins "{AFTER}":

{chr(10).join(LINES)}
"""
WHY_SAFE = (
    "train.py's loop takes `logits, loss = model(X, Y)` and never looks at the logits; evaluation and sampling run in "
    "eval mode and get them as before. Loss and gradients are the same numbers. What goes is the memory: compiled, "
    "returned logits may not be overwritten by their own gradient, and the backward is handed a tensor of zeros of "
    "their size besides."
)


def setting(changes: dict[str, KeyValue]) -> str:
    """Changes as they are written in a config: "batch_size = 8, gradient_accumulation_steps = 64"."""
    return ", ".join(f"{key} = {value!r}" for key, value in changes.items())


def name_of(option: Option) -> str:
    """The program that runs it: nanoGPT, nanoGPT with the patch, oomph train."""
    return PROGRAMS[option.trainer] + (" with the patch" if option.patched else "")


def verdict(now: Plan, options: Sequence[Option], best: int | None, hours: float | None) -> str:
    """The answer on one line."""
    program = now.program
    card = now.cards
    if best is None:
        return f"No: nothing tried fits {card}; {_leanest(options)}"
    chosen = options[best]
    late = _late(chosen, hours)
    if chosen.kind != "same":
        return f"No: nothing that keeps the training as it is fits {card}; {_leanest(options)}"
    if not chosen.changes:
        margin = f"{now.memory.total_mib:,.0f} MiB, {now.memory.headroom_mib:,.0f} free{_only_just(chosen)}"
        return f"{'Too slow' if late else 'Yes'}: {program} fits as it is ({margin}){late}"
    cure = f"{setting({k: v for k, v in chosen.changes.items() if k not in ('trainer', 'return_logits')})}"
    how = ", ".join(part for part in (name_of(chosen) if _other(now, chosen) else "", cure) if part)
    figures = f"{chosen.plan.memory.total_mib:,.0f} MiB{_pace(chosen, bool(late))}{_only_just(chosen)}"
    answer = "Too slow" if late else "Yes"
    if now.memory.fits:
        gain = 100 * ((chosen.tokens_per_s or 1) / (now.time.tokens_per_s if now.time else 1) - 1)
        return f"{answer}: it fits as it is, and {how} is {gain:.0f} % faster: {figures}{late}"
    missing = -(now.memory.headroom_mib or 0.0)
    answer = "Too slow" if late else "Yes, with a change"
    return f"{answer}: {program} lacks {missing:,.0f} MiB; {how} fits: {figures}{late}"


def _other(now: Plan, chosen: Option) -> bool:
    return chosen.trainer != now.config.trainer or (chosen.patched and bool(now.config.return_logits))


def _pace(option: Option, late: bool) -> str:
    """Tokens a second and hours; no hours if the verdict then says that they are too many."""
    if option.tokens_per_s is None:
        return ""
    return f", {option.tokens_per_s:,.0f} tokens/s" + ("" if late else f", {option.hours:,.1f} h")


def _only_just(option: Option) -> str:
    if option.plan.memory.retries:
        return ", and only just: it must give cached memory back, which costs time"
    return "" if option.plan.memory.is_sure else ", but not surely"


def _late(option: Option, hours: float | None) -> str:
    if hours is None or option.hours is None or option.hours <= hours:
        return ""
    return f", but takes {option.hours:,.1f} h where {hours:g} are given"


def _leanest(options: Sequence[Option]) -> str:
    """The memory that the leanest setting needs, and by how much that is too much."""
    same = [option for option in options if option.kind == "same" and not option.fits]
    lean = min(same, key=lambda option: option.plan.memory.total_mib)
    missing = -(lean.plan.memory.headroom_mib or 0.0)
    return f"the leanest setting needs {lean.plan.memory.total_mib:,.0f} MiB, {missing:,.0f} too many ({name_of(lean)})"


def why(
    now: Plan, options: Sequence[Option], best: int | None, safest: int | None, hours: float | None
) -> Iterator[str]:
    """What explains the verdict, a sentence each."""
    if not now.memory.fits:
        yield _what_fills(now)
    yield from _unchanged_elsewhere(now, options)
    yield from _price_of_halving(now, options)
    yield from _compile(now, options)
    if best is not None and options[best].kind == "same":
        yield from _thin(options[best])
        yield from _margin(options, best, safest)
    else:
        yield from _nearest(options, best)
        yield from _thin(options[best]) if best is not None else ()
    if best is not None:
        yield from _evaluation(options, best)
    if best is not None and _late(options[best], hours):
        yield from _in_the_hours(options[best], hours or 0.0)


def _what_fills(now: Plan) -> str:
    first, second = sorted(now.memory.breakdown, key=lambda part: -part.mib)[:2]
    return (
        f"{now.program} is fullest in {now.memory.peak_at}: {first.mib:,.0f} MiB of {first.name} and "
        f"{second.mib:,.0f} of {second.name}, of {now.memory.allocated_mib:,.0f} allocated"
    )


def _unchanged_elsewhere(now: Plan, options: Sequence[Option]) -> Iterator[str]:
    """The same batch under another program, and what that program does not keep in memory."""
    if now.memory.fits:
        return
    for option in options:
        config = option.plan.config
        alike = (config.batch_size, config.gradient_accumulation_steps) == (
            now.config.batch_size,
            now.config.gradient_accumulation_steps,
        )
        if option.name == "as it is" and option.fits and alike and option.kind == "same" and _other(now, option):
            held = {part.name: part.mib for part in option.plan.memory.breakdown}
            part = max(now.memory.breakdown, key=lambda part: part.mib - held.get(part.name, 0.0))
            yield (
                f"{name_of(option)} runs {config.batch_size} × {config.gradient_accumulation_steps} unchanged in "
                f"{option.plan.memory.total_mib:,.0f} MiB: {_because(option)}, so it holds "
                f"{held.get(part.name, 0.0):,.0f} MiB of {part.name} where {now.program} holds "
                f"{part.mib:,.0f}"
            )


def _because(option: Option) -> str:
    if option.plan.config.loss_chunk:
        return f"it computes the loss {option.plan.config.loss_chunk:,} tokens at a time and returns no logits"
    return "its training step returns the loss alone"


def _price_of_halving(now: Plan, options: Sequence[Option]) -> Iterator[str]:
    half = next((option for option in options if option.name == "half the micro-batch"), None)
    if half is None or half.tokens_per_s is None or now.time is None:
        return
    price = 100 * (1 - half.tokens_per_s / now.time.tokens_per_s)
    config = half.plan.config
    yield (
        f"{config.batch_size} × {config.gradient_accumulation_steps} instead of {now.config.batch_size} × "
        f"{now.config.gradient_accumulation_steps} costs {price:.1f} % of the speed on this card: the tokens are the "
        "same, the products smaller"
    )


def _compile(now: Plan, options: Sequence[Option]) -> Iterator[str]:
    eager = next((option for option in options if option.name == "not compiled"), None)
    if eager is not None and eager.saved_mib < -WORTH_SAYING_MIB:
        batch = f"{now.config.batch_size} × {now.config.gradient_accumulation_steps}"
        yield f"switching compile off does not save memory at {batch}: it takes {-eager.saved_mib:,.0f} MiB more"


def _evaluation(options: Sequence[Option], best: int) -> Iterator[str]:
    """If evaluations take much of the run: what they take, and the setting whose run is the shortest."""
    chosen = options[best]
    if chosen.plan.time is None or not is_evaluating(chosen.plan):
        return
    share = 100 * chosen.plan.time.eval_hours / chosen.plan.time.hours
    same = [each for each in options if each.fits and each.hours is not None and each.kind == chosen.kind]
    soonest = min(same, key=lambda each: each.hours or 0.0)
    place = options.index(soonest)
    batch = f"{soonest.plan.config.batch_size} × {soonest.plan.config.gradient_accumulation_steps}"
    end = "no setting shown is done sooner"
    if place != best:
        end = f"the fewest hours are option {place + 1}'s, {batch}: {soonest.hours:,.2f} against {chosen.hours:,.2f}"
    yield f"evaluations take {share:.0f} % of the best's hours, and grow with batch_size; {end}"


def _thin(option: Option) -> Iterator[str]:
    memory = option.plan.memory
    if memory.capacity_mib is not None and memory.high_mib > memory.capacity_mib:
        yield (
            f"the best option's margin is {memory.headroom_mib:,.0f} MiB, within what a prediction may miss "
            f"({memory.low_mib:,.0f} to {memory.high_mib:,.0f} MiB)"
        )


def _margin(options: Sequence[Option], best: int, safest: int | None) -> Iterator[str]:
    if safest is None:
        yield _none_safe(options, best)
    elif safest == best:
        yield "the best option is also the safest: none nearly as fast leaves more room"
    else:
        option, slower = options[safest], _slower(options[safest], options[best])
        rule = "the most room at no more than 5 % less speed" if slower <= 5 else "the fastest with a sure margin"
        yield (
            f"the safest is option {safest + 1}, {rule}: "
            f"{option.plan.memory.headroom_mib:,.0f} MiB free, {slower:.1f} % slower"
        )


def _none_safe(options: Sequence[Option], best: int) -> str:
    """The sentence that no setting of the best one's program has a sure margin, and which has more room."""
    chosen = options[best]
    none = f"no setting of {name_of(chosen)} is safe: each fits by less than the prediction may miss"
    others = [place for place, option in enumerate(options) if option.fits and name_of(option) != name_of(chosen)]
    kept = [place for place in others if options[place].kind == "same"]
    if not kept:
        return f"{none}, and no other program has one that fits"
    place = max(kept, key=lambda place: options[place].plan.memory.headroom_mib or 0.0)
    option = options[place]
    sure = "a sure margin" if is_safe(option.plan) else "not sure either"
    pace = _slower(option, chosen)
    speed = f"{abs(pace):.1f} % {'slower' if pace > 0 else 'faster'}"
    free = f"{option.plan.memory.headroom_mib:,.0f} MiB free"
    return f"{none}; the roomiest is option {place + 1}, under {name_of(option)}: {free}, {sure}, {speed}"


def _slower(option: Option, other: Option) -> float:
    """By how many percent it is slower; negative if it is faster."""
    return 100 * (1 - (option.tokens_per_s or 1.0) / (other.tokens_per_s or 1.0))


def _nearest(options: Sequence[Option], best: int | None) -> Iterator[str]:
    if best is not None:
        option = options[best]
        need = f"{option.plan.memory.total_mib:,.0f} MiB"
        yield f"the nearest that fits: {setting(option.changes)} ({need}): {option.effect}"
    same = [option for option in options if option.kind == "same"]
    lean = min(same, key=lambda option: option.plan.memory.total_mib)
    card = smallest_card(lean.plan.memory.total_mib)
    if card is not None:
        yield (
            f"the smallest card for the same training is, at its leanest setting, the {card.name} with "
            f"{card.usable_mib:,} MiB for a process"
        )


def _in_the_hours(option: Option, hours: float) -> Iterator[str]:
    if option.hours:
        share = hours / option.hours
        yield (
            f"in {hours:g} h it gets {100 * share:.0f} % of the way: "
            f"{option.plan.data.total_tokens * share / 1e9:.2f} B tokens, "
            f"{int(option.plan.config.max_iters * share):,} steps"
        )


def with_reason(
    option: Option, options: Sequence[Option], best: int | None, safest: int | None, hours: float | None
) -> Option:
    """The option with a sentence on why to take it or not."""
    return msgspec.structs.replace(option, reason=_reason(option, options, best, safest, hours))


def _reason(
    option: Option, options: Sequence[Option], best: int | None, safest: int | None, hours: float | None
) -> str:
    memory = option.plan.memory
    if not option.fits:
        return f"{-(memory.headroom_mib or 0.0):,.0f} MiB too many"
    if memory.retries:
        return "only just: it must give cached memory back, which costs time"
    late = ", too long" if _late(option, hours) else ""
    if best is not None and option is options[best]:
        also = ", the safest" if safest == best else "" if memory.is_sure else ", not surely"
        return f"best{also}{late}"
    if safest is not None and option is options[safest]:
        return f"safest: {memory.headroom_mib:,.0f} MiB free{late}"
    if best is None or option.tokens_per_s is None or options[best].tokens_per_s is None:
        return "fits"
    if option.kind == "different":
        return f"last resort{late}"
    change = 100 * (option.tokens_per_s / (options[best].tokens_per_s or 1.0) - 1)
    speed = "as fast" if abs(change) < 0.05 else f"{abs(change):.1f} % {'faster' if change > 0 else 'slower'}"
    return f"{speed}{_done(option, options[best], change)}{late}"


def _done(option: Option, best: Option, change: float) -> str:
    """A sentence if the order by hours differs from that by steps: evaluations take whole batches."""
    hours, others = option.hours or 0.0, best.hours or 0.0
    if change < 0 and hours < others / WORTH_SAYING_HOURS:
        return " a step, but done sooner"
    return " a step, but done later" if change > 0 and hours > others * WORTH_SAYING_HOURS else ""


def smallest_card(need_mib: float) -> Device | None:
    """The card with the least memory on which a process can use that much; None if there is none."""
    cards = [card for card in all_devices() if card.kind == "cuda" and card.usable_mib >= need_mib]
    return min(cards, key=lambda card: (card.usable_mib, -(card.tflops_fp16 or 0.0)), default=None)
