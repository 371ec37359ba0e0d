"""What an explanation says of time: the pace, how well the card is used, what bounds it, how long it still takes."""

from __future__ import annotations

from collections.abc import Iterator

from oomph.planner import Plan
from oomph.runs import bounds, health
from oomph.runs.case import Case
from oomph.runs.findings import Finding, Number, Severity, known, listed, sentences, several, tflops
from oomph.runs.pace import NANOGPT_PEAK_FLOPS, Pace
from oomph.units import count, duration, scientific

SLOWER = 1.25  # times the worst that is predicted: something else holds the run up
STALLS = 0.02  # share of steps that wait for something
WORTH_SAYING = 0.02  # share of a step


def findings(case: Case) -> Iterator[Finding]:
    """The findings, most telling first."""
    yield from _pace(case)
    yield from _slowing(case)
    yield from _use(case)
    if case.plan is not None:
        yield from _bound(case.plan)
        yield from _micro_batch(case, case.plan)
        yield from _width(case, case.plan)
    yield from _length(case)
    yield from _flops(case)


def _pace(case: Case) -> Iterator[Finding]:
    pace, measured = case.measured.pace, case.measured
    if pace is None:
        if case.plan is not None and case.plan.time is not None:
            yield _expected_pace(case, case.plan)
        return
    rate = f": {measured.tokens_per_s:,.0f} tokens a second" if measured.tokens_per_s else ""
    time = case.plan.time if case.plan is not None else None
    slow = time is not None and pace.step_ms > SLOWER * time.high_ms
    predicted = None
    if time is not None:
        predicted = (
            f"predicted are {duration(time.step_ms / 1e3)} ({duration(time.low_ms / 1e3)} to "
            f"{duration(time.high_ms / 1e3)})"
        )
        if slow:
            predicted += ": something else holds it up (reading data, another program on the card, a power limit)"
    text = sentences((_tokens(case), _told_apart(case, pace), predicted))
    numbers: dict[str, Number] = {
        "step_ms": pace.step_ms,
        "tokens_per_s": measured.tokens_per_s,
        "tokens_per_step": measured.tokens_per_step,
        "first_ms": pace.first_ms,
        "evaluation_ms": pace.evaluation_ms,
        "predicted_ms": time.step_ms if time is not None else None,
    }
    title = f"A step takes {duration(pace.step_ms / 1e3)}{rate}"
    if slow and time is not None:
        title = (
            f"A step takes {duration(pace.step_ms / 1e3)}, {pace.step_ms / time.step_ms:.1f} times what is predicted"
        )
    yield Finding("time.step", "warning" if slow else "info", title, text, known(numbers))
    if pace.stalled > STALLS:
        title = f"{100 * pace.stalled:.0f} % of the steps take more than one and a half times as long as the others"
        text = "Steps of equal work that differ wait for something: data from a slow disk, another program, saving."
        yield Finding("time.stalls", "warning", title, text, {"share": pace.stalled})


def _expected_pace(case: Case, plan: Plan) -> Finding:
    time = plan.time
    assert time is not None
    text = sentences(
        (
            _tokens(case),
            f"no step was timed; predicted are {duration(time.step_ms / 1e3)} ({duration(time.low_ms / 1e3)} to "
            f"{duration(time.high_ms / 1e3)})",
        )
    )
    title = f"A step will take about {duration(time.step_ms / 1e3)}: {time.tokens_per_s:,.0f} tokens a second"
    return Finding("time.step", "info", title, text, {"predicted_ms": time.step_ms, "tokens_per_s": time.tokens_per_s})


def _tokens(case: Case) -> str | None:
    """Where a step's tokens come from, and what that means for other splits of it."""
    config, tokens = case.config, case.measured.tokens_per_step
    if config is None or tokens is None:
        return None
    return (
        f"a step is {tokens:,} tokens ({config.batch_size} sequences × {config.block_size} × "
        f"{several(config.gradient_accumulation_steps, 'micro-step')}); another split with the same product is the "
        "same tokens a step, so it takes as many optimizer steps"
    )


def _told_apart(case: Case, pace: Pace) -> str:
    """Which steps the figure rests on, and which were left out of it."""
    evaluations = case.run.evals.count
    left_out = []
    if pace.first_ms is not None and pace.first_ms > 1.5 * pace.step_ms:
        compiling = ", which compiles" if case.config is not None and case.config.compile else ""
        left_out.append(f"the first step{compiling} ({duration(pace.first_ms / 1e3)})")
    if pace.warm_up_steps:
        left_out.append(f"{several(pace.warm_up_steps, 'step')} of warm-up")
    if pace.evaluation_ms is not None and evaluations:
        left_out.append(f"steps with an evaluation, {duration(pace.evaluation_ms / 1e3)} longer")
    told = f"; left out are {listed(left_out)}" if left_out else ""
    return (
        f"the median of {pace.steps:,} steady steps, nine in ten between {duration(pace.low_ms / 1e3)} and "
        f"{duration(pace.high_ms / 1e3)}{told}"
    )


def _slowing(case: Case) -> Iterator[Finding]:
    found = health.slowing(case.run)
    if found is None:
        return
    title = f"Steps have become slower: {duration(found.before_ms / 1e3)} before, {duration(found.now_ms / 1e3)} now"
    text = "The work is the same. A card that grows hot lowers its clock; another program may have joined it."
    yield Finding("time.slowing", "warning", title, text, {"before_ms": found.before_ms, "now_ms": found.now_ms})


def _use(case: Case) -> Iterator[Finding]:
    """MFU both ways."""
    measured, device = case.measured, case.device
    if measured.tflops is None:
        return
    peak = measured.peak_tflops
    printed = measured.pace.mfu_percent if measured.pace is not None else None
    nanogpt = 100 * measured.tflops * 1e12 / NANOGPT_PEAK_FLOPS
    numbers: dict[str, Number] = {"tflops": measured.tflops, "mfu_nanogpt": nanogpt / 100}
    logged = f"the log prints {printed:.1f} %" if printed is not None else f"nanoGPT would print {nanogpt:.1f} %"
    divides = f"{logged}, because nanoGPT divides by 312 TFLOPS, an A100's, whatever the card"
    if peak is None or device is None:
        title = f"The run does {tflops(measured.tflops)} of useful arithmetic"
        told = (divides if case.run.program == "nanogpt" else None, "which card it is, is not known")
        yield Finding("time.mfu", "info", title, sentences(told), numbers)
        return
    share = measured.tflops / peak
    dtype = case.config.dtype if case.config is not None else "half precision"
    text = sentences(
        (
            f"the run does {tflops(measured.tflops)} of useful arithmetic; a {device.name} does {tflops(peak)} at most "
            f"({dtype} products, dense, float32 accumulation)",
            divides if case.run.program == "nanogpt" else None,
            "that is more than the peak: the card is not this one, or its figures are wrong" if share > 1.02 else None,
        )
    )
    title = f"The card is used to {100 * share:.0f} % of its own peak, not {nanogpt:.1f} %"
    if case.run.program != "nanogpt":
        title = f"The card is used to {100 * share:.0f} % of its own peak"
    severity: Severity = "warning" if share > 1.02 else "info"
    yield Finding("time.mfu", severity, title, text, numbers | {"mfu": share, "peak_tflops": peak})


def _bound(plan: Plan) -> Iterator[Finding]:
    seconds = bounds.step_shares(plan)
    total = sum(seconds.values())
    if not total:
        return
    ranked = sorted(seconds.items(), key=lambda entry: -entry[1])
    shown = [f"{name} {100 * each / total:.0f} %" for name, each in ranked if each > WORTH_SAYING * total]
    products = seconds[bounds.PRODUCTS] + seconds[bounds.VOCABULARY]
    host = seconds[bounds.HOST] / total
    if products > 0.5 * total:
        title = f"Matrix products bound the time: {100 * products / total:.0f} % of a step"
    else:
        title = f"{ranked[0][0].capitalize()} bound the time: {100 * ranked[0][1] / total:.0f} % of a step"
    idle = (
        None
        if plan.device.kind == "cpu"
        else "the host prepares kernels faster than the card runs them, so Python costs nothing"
    )
    late = f"the card waits for Python {100 * host:.0f} % of the time: larger micro-batches or compiling hide it"
    text = sentences((f"by the predicted clock: {listed(shown)}", late if host > WORTH_SAYING else idle))
    yield Finding("time.bound", "info", title, text, {name: each / total for name, each in seconds.items()})


def _micro_batch(case: Case, plan: Plan) -> Iterator[Finding]:
    """What a smaller or larger micro-batch with the same tokens a step would cost."""
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
        other = case.variant(batch_size=int(size), gradient_accumulation_steps=int(steps))
        if other.time is None or int(steps) % config.world_size:
            continue
        change = other.time.step_ms / time.step_ms - 1
        numbers[name] = change
        fits = "" if other.memory.fits is not False else ", and does not fit"
        word = "slower" if change > 0 else "faster"
        parts.append(
            f"{int(size)} × {int(steps)} is predicted {100 * abs(change):.1f} % {word}, with "
            f"{other.memory.total_mib:,.0f} MiB{fits}"
        )
    if not parts:
        return
    title = "What another micro-batch would cost"
    if "half" in numbers:
        title = f"Half the micro-batch, twice as often, costs {100 * numbers['half']:.1f} %"
    why = "the tokens are the same; smaller products fill the card less well, and each micro-step adds up gradients"
    yield Finding("time.micro_batch", "info", title, sentences((*parts, why)), dict(numbers))


def _width(case: Case, plan: Plan) -> Iterator[Finding]:
    """What sets the MFU: the same run predicted narrower, against the same run in larger micro-batches."""
    config, time = plan.config, plan.time
    if time is None or time.mfu is None or plan.device.kind == "cpu" or config.n_embd % 128 or config.n_head % 2:
        return
    narrow = case.variant(n_embd=config.n_embd // 2, n_head=config.n_head // 2)
    if narrow.time is None or narrow.time.mfu is None:
        return
    share, other = (6 * p.config.vocab_size * p.config.n_embd / p.compute.flops_per_token for p in (plan, narrow))
    parts = [
        f"predicted MFU: {100 * time.mfu:.0f} % at width {config.n_embd}, {100 * narrow.time.mfu:.0f} % at width "
        f"{narrow.config.n_embd} with the same micro-batch: larger matrices, and the vocabulary is {100 * share:.0f} "
        f"% of the arithmetic instead of {100 * other:.0f} %"
    ]
    numbers: dict[str, Number] = {"mfu": time.mfu, "mfu_half_width": narrow.time.mfu, "vocabulary_share": share}
    if config.batch_size % 2 == 0:
        half = case.variant(
            batch_size=config.batch_size // 2, gradient_accumulation_steps=config.gradient_accumulation_steps * 2
        )
        if half.time is not None and half.time.mfu is not None:
            numbers["mfu_half_batch"] = half.time.mfu
            parts.append(
                f"a smaller micro-batch lowers it ({100 * half.time.mfu:.0f} % at {half.config.batch_size} × "
                f"{half.config.gradient_accumulation_steps}): it gives torch.compile nothing more to fuse"
            )
    yield Finding("time.width", "info", "A wider model uses the card better", sentences(parts), numbers)


def _length(case: Case) -> Iterator[Finding]:
    """Hours in all, done and left."""
    steps, pace = case.planned_steps, case.measured.pace
    time = case.plan.time if case.plan is not None else None
    step_ms = pace.step_ms if pace is not None else time.step_ms if time is not None else None
    if steps is None or step_ms is None:
        return
    done = min(steps, case.run.steps_done)
    each = step_ms / 1e3
    evaluation_s = _evaluation_s(case, steps)
    interval = case.whole("eval_interval") or steps + 1
    evaluations = evaluation_s * (steps // interval + 1)
    left = (steps - done) * each + evaluation_s * ((steps - done) // interval + (0 if case.run.last_step else 1))
    whole = f"{steps:,} steps at {duration(each)} are {duration(steps * each)}"
    if duration(steps * each) != duration(steps * each + evaluations):
        predicted = "" if pace is not None and pace.evaluation_ms is not None else ", as predicted"
        whole += f", and their evaluations {duration(evaluations)} more{predicted}"
    numbers: dict[str, Number] = {"steps": steps, "done": done, "hours": steps * each / 3600, "hours_left": left / 3600}
    numbers["evaluation_hours"] = evaluations / 3600
    if done >= steps:
        title, text = f"The run is finished: {duration(steps * each)} of steps", sentences((whole,))
    else:
        title = f"{duration(left)} are left of {duration(steps * each + evaluations)}"
        text = sentences((whole, f"{done:,} are done, {100 * done / steps:.0f} %" if done else None))
    yield Finding("time.left", "info", title, text, numbers)


def _evaluation_s(case: Case, steps: int) -> float:
    """One evaluation: as the log shows it, else as predicted."""
    pace, interval = case.measured.pace, case.whole("eval_interval")
    if not interval:
        return 0.0
    if pace is not None and pace.evaluation_ms is not None:
        return pace.evaluation_ms / 1e3
    if case.plan is None or case.plan.time is None:
        return 0.0
    return 3600 * case.plan.time.eval_hours / (steps // interval + 1)


def _flops(case: Case) -> Iterator[Finding]:
    """The arithmetic of the whole run, in both usual counts."""
    plan = case.plan
    measured = case.measured
    if plan is None or measured.params is None or measured.value("max_iters") is None:
        return
    tokens = plan.data.total_tokens
    plain = 6.0 * measured.params * tokens
    text = sentences(
        (
            f"6 × {count(measured.params)} parameters × {count(tokens)} tokens = {scientific(plain)}"
            + (f", that is {plain / 1e15:,.0f} PFLOP" if plain >= 1e15 else ""),
            f"with attention's share, as nanoGPT counts ({plan.compute.flops_per_token / 1e6:,.0f} M a token), "
            f"{scientific(plan.compute.total_flops)}",
        )
    )
    title = f"The whole run is {scientific(plan.compute.total_flops)} FLOPs"
    numbers: dict[str, Number] = {"six_n_d": plain, "total_flops": plan.compute.total_flops, "total_tokens": tokens}
    yield Finding("time.flops", "info", title, text, numbers)
