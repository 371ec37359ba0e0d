"""What a report of plans says, before anyone decides how it looks.

The terminal, Markdown and SVG renderers all show this one `Summary`, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from oomph import peak
from oomph.planner import NANOGPT_PEAK_FLOPS, Plan
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


def summarise(plans: Sequence[Plan], now: datetime | None = None) -> Summary:
    """The report of one or more plans of the same run; the first is the one asked for."""
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
        over_a_step=sparkline(first, SPARKLINE_COLUMNS),
        paces=_paces(first, now or datetime.now()),
        facts=tuple(_facts(plans)),
        notes=tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
    )


def _title(plan: Plan) -> str:
    config = plan.config
    if plan.traced:
        return (
            f"{plan.program}, {count(plan.model.params)} parameters, called with {config.block_size} tokens a sequence"
        )
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
        return (_pace(plan, "as given", time.step_ms, now),)
    cases = (("at best", time.low_ms), ("likely", time.step_ms), ("at worst", time.high_ms))
    return tuple(_pace(plan, case, step_ms, now) for case, step_ms in cases)


def _pace(plan: Plan, case: str, step_ms: float, now: datetime) -> Pace:
    assert plan.time is not None
    seconds = plan.time.hours * 3600 * step_ms / plan.time.step_ms
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


def _facts(plans: Sequence[Plan]) -> list[tuple[str, str]]:
    plan = plans[0]
    facts = [(plan.program, sentence) for sentence in peak.sentences(plan)]
    facts += [(other.program, peak.sentences(other)[0]) for other in plans[1:]]
    if plan.time is not None:
        facts.append(("use", _use(plan)))
    facts.append(("data", _data(plan)))
    facts.append(("compute", _compute(plan)))
    if plan.energy is not None and plan.time is not None:
        facts.append(("energy", _energy(plan)))
    return facts


def _use(plan: Plan) -> str:
    time = plan.time
    assert time is not None
    own = f", {100 * time.mfu:.1f} % of this device's own peak" if time.mfu is not None else ""
    rate = f"{time.tflops:.1f} TFLOPS" if time.tflops >= 1 else f"{1e3 * time.tflops:.1f} GFLOPS"
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
    return (
        f"{scientific(compute.total_flops)} FLOPs in all, {scientific(compute.flops_per_step)} a step "
        f"(nanoGPT's count, {compute.flops_per_token / 1e6:,.0f} M a token)"
    )


def _energy(plan: Plan) -> str:
    energy, time = plan.energy, plan.time
    assert energy is not None and time is not None
    return (
        f"{energy.kwh:,.2f} kWh = {energy.watts:.0f} W × {time.hours:,.1f} h, the card alone; "
        f"{money(energy.cost, energy.currency)} at {energy.price_kwh:g} {energy.currency} a kWh"
    )
