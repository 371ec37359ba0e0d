"""Findings about time: step time, MFU, what bounds it, and how long is left."""

from __future__ import annotations

from collections.abc import Iterator

from oomph.planning.plan import Plan
from oomph.predict.clock import host_seconds, kernel_options, reads_batch
from oomph.predict.gpu_kernels import LIKELY, op_seconds
from oomph.predict.run_time import NANOGPT_PEAK_FLOPS
from oomph.runs import health
from oomph.runs.figures import Evidence
from oomph.runs.findings import Finding, known, listed, sentences
from oomph.runs.pace import StepPace
from oomph.runs.run import KIND, WARMING_UP, Progress, Scalar
from oomph.step.ops import Kernel, Op, Phase
from oomph.units import count, counted, duration, scientific, tflops

SLOWER = 1.25  # times the slowest predicted; beyond it, something else slows the run down
STALLS = 0.02  # share of steps that wait for something
WORTH_SAYING = 0.02  # share of a step


def findings(evidence: Evidence) -> Iterator[Finding]:
    """The findings, most useful first."""
    yield from _pace(evidence)
    yield from _slowing(evidence)
    yield from _use(evidence)
    if evidence.plan is not None:
        yield from _bound(evidence.plan)
        yield from _micro_batch(evidence, evidence.plan)
        yield from _width(evidence, evidence.plan)
    yield from _length(evidence)
    yield from _flops(evidence)


def _pace(evidence: Evidence) -> Iterator[Finding]:
    pace, measured = evidence.measured.pace, evidence.measured
    if pace is None:
        if evidence.plan is not None and evidence.plan.time is not None:
            yield _expected_pace(evidence, evidence.plan)
        elif evidence.run.progress is not None:
            yield from _bar(evidence, evidence.run.progress)
        elif (mean := evidence.run.printed.mean_step_ms) is not None:
            title = f"A step takes {duration(mean / 1e3)} on average, as the log prints it"
            yield Finding("time.step", "info", title, "", {"step_ms": mean}, "read")
        elif (at := evidence.run.printed.counted_steps) is not None:
            yield Finding("time.step", "info", f"The run is at step {at:,}", "", {"step": at}, "read")
        elif measured.tokens_per_s:
            title = f"The log prints {measured.tokens_per_s:,.0f} tokens/s{_of_what(evidence)}"
            yield Finding("time.step", "info", title, "", {"tokens_per_s": measured.tokens_per_s}, "read")
        return
    rate = f": {measured.tokens_per_s:,.0f} tokens/s{_of_what(evidence)}" if measured.tokens_per_s else ""
    thing = "An iteration" if evidence.run.step_unit == "iteration" else "A step"
    time = evidence.plan.time if evidence.plan is not None else None
    slow = time is not None and pace.step_ms > SLOWER * time.high_ms
    predicted = None
    if time is not None:
        predicted = (
            f"predicted: {duration(time.step_ms / 1e3)} ({duration(time.low_ms / 1e3)} to "
            f"{duration(time.high_ms / 1e3)})"
        )
        if slow:
            predicted += "; something slows it down (reading data, another program on the card, a power limit)"
    text = sentences((_tokens(evidence), _steps_measured(evidence, pace), predicted))
    numbers: dict[str, Scalar] = {
        "step_ms": pace.step_ms,
        "tokens_per_s": measured.tokens_per_s,
        "tokens_per_step": measured.tokens_per_step,
        "first_ms": pace.first_ms,
        "evaluation_ms": pace.evaluation_ms,
        "predicted_ms": time.step_ms if time is not None else None,
    }
    title = f"{thing} takes {duration(pace.step_ms / 1e3)}{rate}"
    if (many := evidence.run.printed.iterations_per_step or 1) > 1:
        title += f"; a step is {many} of them, {duration(many * pace.step_ms / 1e3)}"
    if slow and time is not None:
        title = (
            f"A step takes {duration(pace.step_ms / 1e3)}, {pace.step_ms / time.step_ms:.1f} times the predicted time"
        )
    yield Finding("time.step", "warning" if slow else "info", title, text, known(numbers))
    if pace.stalled > STALLS and pace.steps >= health.LEAST_STEPS:
        title = f"{100 * pace.stalled:.0f} % of the steps take more than 1.5 times the median"
        text = "They do the same work, so they wait for something: a slow disk, another program, saving a checkpoint."
        yield Finding("time.stalls", "warning", title, text, {"share": pace.stalled})


def _bar(evidence: Evidence, bar: Progress) -> Iterator[Finding]:
    """The position of a progress bar, if the log has nothing else."""
    title = f"A progress bar stands at {bar.step:,} of {bar.of:,}"
    numbers: dict[str, Scalar] = {"step": bar.step, "of": bar.of, "step_ms": bar.ms}
    if bar.ms is not None:
        title += f", {duration(bar.ms / 1e3)} each"
        if bar.step < bar.of and not evidence.run.printed.runtime_s and not _ended(evidence):
            title += f": {duration((bar.of - bar.step) * bar.ms / 1e3)} to go"
    yield Finding("time.step", "info", title, "", known(numbers), "read")


def _ended(evidence: Evidence) -> bool:
    """Whether the run failed or lost its weights, so that no time is left to go."""
    run, lost = evidence.run, health.not_finite(evidence.run)
    return run.crash is not None or bool(run.ooms) or (lost is not None and lost.stays)


def _finished(evidence: Evidence) -> Iterator[Finding]:
    """The Trainer's final summary."""
    printed = evidence.run.printed
    if printed.runtime_s is None:
        return
    mean = f", its mean training loss {printed.mean_loss:.4g}" if printed.mean_loss is not None else ""
    title = f"The run is finished: it took {duration(printed.runtime_s)}{mean}"
    text = _MEAN_OF_0 if printed.mean_loss == 0 else ""
    yield Finding("time.left", "info", title, text, {"hours": printed.runtime_s / 3600}, "read")


_MEAN_OF_0 = (
    "A mean of 0 could be NaN that was added as 0, labels that are all masked, a run resumed at its end, or a method "
    "whose loss is about 0 (GRPO)."
)


def _of_what(evidence: Evidence) -> str:
    """ " a card" if the log's rate is one card's, else ""."""
    counted_here = evidence.measured.pace is not None and evidence.measured.tokens_per_step is not None
    return " a card" if evidence.run.printed.rate_per_card and not counted_here else ""


def _expected_pace(evidence: Evidence, plan: Plan) -> Finding:
    time = plan.time
    assert time is not None
    text = sentences(
        (
            _tokens(evidence),
            f"no step was timed; predicted: {duration(time.step_ms / 1e3)} ({duration(time.low_ms / 1e3)} to "
            f"{duration(time.high_ms / 1e3)})",
        )
    )
    title = f"A step will take about {duration(time.step_ms / 1e3)}: {time.tokens_per_s:,.0f} tokens/s"
    return Finding("time.step", "info", title, text, {"predicted_ms": time.step_ms, "tokens_per_s": time.tokens_per_s})


def _tokens(evidence: Evidence) -> str | None:
    """Tokens per step, and that any split with the same product has as many."""
    config, tokens = evidence.config, evidence.measured.tokens_per_step
    if config is None or tokens is None:
        return None
    if evidence.measured.inference.contradictions:
        return f"a step is {tokens:,} tokens"
    return (
        f"a step is {tokens:,} tokens ({config.batch_size} sequences × {config.block_size} × "
        f"{counted(config.gradient_accumulation_steps, 'micro-step')}); any split with the same product has the same "
        "tokens per step and needs the same number of optimizer steps"
    )


def _steps_measured(evidence: Evidence, pace: StepPace) -> str:
    """Which steps were measured, and which were left out."""
    evaluations = evidence.run.evals.count
    left_out, warm_up = [], pace.warm_up_steps
    if pace.first_ms is not None and pace.first_ms > 1.5 * pace.step_ms:
        compiling = ", which compiles" if evidence.config is not None and evidence.config.compile else ""
        left_out.append(f"the first step{compiling} ({duration(pace.first_ms / 1e3)})")
        warm_up -= evidence.run.steps.column(KIND)[0] == WARMING_UP
    if warm_up:
        left_out.append(f"{counted(warm_up, 'step')} of warm-up")
    if pace.evaluation_ms is not None and evaluations:
        left_out.append(f"steps with an evaluation, {duration(pace.evaluation_ms / 1e3)} longer")
    without = f"; left out: {listed(left_out)}" if left_out else ""
    of_all = "mean" if evidence.run.step_unit == "iteration" else "median"
    return (
        f"{of_all} of {counted(pace.steps, 'steady step')}, 90 % between {duration(pace.low_ms / 1e3)} and "
        f"{duration(pace.high_ms / 1e3)}{without}"
    )


def _slowing(evidence: Evidence) -> Iterator[Finding]:
    found = health.slowing(evidence.run)
    if found is None:
        return
    title = f"Steps got slower: {duration(found.before_ms / 1e3)} before, {duration(found.now_ms / 1e3)} now"
    text = "The work is the same. A hot card lowers its clock, or another program is now using it."
    yield Finding("time.slowing", "warning", title, text, {"before_ms": found.before_ms, "now_ms": found.now_ms})


def _use(evidence: Evidence) -> Iterator[Finding]:
    """MFU of the card's own peak and of the A100's that nanoGPT assumes."""
    measured, device = evidence.measured, evidence.device
    printed = measured.pace.mfu_percent if measured.pace is not None else evidence.run.steps.totals["mfu_percent"].last
    if measured.tflops is None:
        if printed is not None and printed > 0 and evidence.run.program != "nanogpt":
            title = f"The log prints an MFU of {printed:.1f} %"
            text = "No card computes above its peak: the program takes several cards for one." if printed > 100 else ""
            yield Finding("time.mfu", "info", title, text, {"printed_percent": printed}, "read")
        return
    peak = measured.peak_tflops
    nanogpt = 100 * (measured.mfu_nanogpt or 0.0)
    numbers: dict[str, Scalar] = {"tflops": measured.tflops, "mfu_nanogpt": nanogpt / 100}
    logged = f"the log prints {printed:.1f} %" if printed is not None else f"nanoGPT would print {nanogpt:.1f} %"
    divides = f"{logged}, because nanoGPT always divides by an A100's {NANOGPT_PEAK_FLOPS / 1e12:.0f} TFLOPS"
    if peak is None or device is None:
        by_card = (measured.workers or 1) > 1 or evidence.run.steps.totals["tflops"].count > 0
        one = "Each card" if by_card else "The run"
        title = f"{one} computes at {tflops(measured.tflops)}"
        parts = (divides if evidence.run.program == "nanogpt" else None, "the card is unknown")
        yield Finding("time.mfu", "info", title, sentences(parts), numbers)
        return
    share = measured.tflops / peak
    dtype = evidence.config.dtype if evidence.config is not None else "half precision"
    text = sentences(
        (
            f"the run computes at {tflops(measured.tflops)}; a {device.name} does {tflops(peak)} at most "
            f"({dtype} matrix products, dense, float32 accumulation)",
            divides if evidence.run.program == "nanogpt" else None,
            f"the log itself prints {printed:.1f} %"
            if printed is not None and evidence.run.program != "nanogpt"
            else None,
        )
    )
    title = f"MFU is {100 * share:.0f} % of the card's own peak, not {nanogpt:.1f} %"
    if evidence.run.program != "nanogpt":
        title = f"MFU is {100 * share:.0f} % of the card's own peak"
    yield Finding("time.mfu", "info", title, text, numbers | {"mfu": share, "peak_tflops": peak})


def _bound(plan: Plan) -> Iterator[Finding]:
    seconds = step_shares(plan)
    total = sum(seconds.values())
    if not total:
        return
    ranked = sorted(seconds.items(), key=lambda entry: -entry[1])
    shown = [f"{name} {100 * each / total:.0f} %" for name, each in ranked if each > WORTH_SAYING * total]
    products = seconds[PRODUCTS] + seconds[VOCABULARY]
    host = seconds[HOST] / total
    if products > 0.5 * total:
        title = f"Matrix products take most of the time: {100 * products / total:.0f} % of a step"
    else:
        title = f"The largest share of the time: {ranked[0][0]}, {100 * ranked[0][1] / total:.0f} % of a step"
    waits = None
    if host > WORTH_SAYING:
        waits = f"the card waits for Python {100 * host:.0f} % of the time; larger micro-batches or compiling help"
    elif plan.device.kind != "cpu":
        waits = "Python launches kernels faster than the card runs them, so it costs nothing"
    text = sentences((f"predicted: {listed(shown)}", waits))
    yield Finding("time.bound", "info", title, text, {name: each / total for name, each in seconds.items()})


def _micro_batch(evidence: Evidence, plan: Plan) -> Iterator[Finding]:
    """The cost of half and double the micro-batch at the same tokens per step."""
    config, time = plan.config, plan.time
    if time is None:
        return
    parts, numbers = [], {}
    for name, size, steps in (
        ("half", config.batch_size / 2, config.gradient_accumulation_steps * 2),
        ("double", config.batch_size * 2, config.gradient_accumulation_steps / 2),
    ):
        if size != int(size) or steps != int(steps):
            continue
        other = evidence.variant(batch_size=int(size), gradient_accumulation_steps=int(steps))
        if other.time is None or int(steps) % config.world_size:
            continue
        change = other.time.step_ms / time.step_ms - 1
        numbers[name] = change
        fits = "" if other.memory.fits is not False else ", which does not fit"
        word = "slower" if change > 0 else "faster"
        parts.append(
            f"{int(size)} × {int(steps)} is predicted to be {100 * abs(change):.1f} % {word} and to take "
            f"{other.memory.total_mib:,.0f} MiB{fits}"
        )
    if not parts:
        return
    title = "The cost of another micro-batch"
    if "half" in numbers:
        title = f"Half the micro-batch with twice the accumulation costs {100 * numbers['half']:.1f} % more time"
    why = (
        "the tokens are the same; smaller matrix products use the card less well, and every micro-step accumulates "
        "gradients"
    )
    yield Finding("time.micro_batch", "info", title, sentences((*parts, why)), dict(numbers))


def _width(evidence: Evidence, plan: Plan) -> Iterator[Finding]:
    """Whether width or micro-batch sets the MFU: the run predicted at half the width and half the micro-batch."""
    config, time = plan.config, plan.time
    narrower = config.trainer in ("nanogpt", "oomph") and config.n_embd % 128 == config.n_head % 2 == 0
    if time is None or time.mfu is None or plan.device.kind == "cpu" or not narrower:
        return
    narrow = evidence.variant(n_embd=config.n_embd // 2, n_head=config.n_head // 2)
    if narrow.time is None or narrow.time.mfu is None:
        return
    share, other = (6 * p.config.vocab_size * p.config.n_embd / p.compute.flops_per_token for p in (plan, narrow))
    parts = [
        f"predicted MFU: {100 * time.mfu:.0f} % at width {config.n_embd}, {100 * narrow.time.mfu:.0f} % at width "
        f"{narrow.config.n_embd} with the same micro-batch; the matrices are larger, and the vocabulary is "
        f"{100 * share:.0f} % of the arithmetic instead of {100 * other:.0f} %"
    ]
    numbers: dict[str, Scalar] = {"mfu": time.mfu, "mfu_half_width": narrow.time.mfu, "vocabulary_share": share}
    if config.batch_size % 2 == 0:
        half = evidence.variant(
            batch_size=config.batch_size // 2, gradient_accumulation_steps=config.gradient_accumulation_steps * 2
        )
        if half.time is not None and half.time.mfu is not None:
            numbers["mfu_half_batch"] = half.time.mfu
            parts.append(
                f"a smaller micro-batch lowers it ({100 * half.time.mfu:.0f} % at {half.config.batch_size} × "
                f"{half.config.gradient_accumulation_steps}): it gives torch.compile nothing more to fuse"
            )
    yield Finding("time.width", "info", "A wider model uses the card better", sentences(parts), numbers)


def _length(evidence: Evidence) -> Iterator[Finding]:
    """Hours in total, done and to go."""
    if evidence.run.printed.runtime_s is not None:
        yield from _finished(evidence)
        return
    steps, pace = evidence.planned_steps, evidence.measured.pace
    time = evidence.plan.time if evidence.plan is not None else None
    mean = evidence.run.printed.mean_step_ms
    step_ms = pace.step_ms if pace is not None else mean or (time.step_ms if time is not None else None)
    if steps is None or step_ms is None or evidence.run.step_unit != "step":
        return
    done = min(steps, evidence.run.steps_done)
    each = step_ms / 1e3
    evaluation_s = _evaluation_s(evidence, steps)
    interval = evidence.measured.whole("eval_interval") or steps + 1
    evaluations = evaluation_s * (steps // interval + 1)
    left = (steps - done) * each + evaluation_s * ((steps - done) // interval + (0 if evidence.run.last_step else 1))
    whole = f"{steps:,} steps at {duration(each)} are {duration(steps * each)}"
    if duration(steps * each) != duration(steps * each + evaluations):
        predicted = "" if pace is not None and pace.evaluation_ms is not None else " (predicted)"
        whole += f", plus {duration(evaluations)} of evaluations{predicted}"
    numbers: dict[str, Scalar] = {"steps": steps, "done": done, "hours": steps * each / 3600, "hours_left": left / 3600}
    numbers["evaluation_hours"] = evaluations / 3600
    about = "about " if pace is not None and pace.steps < health.LEAST_STEPS else ""
    if done >= steps or "finished" in evidence.run.event_counts:
        title, text = f"The run is finished: {about}{duration(steps * each)} of steps", sentences((whole,))
    elif done and _ended(evidence):
        at = max(done, evidence.run.progress.step if evidence.run.progress is not None else 0)
        title, text = f"The log stops at step {at:,} of {steps:,}", sentences((whole,))
    else:
        title = (
            f"{duration(left)} to go of {duration(steps * each + evaluations)}" if done else f"{duration(left)} to go"
        )
        text = sentences((whole, f"{done:,} done, {100 * done / steps:.0f} %" if done else None))
    yield Finding("time.left", "info", title, text, numbers)


def _evaluation_s(evidence: Evidence, steps: int) -> float:
    """Seconds of one evaluation: measured, else predicted."""
    pace, interval = evidence.measured.pace, evidence.measured.whole("eval_interval")
    if not interval:
        return 0.0
    if pace is not None and pace.evaluation_ms is not None:
        return pace.evaluation_ms / 1e3
    if evidence.plan is None or evidence.plan.time is None:
        return 0.0
    return 3600 * evidence.plan.time.eval_hours / (steps // interval + 1)


def _flops(evidence: Evidence) -> Iterator[Finding]:
    """FLOPs of the whole run, with and without attention."""
    plan = evidence.plan
    measured = evidence.measured
    if plan is None or measured.params is None or measured.value("max_iters") is None:
        return
    tokens = plan.data.total_tokens
    plain = 6.0 * measured.params * tokens
    text = sentences(
        (
            f"6 × {count(measured.params)} parameters × {count(tokens)} tokens = {scientific(plain)}"
            + (f" or {plain / 1e15:,.0f} PFLOP" if plain >= 1e15 else ""),
            f"with attention, as nanoGPT counts ({plan.compute.flops_per_token / 1e6:,.0f} M per token), "
            f"{scientific(plan.compute.total_flops)}",
        )
    )
    title = f"The whole run is {scientific(plan.compute.total_flops)} FLOPs"
    numbers: dict[str, Scalar] = {"six_n_d": plain, "total_flops": plan.compute.total_flops, "total_tokens": tokens}
    yield Finding("time.flops", "info", title, text, numbers)


# --- where a step's time goes ----------------------------------------------------------------------

PRODUCTS = "matrix products of the layers"
VOCABULARY = "matrix products with the vocabulary"
ATTENTION = "attention"
BYTES = "moving bytes"
OPTIMIZER = "the optimizer"
GAPS = "gaps between kernels"
HOST = "waiting for the host"


def step_shares(plan: Plan) -> dict[str, float]:
    """Predicted seconds of one optimizer step by what they are spent on; empty if the device's rates are unknown.

    They add up to the plan's likely step time.
    """
    config, device = plan.config, plan.device
    if plan.time is None or not device.bandwidth_gbs:
        return {}
    options = kernel_options(config)
    gap_s = 0.0 if device.kind == "cpu" else LIKELY.kernel_gap_s
    totals = dict.fromkeys((PRODUCTS, VOCABULARY, ATTENTION, BYTES, OPTIMIZER, GAPS, HOST), 0.0)
    for section in plan.steps[-1].sections:
        if section.ops and section.ops[0].phase is Phase.EVAL:
            continue
        device_s, kernels = 0.0, 0
        for op in section.ops:
            if op.kernel is Kernel.NONE:
                continue
            seconds = op_seconds(op, device, options, LIKELY)
            totals[_spent_on(op, config.vocab_size)] += section.times * op.times * (seconds - gap_s)
            totals[GAPS] += section.times * op.times * gap_s
            device_s, kernels = device_s + op.times * seconds, kernels + op.times
        host_s = host_seconds(kernels, reads_batch(section), config, device, LIKELY)
        totals[HOST] += section.times * max(0.0, host_s - device_s)
    return totals


def _spent_on(op: Op, vocabulary: int) -> str:
    if op.kernel is Kernel.GEMM:
        return VOCABULARY if vocabulary in op.shape else PRODUCTS
    if op.kernel is Kernel.ATTENTION:
        return ATTENTION
    return OPTIMIZER if op.phase in (Phase.OPTIMIZER, Phase.CLIP) else BYTES
