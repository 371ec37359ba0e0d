"""The report of one or more plans of the same run: its `Summary`, which the web page gets too, as a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

import msgspec

from oomph.planning import peak
from oomph.planning.notes import warnings
from oomph.planning.plan import Plan
from oomph.predict.cost import REST_WATTS, SUPPLY_EFFICIENCY, Energy
from oomph.predict.memory import Footprint
from oomph.predict.run_time import CHECKPOINT_BYTES_PER_S, COMPILE_HIGH, COMPILE_LOW, NANOGPT_PEAK_FLOPS, Time
from oomph.report import document as doc
from oomph.report.timeline import area, sparkline
from oomph.step.build import keys_read
from oomph.units import count, counted, duration, figure, memory_size, money, scientific, tflops

SPARKLINE_COLUMNS = 78
MARKS: dict[bool | None, doc.Mark] = {True: "yes", False: "no", None: "info"}
PACES = (
    doc.Column("time", words=True),
    doc.Column("a step"),
    doc.Column("tokens/s"),
    doc.Column("the run"),
    doc.Column("done, if started now", words=True),
)
ARCHITECTURES = {  # as their makers write them
    "gpt2": "GPT", "llama": "Llama", "mistral": "Mistral", "mixtral": "Mixtral", "qwen2": "Qwen2", "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE", "olmo2": "OLMo2", "phi3": "Phi-3", "gemma2": "Gemma 2", "gemma3_text": "Gemma 3",
    "gpt_neox": "GPT-NeoX", "opt": "OPT", "nanochat": "nanochat",
}  # fmt: skip


class ProgramVerdict(msgspec.Struct, frozen=True):
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
    verdicts: tuple[ProgramVerdict, ...]
    bars: tuple[doc.Bar, ...]
    components: tuple[str, ...]  # the rows of the memory table, in order
    over_a_step: tuple[str, str]  # the first program's memory over one step as a line of blocks, and its sections
    paces: tuple[Pace, ...]
    facts: tuple[tuple[str, str], ...]  # (heading, sentence)
    notes: tuple[str, ...]


def summarise(
    plans: Sequence[Plan], lean: Plan | None = None, now: datetime | None = None, *, brief: bool = False
) -> Summary:
    """The report of one or more plans of the same run; the first is the one asked for.

    `lean` is that run with a training step that returns no logits: what it would save is said. `brief` leaves out the
    line over a step, which takes the longest.
    """
    first = plans[0]
    bars = tuple(memory_bar(plan) for plan in plans)
    names = dict.fromkeys(name for bar in bars for name, _ in bar.parts)
    about = heading(first)
    return Summary(
        title=about.text,
        setting=about.lines[0],
        device=about.lines[1],
        verdicts=tuple(_verdict(plan) for plan in plans),
        bars=bars,
        components=tuple(names),
        over_a_step=("", "") if brief else sparkline(first, SPARKLINE_COLUMNS),
        paces=_paces(first, now or datetime.now()),
        facts=tuple(_facts(plans, lean)),
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


def heading(plan: Plan) -> doc.Title:
    """Which model, how it is trained, and on what."""
    memory = plan.memory
    room = "" if memory.capacity_mib is None else f", {memory_size(memory.capacity_mib)} for a process"
    return doc.Title(_title(plan), (_setting(plan), f"{plan.device.name}{room}"))


def document(plans: Sequence[Plan], summary: Summary) -> doc.Document:
    """The report: verdicts, bars, time and cost; in detail every component, pace, fact and note."""
    parts: list[doc.Part] = [
        doc.Title(summary.title, (summary.setting, summary.device)),
        *(doc.Verdict(verdict.text, MARKS[verdict.fits]) for verdict in summary.verdicts),
        *_warning(plans[0]),
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
    parts.append(doc.Facts(tuple(_in_a_line(plans[0])), shown="short"))
    parts.append(doc.Facts(summary.facts, shown="detail"))
    parts += doc.sentence_list("to know", summary.notes)
    more = f"every component, what holds the peak, {counted(len(summary.notes), 'note')}"
    return doc.Document(tuple(parts), more)


def _warning(plan: Plan) -> list[doc.Part]:
    """The first warning about the run, for one screen; the notes have them all."""
    first = [] if plan.traced else warnings(plan.config, plan.device)[:1]
    return [doc.Verdict(text.rstrip("."), "warning", shown="short") for text in first]


def picture(plans: Sequence[Plan]) -> doc.Picture:
    """A bar a program, and the memory of each over one step."""
    about = heading(plans[0])
    return doc.Picture(
        about.text,
        about.lines[0],
        bars=doc.Bars(tuple(memory_bar(plan) for plan in plans)),
        device=plans[0].device.name,
        areas=tuple(area(plan) for plan in plans),
        tip=" ".join(f"{_verdict(plan).text}." for plan in plans),
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
    """Time and cost in a line each."""
    time, energy = plan.time, plan.energy
    if time is None:
        yield "time", "not predicted for this device: see the notes"
        return
    span = "" if time.basis == "given" else f" ({_between(3600 * time.low_hours, 3600 * time.high_hours)})"
    pace = f"{duration(time.step_ms / 1e3)} a step, {time.tokens_per_s:,.0f} tokens/s"
    yield "time", f"{pace}; {counted(plan.config.max_iters, 'step')}: {duration(3600 * time.hours)}{span}"
    if energy is not None:
        machine = f"{energy.machine_cost:,.2f} for the machine"
        yield "cost", f"{energy.kwh:,.1f} kWh, {money(energy.cost, energy.currency)}; {machine}{_rent(energy)}"


def _between(low_s: float, high_s: float) -> str:
    """Two lengths of time, the unit said once where it is the same."""
    low, high = duration(low_s), duration(high_s)
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(unit) else low} to {high}"


def _rent(energy: Energy) -> str:
    if energy.rent is not None:
        return f"; rented {money(energy.rent, energy.currency)}"
    return "" if energy.rent_usd_low is None else f"; rented from {money(energy.rent_usd_low, 'USD')}"


def _title(plan: Plan) -> str:
    config = plan.config
    if plan.traced:
        frozen = f", {count(plan.model.params_frozen)} of them frozen" if plan.model.params_frozen else ""
        called = f"called with {counted(config.block_size, 'token')} a sequence"
        return f"{plan.program}, {count(plan.model.params)} parameters{frozen}, {called}"
    name, size = ARCHITECTURES[config.model_type], count(plan.model.params_nanogpt)
    shape = f"{counted(config.n_layer, 'layer')} × {config.n_embd}, {counted(config.n_head, 'head')}"
    return f"{name}, {size} parameters: {shape}, block {config.block_size}, vocab {config.vocab_size:,}"


METHOD_NAMES = {"lora": "LoRA", "dora": "DoRA", "qlora": "QLoRA"}


def _method(plan: Plan) -> str:
    """ "QLoRA of rank 16 on q_proj, v_proj over nf4: 7.67 M trained" """
    config, model = plan.config, plan.model
    targets = ", ".join(part.strip() for part in (config.lora_targets or "").split(","))
    base = f" over {config.quantization}" if config.quantization != "off" else ""
    trained = count(model.params - model.params_frozen)
    return f"{METHOD_NAMES[config.method]} of rank {config.lora_rank} on {targets}{base}: {trained} trained"


def _setting(plan: Plan) -> str:
    config = plan.config
    devices = f" on {config.world_size} devices" if config.world_size > 1 else ""
    extras = [f"first {counted(config.checkpoint_layers, 'block')} checkpointed"] if config.checkpoint_layers else []
    drops = config.dropout and not plan.traced and "dropout" in keys_read(config)
    extras += [f"dropout {config.dropout:g}"] if drops else []
    extras += ["Liger's loss"] if config.fused_loss == "liger" else []
    extras += [_method(plan)] if config.method != "full" else []
    how = "compiled" if config.compile else "eager"
    return ", ".join(
        [
            f"{counted(config.batch_size, 'sequence')} × "
            f"{counted(config.gradient_accumulation_steps, 'micro-step')}{devices} = "
            f"{counted(plan.data.tokens_per_step, 'token')} a step",
            f"{config.dtype}{'' if config.autocast or config.dtype == 'float32' else ' throughout'}",
            f"{config.optimizer} ({config.optimizer_loop})",
            f"{how} with torch {config.torch_version}",
            *extras,
        ]
    )


def _verdict(plan: Plan) -> ProgramVerdict:
    program, memory = plan.program, plan.memory
    need = _need(memory)
    if memory.fits is None or memory.headroom_mib is None:
        return ProgramVerdict(program, None, f"{program} needs {need}")
    sure = f"({chance(memory)})"
    if memory.retries:
        only_just = f"fits {sure}, but only just: it fills the card and has to give cached memory back"
        return ProgramVerdict(program, True, f"{program} {only_just}")
    if memory.fits:
        free = f"{need}, {memory.headroom_mib:,.0f} MiB free"
        return ProgramVerdict(program, True, f"{program} fits {sure}: {free}")
    missing = f"{need}, {-memory.headroom_mib:,.0f} MiB too many"
    return ProgramVerdict(program, False, f"{program} does not fit {sure}: {missing}")


def chance(memory: Footprint) -> str:
    """How probable the verdict is, "97 %": that it fits, or where it does not, that. Nothing is surer than 99 %."""
    p = (memory.p_fits or 0.0) if memory.fits else 1 - (memory.p_fits or 0.0)
    return f"{min(99, round(100 * p))} %"


def _need(memory: Footprint) -> str:
    """12,648 MiB (12.4 GiB; 11.4 to 13.1)."""
    total, low, high = memory.total_mib, memory.low_mib, memory.high_mib
    if total < 1024:
        return f"{total:,.0f} MiB ({low:,.0f} to {high:,.0f})"
    return f"{total:,.0f} MiB ({total / 1024:,.1f} GiB; {low / 1024:,.1f} to {high / 1024:,.1f})"


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
    counted = "by operation" if plan.traced else "nanoGPT's count" if ours else "6 a weight, attention in full"
    return (
        f"{scientific(compute.total_flops)} FLOPs in all, {scientific(compute.flops_per_step)} a step "
        f"({counted}, {compute.flops_per_token / 1e6:,.0f} M a token)"
    )


def _parts(time: Time) -> str:
    """The whole run as the sum of what it does."""
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
