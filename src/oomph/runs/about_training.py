"""What an explanation says of the training: losses, learning rate, batch, data, and what to expect of the end."""

from __future__ import annotations

import math
from collections.abc import Iterator

from oomph.runs import forecast, health, losses
from oomph.runs.case import Case
from oomph.runs.findings import Finding, Number, known, listed, sentences
from oomph.runs.verdicts import expected_end
from oomph.units import count

LR_OFF = 3.0  # times the usual learning rate, up or down
LONG_WARM_UP = 0.2  # share of the run
UNDECAYED = 0.5  # of the peak learning rate, still there at the end
MANY_PASSES = 4.0  # up to here repeated tokens are nearly worth fresh ones (Muennighoff et al. 2023, arXiv:2305.16264)
# The critical batch: a loss L is reached with the least arithmetic near B* / L^(1/0.21) tokens a step
# (Kaplan et al. 2020, arXiv:2001.08361, equation 1.4).
CRITICAL_TOKENS, CRITICAL_EXPONENT = 2e8, 1 / 0.21
SMALL_BATCH = 1 / 16
WILD_GRADIENT = 10.0  # times the median gradient norm
EXAMPLE_PERPLEXITY = 22.0


def findings(case: Case) -> Iterator[Finding]:
    """The findings, worst first."""
    yield from _not_finite(case)
    yield from _impossible(case)
    yield from _diverging(case)
    yield from _overfitting(case)
    yield from _gradients(case)
    yield from _learning_rate(case)
    yield from _schedule(case)
    yield from _now(case)
    yield from _batch(case)
    yield from _data(case)
    yield from _expected(case)
    yield from _forecast(case)


# --- is it well? -------------------------------------------------------------------------------------


def _not_finite(case: Case) -> Iterator[Finding]:
    found = health.not_finite(case.run)
    if found is None:
        return
    step, times = found
    dtype = case.measured.value("dtype")
    half = (
        "float16 overflows beyond 65,504 and needs a GradScaler; bfloat16 has float32's range"
        if dtype == "float16"
        else None
    )
    text = sentences(
        (
            f"{times:,} logged losses are no numbers; from there on the weights are lost, and every further step is "
            "wasted",
            "go back to the last checkpoint before it, with a lower learning rate or a longer warm-up",
            half,
        )
    )
    title = f"The loss is no number from step {step:,} on"
    yield Finding("loss.not_finite", "error", title, text, {"step": step, "times": times})


def _impossible(case: Case) -> Iterator[Finding]:
    """Figures that no training gives: a loss of nothing or less, steps that take no time."""
    steps, evals = case.run.steps.totals, case.run.evals.totals
    logged = [("training loss", steps["loss"]), ("validation loss", evals["val_loss"]), ("step time", steps["ms"])]
    wrong = [(name, total.low) for name, total in logged if total.count and total.low <= 0]
    if not wrong:
        return
    text = sentences(
        (
            f"the lowest logged: {listed(f'a {name} of {low:g}' for name, low in wrong)}",
            "a cross-entropy is above 0, and a step takes time: the log is damaged, the model is shown its own "
            "targets, or the figures are not those of the run",
        )
    )
    title = f"The log has figures that cannot be: {listed(name for name, _ in wrong)} of 0 or less"
    yield Finding("loss.impossible", "warning", title, text, dict(wrong))


def _diverging(case: Case) -> Iterator[Finding]:
    rise = health.diverging(case.run)
    if rise is None:
        return
    text = sentences(
        (
            f"it was {rise.lowest:.3f} around step {rise.lowest_step:,} and is {rise.now:.3f} at step {rise.step:,}, "
            "beyond the noise of single batches",
            "usual causes: a learning rate too high for the width or the batch, too short a warm-up, a damaged "
            "stretch of data",
        )
    )
    numbers: dict[str, Number] = {"lowest": rise.lowest, "lowest_step": rise.lowest_step, "now": rise.now}
    title = f"The training loss has risen by {rise.by:.2f}"
    yield Finding("loss.diverging", "error" if rise.by > 1 else "warning", title, text, numbers)


def _overfitting(case: Case) -> Iterator[Finding]:
    found = health.overfitting(case.run, losses.val_noise(case.measured))
    if found is None:
        return
    gap = f", and the training loss is {found.gap:.3f} lower" if found.gap is not None else ""
    text = sentences(
        (
            f"the lowest validation loss was {found.best_val:.4f} at step {found.best_step:,}; at step "
            f"{found.step:,} it is {found.val:.4f}{gap}",
            "the model learns the training data by heart: stop at the lowest, or use more data, dropout or a smaller "
            "model",
        )
    )
    numbers: dict[str, Number] = {"best_step": found.best_step, "best_val": found.best_val, "val": found.val}
    yield Finding("loss.overfitting", "warning", f"It overfits since step {found.best_step:,}", text, numbers)


def _gradients(case: Case) -> Iterator[Finding]:
    norms = [norm for _, norm in case.run.steps.curve("grad_norm")]
    if len(norms) < health.LEAST_STEPS:
        return
    middle = sorted(norms)[len(norms) // 2]
    last = max(norms[-5:])
    if middle > 0 and last > WILD_GRADIENT * middle:
        text = f"The median norm is {middle:.3g}; one of the last five steps had {last:.3g}. Divergence often follows."
        yield Finding("loss.gradients", "warning", "Gradients have become wild", text, {"median": middle, "last": last})


# --- how it is set -----------------------------------------------------------------------------------


def _learning_rate(case: Case) -> Iterator[Finding]:
    rate, config = case.measured.value("learning_rate"), case.config
    if not isinstance(rate, float | int) or config is None or config.optimizer != "adamw" or not rate:
        return
    if case.measured.params is None:
        return
    body = case.measured.params - config.vocab_size * config.n_embd
    usual = forecast.usual_learning_rate(body)
    times = rate / usual
    text = (
        f"For {count(body)} parameters outside the embeddings, Kaplan et al. (2020, equation D.1) find {usual:.1e} "
        f"at half a million tokens a step; the run has {rate:.1e}."
    )
    numbers: dict[str, Number] = {"learning_rate": rate, "usual": usual}
    if 1 / LR_OFF <= times <= LR_OFF:
        title = f"The learning rate, {rate:.1e}, is in the usual range for this width"
        yield Finding("rate.usual", "info", title, text, numbers)
    else:
        word = f"{times:.0f} times higher" if times > 1 else f"{1 / times:.0f} times lower"
        yield Finding("rate.off", "warning", f"The learning rate is {word} than usual for this size", text, numbers)


def _schedule(case: Case) -> Iterator[Finding]:
    config = case.config
    steps = case.whole("max_iters")
    if config is None or steps is None or not config.decay_lr or "warmup_iters" not in case.measured.inference.settings:
        return
    end = max(config.lr_decay_iters, 1)
    if config.warmup_iters > LONG_WARM_UP * steps:
        text = f"{config.warmup_iters:,} of {steps:,} steps. Two per cent is usual; the run learns slowly until then."
        title = "The warm-up takes a large part of the run"
        yield Finding("rate.warm_up", "warning", title, text, {"warmup_iters": config.warmup_iters, "steps": steps})
    progress = min(1.0, max(0.0, (steps - config.warmup_iters) / max(1, end - config.warmup_iters)))
    final = config.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (config.learning_rate - config.min_lr)
    if final > UNDECAYED * config.learning_rate > 0:
        text = (
            f"lr_decay_iters is {config.lr_decay_iters:,} and the run ends at {steps:,}, where the rate is still "
            f"{final:.1e} of {config.learning_rate:.1e}. Set lr_decay_iters = max_iters: the fall at the end lowers "
            "the loss."
        )
        numbers: dict[str, Number] = {"final": final, "lr_decay_iters": config.lr_decay_iters, "max_iters": steps}
        yield Finding("rate.undecayed", "warning", "The learning rate hardly falls before the run ends", text, numbers)


def _now(case: Case) -> Iterator[Finding]:
    """The losses as they stand, and what they mean."""
    evals = case.run.evals.totals["val_loss"]
    steps = case.run.steps.totals["loss"]
    last = evals.last if evals.last is not None else steps.last
    if last is None:
        return
    kind = "validation" if evals.last is not None else "training"
    words = case.whole("vocab_size")
    guessing = math.log(words) if words else None
    at = case.run.evals.curve("val_loss")[-1:] if evals.last is not None else case.run.steps.curve("loss")[-1:]
    where = f" at step {at[0][0]:,.0f}" if at else ""
    said = (
        f"perplexity is e^loss: a figure like {EXAMPLE_PERPLEXITY:.0f} is a perplexity, that of a loss of "
        f"{math.log(EXAMPLE_PERPLEXITY):.1f}, and no loss"
    )
    if guessing is not None:
        said += f"; a model that guesses among {words:,} tokens has a loss of {guessing:.1f}"
    worse = guessing is not None and last > guessing + 1 and at and at[0][0] > 100
    impossible = (
        f"{last:.2f} is more than guessing gives: it has diverged, or the figure is a perplexity" if worse else None
    )
    noise = losses.val_noise(case.measured)
    noisy = f"one validation estimate of this size varies by {noise:.4f} (standard deviation)" if noise else None
    numbers: dict[str, Number] = {"loss": last, "perplexity": forecast.perplexity(last), "noise": noise}
    title = f"The {kind} loss is {last:.4f}{where}, a perplexity of {forecast.perplexity(last):,.1f}"
    text = sentences((said, impossible, noisy if kind == "validation" else None))
    yield Finding("loss.now", "warning" if worse else "info", title, text, known(numbers))


def _batch(case: Case) -> Iterator[Finding]:
    """Tokens a step against the batch that the loss asks for."""
    tokens = case.measured.tokens_per_step
    recent = [y for _, y in case.run.steps.curve("loss")[-20:]]
    words = case.whole("vocab_size")
    if tokens is None or len(recent) < health.LEAST_STEPS or words is None or words < 8192:
        return  # the law is for words of a large vocabulary, not for characters
    loss = sorted(recent)[len(recent) // 2]
    critical = CRITICAL_TOKENS / max(loss, 1.5) ** CRITICAL_EXPONENT
    numbers: dict[str, Number] = {"tokens_per_step": tokens, "critical_tokens": critical, "loss": loss}
    law = f"At a loss of {loss:.2f} arithmetic is best spent near {count(critical)} tokens a step (Kaplan et al. 2020)"
    if tokens < SMALL_BATCH * critical:
        text = (
            f"{law}; {tokens:,} are few: gradients are noisy, and the usual learning rates, made for half a million, "
            "are too high. More accumulation steps cost no memory."
        )
        yield Finding("batch.small", "warning", "The batch is small for this loss", text, numbers)
    else:
        much = " Larger batches go faster only over many cards." if tokens > 4 * critical else ""
        title = f"{tokens:,} tokens a step are enough for steady gradients"
        yield Finding("batch.enough", "info", title, f"{law}; the run has {tokens:,}.{much}", numbers)


# --- data, and what to expect ------------------------------------------------------------------------


def _data(case: Case) -> Iterator[Finding]:
    tokens, steps = case.measured.tokens_per_step, case.planned_steps
    if tokens is None or steps is None:
        return
    total = tokens * steps
    dataset = case.measured.value("dataset_tokens")
    whole = f"{steps:,} steps × {tokens:,} tokens = {count(total)} tokens"
    numbers: dict[str, Number] = {"total_tokens": total}
    if not isinstance(dataset, int) or not dataset:
        text = sentences(
            (whole, "how often that is the data: give --dataset_tokens=3.68B or what your train.bin holds")
        )
        yield Finding("data.tokens", "info", f"The run reads {count(total)} tokens", text, numbers)
        return
    passes = total / dataset
    numbers |= {"dataset_tokens": dataset, "passes": passes}
    worth = forecast.effective_tokens(total, dataset)
    text = sentences(
        (
            f"{whole}; the data hold {count(dataset)}",
            f"repeated tokens are worth a little less: {count(worth)} fresh ones (Muennighoff et al. 2023)"
            if passes > 1
            else None,
            "beyond about four passes each is worth much less: more data, or fewer steps"
            if passes > MANY_PASSES
            else None,
        )
    )
    title = f"The run goes {passes:.2f} times over the data"
    yield Finding("data.passes", "warning" if passes > MANY_PASSES else "info", title, text, numbers)


def _expected(case: Case) -> Iterator[Finding]:
    """What published scaling laws say of the end, and of half and twice the run."""
    tokens, steps = case.measured.tokens_per_step, case.planned_steps
    parameters, words = case.measured.params, case.whole("vocab_size")
    if not tokens or not steps or not parameters or words is None or words < 8192:
        return
    dataset = case.measured.value("dataset_tokens")
    data = float(dataset) if isinstance(dataset, int) and dataset else None
    total = float(tokens * steps)
    at = forecast.expect(parameters, total, data)
    half, twice = (forecast.expect(parameters, total * share, data) for share in (0.5, 2.0))
    middle, before, after = ((each.low + each.high) / 2 for each in (at, half, twice))
    low, high = forecast.perplexity(at.low), forecast.perplexity(at.high)
    balanced = forecast.TOKENS_PER_PARAMETER * parameters
    text = sentences(
        (
            f"published laws put {count(parameters)} parameters after {count(total)} tokens at a loss of "
            f"{at.low:.2f} to {at.high:.2f}, a perplexity of {low:.0f} to {high:.0f}; {at.note}",
            f"{at.tokens_per_parameter:.0f} tokens a parameter; Chinchilla's balance is "
            f"{forecast.TOKENS_PER_PARAMETER:.0f}, "
            f"{balanced / tokens:,.0f} steps here: up to there more steps pay best, beyond it a larger model would",
            f"half the steps would end {before - middle:.2f} higher, twice the steps {middle - after:.2f} lower",
        )
    )
    numbers: dict[str, Number] = {
        "low": at.low,
        "high": at.high,
        "tokens_per_parameter": at.tokens_per_parameter,
        "balanced_steps": balanced / tokens,
        "gain_of_twice": middle - after,
    }
    title = f"A loss near {middle:.1f} is to be expected at the end, give or take 0.3"
    yield Finding("loss.expected", "info", title, text, numbers)


def _forecast(case: Case) -> Iterator[Finding]:
    found = expected_end(case.measured)
    if found is None:
        return
    planned = case.whole("max_iters") or 0
    far = "" if found.step >= planned else ", twice as far as it was seen, and no curve tells more"
    text = sentences(
        (
            f"from its own validation losses up to step {found.seen_until:,.0f}: {found.loss:.3f} at step "
            f"{found.step:,.0f}, nine times in ten between {found.low:.3f} and {found.high:.3f}{far}; {found.note}",
            f"twice as many steps would bring it {found.gain_per_doubling:.3f} lower",
        )
    )
    numbers: dict[str, Number] = {"step": found.step, "loss": found.loss, "low": found.low, "high": found.high}
    numbers["gain_per_doubling"] = found.gain_per_doubling
    title = f"Its own curve leads to {found.loss:.2f} ({found.low:.2f} to {found.high:.2f}) at step {found.step:,.0f}"
    yield Finding("loss.forecast", "info", title, text, numbers)
