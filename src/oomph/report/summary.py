"""What a report of plans says, before anyone decides how it looks.

The terminal, Markdown and SVG renderers all show this one `Summary`, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from oomph import peak
from oomph.planner import Plan
from oomph.predict.cost import REST_WATTS, SUPPLY_EFFICIENCY, Energy
from oomph.predict.duration import NANOGPT_PEAK_FLOPS, Time
from oomph.predict.extras import CHECKPOINT_BYTES_PER_S, COMPILE_HIGH, COMPILE_LOW
from oomph.report.timeline import sparkline
from oomph.units import count, duration, money, scientific

SPARKLINE_COLUMNS = 78


class Bar(msgspec.Struct, frozen=True):
    """One program's memory, part by part, against what the device gives."""

    program: str
    parts: tuple[tuple[str, float], ...]  # (component, MiB)
    total_mib: float
    capacity_mib: float | None


class Verdict(msgspec.Struct, frozen=True):
    """Does one program fit?"""

    program: str
    fits: bool | None  # None where the device's memory is not known
    text: str


class Pace(msgspec.Struct, frozen=True):
    """One row of the time table."""

    case: str  # "fast", "likely", "slow", "measured"
    step: str
    tokens_per_s: str
    run: str
    finish: str


class Summary(msgspec.Struct, frozen=True):
    """A report in words and numbers."""

    title: str
    setting: str
    device: str
    verdicts: tuple[Verdict, ...]
    bars: tuple[Bar, ...]
    components: tuple[str, ...]  # the rows of the memory table, in order
    over_a_step: tuple[str, str]  # the first program's memory over one step as a line of blocks, and its sections
    paces: tuple[Pace, ...]
    facts: tuple[tuple[str, str], ...]  # (heading, sentence)
    notes: tuple[str, ...]


def summarise(plans: Sequence[Plan], now: datetime | None = None, *, brief: bool = False) -> Summary:
    """The report of one or more plans of the same run; the first is the one asked for.

    `brief` leaves out what takes longest: the line over a step, and what needs another simulation to be told.
    """
    first = plans[0]
    bars = tuple(_bar(plan) for plan in plans)
    names = dict.fromkeys(name for bar in bars for name, _ in bar.parts)
    return Summary(
        title=_title(first),
        setting=_setting(first),
        device=_device(first),
        verdicts=tuple(_verdict(plan) for plan in plans),
        bars=bars,
        components=tuple(names),
        over_a_step=("", "") if brief else sparkline(first, SPARKLINE_COLUMNS),
        paces=_paces(first, now or datetime.now()),
        facts=tuple(_facts(plans, brief)),
        notes=tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
    )


def joined(first: Summary, other: Summary) -> Summary:
    """The brief report of two plans from the reports of each: what `summarise` says of both, where the two were made in
    different processes."""
    own = sum(heading == first.verdicts[0].program for heading, _ in first.facts)
    return msgspec.structs.replace(
        first,
        verdicts=(*first.verdicts, *other.verdicts),
        bars=(*first.bars, *other.bars),
        components=tuple(dict.fromkeys((*first.components, *other.components))),
        facts=(*first.facts[:own], other.facts[0], *first.facts[own:]),
        notes=tuple(dict.fromkeys((*first.notes, *other.notes))),
    )


def _title(plan: Plan) -> str:
    config = plan.config
    if plan.traced:
        frozen = f", {count(plan.model.params_frozen)} of them frozen" if plan.model.params_frozen else ""
        called = f"called with {config.block_size} tokens a sequence"
        return f"{plan.program}, {count(plan.model.params)} parameters{frozen}, {called}"
    return (
        f"GPT, {count(plan.model.params_nanogpt)} parameters: {config.n_layer} layers × {config.n_embd}, "
        f"{config.n_head} heads, block {config.block_size}, vocabulary {config.vocab_size}"
    )


def _setting(plan: Plan) -> str:
    config = plan.config
    devices = f" on {config.world_size} devices" if config.world_size > 1 else ""
    extras = [f"first {config.checkpoint_layers} blocks checkpointed"] if config.checkpoint_layers else []
    extras += [f"dropout {config.dropout:g}"] if config.dropout else []
    how = "compiled" if config.compile else "eager"
    return ", ".join(
        [
            f"{_of(config.batch_size, 'sequence')} × "
            f"{_of(config.gradient_accumulation_steps, 'micro-step')}{devices} = "
            f"{plan.data.tokens_per_step:,} tokens a step",
            f"{config.dtype}{'' if config.autocast or config.dtype == 'float32' else ' throughout'}",
            f"{config.optimizer} ({config.optimizer_loop})",
            f"{how} with torch {config.torch_version}",
            *extras,
        ]
    )


def _of(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _device(plan: Plan) -> str:
    memory = plan.memory
    if memory.capacity_mib is None:
        return plan.device.name
    return f"{plan.device.name}, {memory.capacity_mib:,.0f} MiB for a process"


def _verdict(plan: Plan) -> Verdict:
    program, memory = plan.program, plan.memory
    need = f"{memory.total_mib:,.0f} MiB (from {memory.low_mib:,.0f} to {memory.high_mib:,.0f})"
    if memory.fits is None or memory.headroom_mib is None:
        return Verdict(program, None, f"{program} needs {need}")
    if memory.retries:
        return Verdict(
            program, True, f"{program} fits, but only just: it fills the card and has to give cached memory back"
        )
    if memory.fits and memory.capacity_mib is not None and memory.high_mib > memory.capacity_mib:
        doubt = f"but not surely: {memory.headroom_mib:,.0f} are left, and it may take up to {memory.high_mib:,.0f}"
        return Verdict(program, True, f"{program} fits, {doubt}")
    if memory.fits:
        return Verdict(program, True, f"{program} fits: it needs {need}, and {memory.headroom_mib:,.0f} are left")
    return Verdict(program, False, f"{program} does not fit: it needs {need}, {-memory.headroom_mib:,.0f} too many")


def _bar(plan: Plan) -> Bar:
    memory = plan.memory
    parts = [(part.name, part.mib) for part in memory.breakdown]
    unused = memory.reserved_mib - memory.allocated_mib
    parts += [("reserved, unused", unused)] if unused > 0 else []
    context = "Python and torch" if plan.device.kind == "cpu" else "CUDA context"
    parts += [(context, memory.context_mib)] if memory.context_mib else []
    return Bar(plan.program, tuple(parts), memory.total_mib, memory.capacity_mib)


def _paces(plan: Plan, now: datetime) -> tuple[Pace, ...]:
    time = plan.time
    if time is None:
        return ()
    if time.basis == "given":
        return (_pace(plan, "as given", time.step_ms, time.hours, now),)
    cases = (
        ("at best", time.low_ms, time.low_hours),
        ("likely", time.step_ms, time.hours),
        ("at worst", time.high_ms, time.high_hours),
    )
    return tuple(_pace(plan, *case, now) for case in cases)


def _pace(plan: Plan, case: str, step_ms: float, hours: float, now: datetime) -> Pace:
    seconds = hours * 3600
    return Pace(
        case=case,
        step=duration(step_ms / 1e3),
        tokens_per_s=f"{plan.data.tokens_per_step / step_ms * 1e3:,.0f}",
        run=duration(seconds),
        finish=_finish(now, seconds),
    )


def _finish(now: datetime, seconds: float) -> str:
    try:
        end = now + timedelta(seconds=seconds)
    except OverflowError:
        return "not in this era"
    return end.strftime("%a %d %b %H:%M" if seconds < 86400 * 300 else "%b %Y")


def _facts(plans: Sequence[Plan], brief: bool) -> list[tuple[str, str]]:
    plan = plans[0]
    facts = [(plan.program, sentence) for sentence in peak.sentences(plan, simulate=not brief)]
    facts += [(other.program, peak.sentences(other, simulate=False)[0]) for other in plans[1:]]
    if plan.time is not None:
        facts.append(("time", _parts(plan.time)))
        facts.append(("use", _use(plan)))
    facts.append(("data", _data(plan)))
    facts.append(("compute", _compute(plan)))
    if plan.energy is not None and plan.time is not None:
        facts += [("money", sentence) for sentence in _money(plan.energy, plan.time, plan.config.world_size)]
    return facts


def _use(plan: Plan) -> str:
    time = plan.time
    assert time is not None
    own = f", {100 * time.mfu:.1f} % of this device's own peak" if time.mfu is not None else ""
    rate = f"{time.tflops:.1f} TFLOPS" if time.tflops >= 1 else f"{1e3 * time.tflops:.1f} GFLOPS"
    if plan.traced:
        return f"{rate}{own}"
    return (
        f"{rate}{own}; nanoGPT will print mfu {100 * time.mfu_nanogpt:.1f} %, "
        f"because it divides by {NANOGPT_PEAK_FLOPS / 1e12:.0f} TFLOPS, an A100's, whatever the card"
    )


def _data(plan: Plan) -> str:
    data = plan.data
    epochs = (
        f", {data.epochs:.2f} passes over {count(data.dataset_tokens)}" if data.epochs and data.dataset_tokens else ""
    )
    return (
        f"{plan.config.max_iters:,} steps = {count(data.total_tokens)} tokens{epochs}, "
        f"{data.tokens_per_param:,.0f} a parameter"
    )


def _compute(plan: Plan) -> str:
    compute = plan.compute
    counted = "by operation" if plan.traced else "nanoGPT's count"
    return (
        f"{scientific(compute.total_flops)} FLOPs in all, {scientific(compute.flops_per_step)} a step "
        f"({counted}, {compute.flops_per_token / 1e6:,.0f} M a token)"
    )


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _parts(time: Time) -> str:
    """The whole run as the sum of what it does."""
    parts = [f"steps {duration(3600 * time.train_hours)}"] if time.train_hours else []
    if time.eval_hours:
        parts.append(f"{_many(time.evaluations, 'evaluation')} {duration(3600 * time.eval_hours)}")
    if time.checkpoints:
        each, rate = f"{time.checkpoint_mib:,.0f} MiB", f"{CHECKPOINT_BYTES_PER_S / 1e6:.0f} MB/s"
        whole = duration(3600 * time.checkpoint_hours)
        parts.append(f"{_many(time.checkpoints, 'checkpoint')} of {each} {whole} (at {rate})")
    if time.compile_s:
        low, high = (duration(time.compile_s * share) for share in (COMPILE_LOW, COMPILE_HIGH))
        parts.append(f"compiling in the first step {duration(time.compile_s)} ({low} to {high})")
    return " + ".join(parts)


def _money(energy: Energy, time: Time, cards: int) -> list[str]:
    """Electricity for one's own card and for the machine around it; rent for somebody else's."""
    price = f"{energy.price_kwh:g} {energy.currency}"
    basis = "measured" if energy.measured else "likely in training"
    whole = "the card" if cards == 1 else f"{cards} cards"
    hours, efficiency = f"{time.hours:,.1f} h", f"{SUPPLY_EFFICIENCY:.0%}".replace("%", " %")
    said = [
        f"{whole}: {energy.watts:,.0f} W ({basis}) × {hours} = {energy.kwh:,.2f} kWh × {price} = "
        f"{money(energy.cost, energy.currency)}",
        f"the whole machine: {energy.machine_watts:,.0f} W × {hours} = {energy.machine_kwh:,.2f} kWh × {price} = "
        f"{money(energy.machine_cost, energy.currency)}; assumed: {REST_WATTS:.0f} W beside {whole}, a power supply of "
        f"{efficiency}",
    ]
    if energy.rent is not None and energy.price_hour is not None:
        rate = f"{energy.price_hour:g} {energy.currency} × {time.hours:,.1f} h"
        said.append(f"rented: {rate}{f' × {cards} cards' if cards > 1 else ''} = {money(energy.rent, energy.currency)}")
    elif energy.rent_usd_low is not None and energy.rent_usd_high is not None:
        low, high = (f"{rent:,.2f}" for rent in (energy.rent_usd_low, energy.rent_usd_high))
        span = low if low == high else f"{low} to {high}"
        said.append(f"rented on demand: {span} USD, at 2026's published prices (--price_hour)")
    return said
