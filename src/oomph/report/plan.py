"""The report of one or more plans of the same run: a `Summary`, which the web page uses too, as a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

import msgspec

from oomph.planning import peak
from oomph.planning.notes import warnings
from oomph.planning.plan import Plan
from oomph.planning.scaling import ScalePoint
from oomph.predict.cost import REST_WATTS, SUPPLY_EFFICIENCY, Energy
from oomph.predict.memory import Footprint
from oomph.predict.run_time import CHECKPOINT_BYTES_PER_S, COMPILE_HIGH, COMPILE_LOW, NANOGPT_PEAK_FLOPS, Time
from oomph.report import document as doc
from oomph.report.heading import heading
from oomph.report.timeline import area, sparkline
from oomph.units import count, counted, duration, figure, money, scientific, tflops

SPARKLINE_COLUMNS = 78
SCALING = (
    doc.Column("cards"), doc.Column("tokens/s"), doc.Column("efficiency"), doc.Column("communication, ms"),
    doc.Column("exposed, ms"), doc.Column("MiB each"), doc.Column("fits"),
)  # fmt: skip
MARKS: dict[bool | None, doc.Mark] = {True: "yes", False: "no", None: "info"}
PACES = (
    doc.Column("time", words=True),
    doc.Column("a step"),
    doc.Column("tokens/s"),
    doc.Column("the run"),
    doc.Column("done, if started now", words=True),
)


class ProgramVerdict(msgspec.Struct, frozen=True):
    """Does one program fit?"""

    program: str
    fits: bool | None  # None if the device's memory is not known
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
    verdicts: tuple[ProgramVerdict, ...]
    bars: tuple[doc.Bar, ...]
    components: tuple[str, ...]  # the rows of the memory table, in order
    over_a_step: tuple[str, str]  # the first program's memory over one step as a line of blocks, and its sections
    paces: tuple[Pace, ...]
    facts: tuple[tuple[str, str], ...]  # (heading, sentence)
    notes: tuple[str, ...]
    warning: str = ""  # what qualifies the verdicts: the first of them, for one screen


def summarise(
    plans: Sequence[Plan], lean: Plan | None = None, now: datetime | None = None, *, brief: bool = False
) -> Summary:
    """The report of one or more plans of the same run; the first is the requested one.

    `lean` is that run with a training step that returns no logits: the report says what it would save. `brief` leaves
    out the line over a step, which takes the longest.
    """
    first = plans[0]
    bars = tuple(memory_bar(plan) for plan in plans)
    names = dict.fromkeys(name for bar in bars for name, _ in bar.parts)
    about = heading(first)
    return Summary(
        title=about.text,
        setting=about.lines[0],
        device=about.lines[1],
        verdicts=tuple(verdict(plan) for plan in plans),
        bars=bars,
        components=tuple(names),
        over_a_step=("", "") if brief else sparkline(first, SPARKLINE_COLUMNS),
        paces=_paces(first, now or datetime.now()),
        facts=tuple(_facts(plans, lean)),
        notes=tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
        warning=_warning(first),
    )


def joined(first: Summary, other: Summary) -> Summary:
    """The brief report of two plans from the report of each: the same as `summarise` of both, for plans made in
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


def document(plans: Sequence[Plan], summary: Summary, scale: Sequence[ScalePoint] = ()) -> doc.Document:
    """The report: verdicts, bars, time and cost; in detail every component, pace, fact and note.

    `scale` is the run on fewer cards, if several share it.
    """
    parts: list[doc.Part] = [
        *_unasked_cpu(plans[0]),
        doc.Title(summary.title, (summary.setting, summary.device), shown="detail"),
        *(doc.Verdict(verdict.text, MARKS[verdict.fits]) for verdict in summary.verdicts),
        *([doc.Verdict(summary.warning, "warning", shown="short")] if summary.warning else []),
        doc.Title(summary.title, (summary.setting, summary.device), shown="short"),  # the answer comes first
        doc.Bars(summary.bars),
        _memory_table(summary),
    ]
    if summary.over_a_step[0]:
        over = f"{summary.bars[0].program}, allocated over one optimizer step"
        parts.append(doc.Strip(over, *summary.over_a_step, shown="detail"))
    if summary.paces:
        rows = tuple(
            doc.Row((p.case, p.step, p.tokens_per_s, p.run, p.finish), "strong" if p.case == "likely" else "plain")
            for p in summary.paces
        )
        parts.append(doc.Table(PACES, (("", rows),), shown="detail"))
    parts += _scaling(scale)
    parts.append(doc.Facts(tuple(_in_a_line(plans[0])), shown="short"))
    parts.append(doc.Facts(summary.facts, shown="detail"))
    parts += doc.sentence_list("to know", summary.notes)
    more = f"every component, what holds the peak, {counted(len(summary.notes), 'note')}"
    return doc.Document(tuple(parts), more)


def _scaling(scale: Sequence[ScalePoint]) -> list[doc.Part]:
    """What more cards gain, each with as much work as the first."""
    if not scale:
        return []
    marks = {True: "yes", False: "no", None: ""}
    rows = [
        doc.Row(
            (
                str(point.cards), f"{point.tokens_per_s:,.0f}", f"{100 * point.efficiency:.0f} %",
                f"{point.communication_ms:,.0f}", f"{point.exposed_ms:,.0f}", figure_mib(point.total_mib),
                marks[point.fits],
            )
        )
        for point in scale
    ]  # fmt: skip
    parts: list[doc.Part] = [doc.Table(SCALING, (("", tuple(rows)),), shown="detail")]
    if bound := next((point.cards for point in scale if point.binds), None):
        text = f"From {bound} cards on the link binds: collectives take longer than the arithmetic that hides them"
        parts.append(doc.Verdict(text, "info", shown="detail"))
    return parts


def _unasked_cpu(plan: Plan) -> list[doc.Part]:
    """A first note if the plan is for the CPU because no card was named or found."""
    if plan.device.kind != "cpu" or plan.loaded.said("device"):
        return []
    text = "No GPU here, and none named: this is a plan for this machine's CPU. --gpu 'RTX 4070' plans a card"
    return [doc.Verdict(text, "warning", shown="short")]


def _warning(plan: Plan) -> str:
    """The first thing that qualifies the verdict; the notes have all of them."""
    if plan.loaded.foreign:
        return (
            f"Without {', '.join(plan.loaded.foreign)}: keys of the fork alone, whose memory and time are not planned"
        )
    if plan.loading is not None and plan.loading.fits is False and plan.memory.fits:
        return f"Loading the model does not fit: {plan.loading.text}".rstrip(".")
    first = [] if plan.traced else warnings(plan.config, plan.device)[:1]
    return "".join(first).rstrip(".")


def picture(plans: Sequence[Plan]) -> doc.Picture:
    """A bar for each program, and its memory over one step."""
    about = heading(plans[0])
    return doc.Picture(
        about.text,
        about.lines[0],
        bars=doc.Bars(tuple(memory_bar(plan) for plan in plans)),
        device=plans[0].device.name,
        areas=tuple(area(plan) for plan in plans),
        tip=" ".join(f"{verdict(plan).text}." for plan in plans),
    )


def scaling_picture(scale: Sequence[ScalePoint]) -> doc.Picture:
    """Tokens a second on more and more cards, beside as many times those of one."""
    alone = scale[0].tokens_per_s / scale[0].cards
    lines = (
        doc.Line("planned", tuple((point.cards, point.tokens_per_s) for point in scale), marked=True),
        doc.Line("each card as the first", tuple((point.cards, alone * point.cards) for point in scale), index=1),
    )
    bound = next((point.cards for point in scale if point.binds), None)
    told = "the link does not bind" if bound is None else f"from {bound} cards on the link binds"
    last = scale[-1]
    return doc.Picture(
        f"{last.cards} cards: {100 * last.efficiency:.0f} % of {last.cards} times one card's tokens a second",
        f"Each card has as much work as the first; {told}",
        charts=(doc.Chart("Scaling", "cards", "tokens/s", lines, from_zero=True),),
        names=tuple(line.name for line in lines),
    )


def _memory_table(summary: Summary) -> doc.Table:
    rows = []
    for component in summary.components:
        sizes = (dict(bar.parts).get(component) for bar in summary.bars)
        rows.append(doc.Row((component, *("" if size is None else figure_mib(size) for size in sizes)), part=component))
    rows.append(doc.Row(("in all", *(figure_mib(bar.total_mib) for bar in summary.bars)), "strong"))
    columns = (doc.Column("memory, MiB, at the peak", words=True), *(doc.Column(bar.program) for bar in summary.bars))
    return doc.Table(columns, (("", tuple(rows)),), shown="detail")


def figure_mib(size_mib: float) -> str:
    """MiB as a figure in a table."""
    return f"{size_mib:,.0f}" if size_mib >= 10 else f"{size_mib:,.1f}"


def _in_a_line(plan: Plan) -> Iterator[tuple[str, str]]:
    """Time and cost, one line each."""
    time, energy = plan.time, plan.energy
    if time is None:
        yield "time", "not predicted: see the notes"
        return
    span = "" if time.basis == "given" else f" ({_between(3600 * time.low_hours, 3600 * time.high_hours)})"
    pace = f"{duration(time.step_ms / 1e3)} a step, {time.tokens_per_s:,.0f} tokens/s"
    if time.communication_ms:
        waits = "all hidden" if time.exposed_ms < 0.005 * time.step_ms else f"{time.exposed_ms:,.0f} ms exposed"
        pace += f", {time.communication_ms:,.0f} ms of communication ({waits})"
    samples = plan.config.num_samples
    run = f"{counted(plan.config.max_iters, 'step')}{f' for {samples:,} samples' if samples else ''}"
    yield "time", f"{pace}; {run}: {duration(3600 * time.hours)}{span}"
    if energy is not None:
        power = f"{money(energy.cost, energy.currency)} of power ({energy.machine_cost:,.2f} with the whole machine)"
        yield "cost", f"{energy.kwh:,.1f} kWh, {power}{_rent(energy)}"


def _between(low_s: float, high_s: float) -> str:
    """Two durations, with the unit written once if it is the same."""
    low, high = duration(low_s), duration(high_s)
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(unit) else low} to {high}"


def _rent(energy: Energy) -> str:
    if energy.rent is not None:
        return f"; rented {money(energy.rent, energy.currency)}"
    return "" if energy.rent_usd_low is None else f"; rented from {money(energy.rent_usd_low, 'USD')}"


def verdict(plan: Plan) -> ProgramVerdict:
    program, memory = plan.program, plan.memory
    need = _need(memory)
    if memory.fits is None or memory.headroom_mib is None:
        return ProgramVerdict(program, None, f"{program} needs {need}")
    sure = f"({chance(memory)})" if memory.is_sure else f"(not surely: {chance(memory)})"
    if memory.retries:
        only_just = f"fits {sure}, but only just: it fills the card and has to give cached memory back"
        return ProgramVerdict(program, True, f"{program} {only_just}")
    if memory.fits:
        free = f"{need}, {memory.headroom_mib:,.0f} MiB free"
        return ProgramVerdict(program, True, f"{program} fits {sure}: {free}")
    missing = f"{need}, {-memory.headroom_mib:,.0f} MiB too many"
    return ProgramVerdict(program, False, f"{program} does not fit {sure}: {missing}")


def chance(memory: Footprint) -> str:
    """The probability of the verdict, "97 %": that it fits or, if it does not, that it does not. At most 99 %."""
    p = (memory.p_fits or 0.0) if memory.fits else 1 - (memory.p_fits or 0.0)
    return f"{min(99, round(100 * p))} %"


def _need(memory: Footprint) -> str:
    """12.4 of 11.6 GiB (12.2 to 12.6); in MiB if it is less than one GiB."""
    total, low, high, room = memory.total_mib, memory.low_mib, memory.high_mib, memory.capacity_mib
    if total < 1024:
        return f"{total:,.0f} MiB ({low:,.0f} to {high:,.0f})"
    of = "" if room is None else f" of {room / 1024:,.1f}"
    return f"{total / 1024:,.1f}{of} GiB ({low / 1024:,.1f} to {high / 1024:,.1f})"


def memory_bar(plan: Plan) -> doc.Bar:
    """The parts of the process's memory at the peak."""
    memory = plan.memory
    parts = [(part.name, part.mib) for part in memory.breakdown]
    unused = memory.reserved_mib - memory.allocated_mib
    parts += [("reserved, unused", unused)] if unused > 0 else []
    context = "Python and torch" if plan.device.kind == "cpu" else "CUDA context"
    parts += [(context, memory.context_mib)] if memory.context_mib else []
    return doc.Bar(plan.program, tuple(parts), memory.total_mib, memory.capacity_mib)


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


def _facts(plans: Sequence[Plan], lean: Plan | None) -> list[tuple[str, str]]:
    plan = plans[0]
    facts = [(plan.program, sentence) for sentence in peak.peak_sentences(plan, lean)]
    facts += [(other.program, peak.peak_sentences(other)[0]) for other in plans[1:]]
    if plan.time is not None:
        facts.append(("time", _parts(plan.time)))
        facts.append(("use", _use(plan)))
    facts += [("loading", plan.loading.text)] if plan.loading is not None else []
    facts.append(("data", _data(plan)))
    facts.append(("compute", _compute(plan)))
    if plan.energy is not None and plan.time is not None:
        facts += [("money", sentence) for sentence in _money(plan.energy, plan.time, plan.config.world_size)]
    return facts


def _use(plan: Plan) -> str:
    time = plan.time
    assert time is not None
    own = f", {100 * time.mfu:.1f} % of this device's own peak" if time.mfu is not None else ""
    if plan.traced or plan.config.trainer != "nanogpt":
        return f"{tflops(time.tflops)}{own}"
    return (
        f"{tflops(time.tflops)}{own}; nanoGPT will print mfu {100 * time.mfu_nanogpt:.1f} %, "
        f"because it divides by {NANOGPT_PEAK_FLOPS / 1e12:.0f} TFLOPS, an A100's, whatever the card"
    )


def _data(plan: Plan) -> str:
    data = plan.data
    epochs = (
        f", {data.epochs:.2f} passes over {count(data.dataset_tokens)}" if data.epochs and data.dataset_tokens else ""
    )
    steps = counted(plan.config.max_iters, "step")
    tokens = "1 token" if data.total_tokens == 1 else f"{count(data.total_tokens)} tokens"
    return f"{steps} = {tokens}{epochs}, {figure(data.tokens_per_param)} a parameter"


def _compute(plan: Plan) -> str:
    compute = plan.compute
    ours = plan.config.trainer in ("nanogpt", "oomph")
    weights = "6 a weight" if plan.config.method == "full" else "4 a frozen weight, 6 a trained one"
    counted = "by operation" if plan.traced else "nanoGPT's count" if ours else f"{weights}, attention in full"
    return (
        f"{scientific(compute.total_flops)} FLOPs in all, {scientific(compute.flops_per_step)} a step "
        f"({counted}, {compute.flops_per_token / 1e6:,.0f} M a token)"
    )


def _parts(time: Time) -> str:
    """The whole run's time as the sum of its parts."""
    parts = [f"steps {duration(3600 * time.train_hours)}"] if time.train_hours else []
    if time.eval_hours:
        parts.append(f"{counted(time.evaluations, 'evaluation')} {duration(3600 * time.eval_hours)}")
    if time.checkpoints:
        each, rate = f"{time.checkpoint_mib:,.0f} MiB", f"{CHECKPOINT_BYTES_PER_S / 1e6:.0f} MB/s"
        whole = duration(3600 * time.checkpoint_hours)
        parts.append(f"{counted(time.checkpoints, 'checkpoint')} of {each} {whole} (at {rate})")
    if time.compile_s:
        low, high = (duration(time.compile_s * share) for share in (COMPILE_LOW, COMPILE_HIGH))
        parts.append(f"compiling in the first step {duration(time.compile_s)} ({low} to {high})")
    return " + ".join(parts)


def _money(energy: Energy, time: Time, cards: int) -> list[str]:
    """The price of electricity for your own card and machine, or of renting one."""
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
