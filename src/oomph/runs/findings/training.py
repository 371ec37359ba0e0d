"""Findings about the training: losses, learning rate, batch, data, and the loss to expect."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from oomph.fitting.grow import GOOD_PASSES, TOKENS_PER_PARAMETER, learning_rate, rate_source
from oomph.runs import curves, health
from oomph.runs.figures import Evidence
from oomph.runs.findings import Finding, known, sentences
from oomph.runs.findings.broken import LANGUAGE_MODELS
from oomph.runs.run import Scalar
from oomph.units import count

LR_OFF = 3.0  # times the usual learning rate, either way
LONG_WARM_UP = 0.2  # share of the run
UNDECAYED = 0.5  # of the peak learning rate, at the end of the run
# The critical batch: a loss L is reached with the fewest FLOPs near B* / L^(1/0.21) tokens per step (Kaplan et al.
# 2020, arXiv:2001.08361, equation 1.4).
CRITICAL_TOKENS, CRITICAL_EXPONENT = 2e8, 1 / 0.21
SMALL_BATCH = 1 / 16
EXPLODED = 10.0  # times the median gradient norm
EXAMPLE_PERPLEXITY = 22.0
BEGUN_WITH = 1.5  # nats below guessing: a lower first loss means pretrained weights
STALE = 0.5  # share of the last step; older evaluations do not describe the current state
LEAST_VOCABULARY = 8192  # the laws are for large vocabularies, not for characters


def findings(evidence: Evidence) -> Iterator[Finding]:
    """The findings, worst first."""
    yield from _diverging(evidence)
    yield from _overfitting(evidence)
    yield from _gradients(evidence)
    yield from _learning_rate(evidence)
    yield from _schedule(evidence)
    yield from _now(evidence)
    yield from _batch(evidence)
    yield from _data(evidence)
    yield from _expected(evidence)
    yield from _forecast(evidence)


# --- what is wrong -------------------------------------------------------------------------------------


def _diverging(evidence: Evidence) -> Iterator[Finding]:
    rise = health.diverging(evidence.run)
    if rise is None or evidence.run.steps.totals["loss"].low < 0:  # reinforcement learning's losses rise and fall
        return
    text = sentences(
        (
            f"it was {rise.lowest:.3f} around step {rise.lowest_step:,} and is {rise.now:.3f} at step {rise.step:,}, "
            "more than the noise of single batches",
            "usual causes: a learning rate too high for the width or the batch, a warm-up that is too short, bad data",
        )
    )
    numbers: dict[str, Scalar] = {"lowest": rise.lowest, "lowest_step": rise.lowest_step, "now": rise.now}
    title = f"The training loss has risen by {rise.by:.2f}"
    yield Finding("loss.diverging", "error" if rise.by > 1 else "warning", title, text, numbers)


def _overfitting(evidence: Evidence) -> Iterator[Finding]:
    found = health.overfitting(evidence.run, curves.val_noise(evidence.measured))
    if found is None:
        return
    gap = f", and the training loss is {found.gap:.3f} lower" if found.gap is not None else ""
    text = sentences(
        (
            f"the lowest validation loss was {found.best_val:.4f} at step {found.best_step:,}; at step "
            f"{found.step:,} it is {found.val:.4f}{gap}",
            "the model memorises the training data: stop at the lowest loss, or use more data, dropout or a smaller "
            "model",
        )
    )
    numbers: dict[str, Scalar] = {"best_step": found.best_step, "best_val": found.best_val, "val": found.val}
    yield Finding("loss.overfitting", "warning", f"Overfitting since step {found.best_step:,}", text, numbers)


def _gradients(evidence: Evidence) -> Iterator[Finding]:
    norms = [norm for _, norm in evidence.run.steps.curve("grad_norm")]
    if len(norms) < health.LEAST_STEPS:
        return
    middle = sorted(norms)[len(norms) // 2]
    last = max(norms[-5:])
    if middle > 0 and last > EXPLODED * middle:
        text = f"The median norm is {middle:.3g}; one of the last five steps had {last:.3g}. Divergence often follows."
        yield Finding(
            "loss.gradients", "warning", "Gradient norms have exploded", text, {"median": middle, "last": last}
        )


# --- settings -----------------------------------------------------------------------------------


def _from_scratch(evidence: Evidence) -> bool:
    """Whether training started from random weights, which the rules for pretraining assume."""
    init = evidence.measured.value("init_from")
    if isinstance(init, str) and init not in ("scratch", "resume"):
        return False
    first = evidence.run.steps.totals["loss"].first
    begun = evidence.run.steps.totals["step"].first
    vocabulary = evidence.measured.whole("vocab_size")
    if first is None or begun is None or begun > 10 or vocabulary is None:
        return True
    return first > math.log(vocabulary) - BEGUN_WITH


def _learning_rate(evidence: Evidence) -> Iterator[Finding]:
    rate, config = evidence.measured.value("learning_rate"), evidence.config
    if not isinstance(rate, float | int) or config is None or config.optimizer != "adamw" or not rate:
        return
    if config.method != "full" or not _from_scratch(evidence):
        return
    if evidence.measured.params is None:
        return
    body = evidence.measured.params - config.vocab_size * config.n_embd
    usual = learning_rate(config.n_embd, body)
    times = rate / usual
    text = (
        f"For a width of {config.n_embd:,} and {count(body)} parameters without embeddings, {usual:.1e} is usual at "
        f"half a million tokens per step ({rate_source(config.n_embd)}); the run uses {rate:.1e}."
    )
    numbers: dict[str, Scalar] = {"learning_rate": rate, "usual": usual}
    if 1 / LR_OFF <= times <= LR_OFF:
        title = f"The learning rate, {rate:.1e}, is usual for this size"
        yield Finding("rate.usual", "info", title, text, numbers)
    else:
        word = f"{min(times, 1e6):,.0f} times higher" if times > 1 else f"{min(1 / times, 1e6):,.0f} times lower"
        yield Finding("rate.off", "warning", f"The learning rate is {word} than usual for this size", text, numbers)


def _schedule(evidence: Evidence) -> Iterator[Finding]:
    config = evidence.config
    steps = evidence.measured.whole("max_iters")
    if (
        config is None
        or steps is None
        or not config.decay_lr
        or "warmup_iters" not in evidence.measured.inference.settings
    ):
        return
    end = max(config.lr_decay_iters, 1)
    if config.warmup_iters > LONG_WARM_UP * steps:
        text = f"{config.warmup_iters:,} of {steps:,} steps. 2 % is usual; until then the run learns slowly."
        title = "The warm-up takes a large part of the run"
        yield Finding("rate.warm_up", "warning", title, text, {"warmup_iters": config.warmup_iters, "steps": steps})
    progress = min(1.0, max(0.0, (steps - config.warmup_iters) / max(1, end - config.warmup_iters)))
    final = config.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (config.learning_rate - config.min_lr)
    if final > UNDECAYED * config.learning_rate > 0:
        text = (
            f"lr_decay_iters is {config.lr_decay_iters:,}, but the run ends at {steps:,}, where the rate is still "
            f"{final:.1e} of {config.learning_rate:.1e}. Set lr_decay_iters = max_iters: the decay at the end lowers "
            "the loss."
        )
        numbers: dict[str, Scalar] = {"final": final, "lr_decay_iters": config.lr_decay_iters, "max_iters": steps}
        yield Finding("rate.undecayed", "warning", "The learning rate hardly decays before the run ends", text, numbers)


def _now(evidence: Evidence) -> Iterator[Finding]:
    """The current loss, and its meaning if it is a language model's."""
    run, measured = evidence.run, evidence.measured
    evals, steps = run.evals.totals["val_loss"], run.steps.totals["loss"]
    stale = (run.evals.last_key or 0.0) < STALE * (run.steps.last_key or 0.0) and steps.last is not None
    validated = evals.last is not None and not stale
    last = evals.last if validated else steps.last
    if last is None or (last == 0.0 and health.not_finite(run) is not None):  # a Trainer's 0 for NaN
        return
    last += 0.0  # no "-0"
    kind = "validation" if validated else "training"
    series, name = (run.evals, "val_loss") if validated else (run.steps, "loss")
    rows = zip(series.column("step"), series.column(name), strict=True)
    at = [(step, loss) for step, loss in rows if loss == last][-1:]
    unit = "log entry" if run.step_unit == "entry" else run.step_unit
    where = f" at {unit} {at[0][0]:,.0f}" if at else ""
    if place := run.places.get("evals" if validated else "steps"):
        where = f" {place}" if place.startswith("after") else f" at {place}"
    vocabulary = measured.whole("vocab_size")
    if run.program not in LANGUAGE_MODELS and vocabulary is None:
        title = f"The {kind} loss is {last:.4g}{where}"
        yield Finding("loss.now", "info", title, "", {"loss": last}, "read")
        return
    guessing = math.log(vocabulary) if vocabulary else None
    meaning = (
        f"perplexity is e^loss: a figure like {EXAMPLE_PERPLEXITY:.0f} is not a loss but the perplexity of a loss of "
        f"{math.log(EXAMPLE_PERPLEXITY):.1f}"
    )
    if guessing is not None:
        meaning += f"; guessing among {vocabulary:,} tokens gives a loss of {guessing:.1f}"
    worse = guessing is not None and last > guessing + 1 and at and at[0][0] > 100
    impossible = (
        f"{last:.2f} is worse than guessing: the run diverged, or the figure is a perplexity" if worse else None
    )
    noise = curves.val_noise(measured)
    noisy = f"one validation loss has a standard deviation of {noise:.4f}" if noise else None
    numbers: dict[str, Scalar] = {"loss": last, "perplexity": curves.perplexity(last), "noise": noise}
    title = f"The {kind} loss is {last:.4f}{where}, a perplexity of {curves.perplexity(last):,.1f}"
    text = sentences((meaning, impossible, noisy if kind == "validation" else None))
    yield Finding("loss.now", "warning" if worse else "info", title, text, known(numbers))


def _batch(evidence: Evidence) -> Iterator[Finding]:
    """Tokens per step against the critical batch at this loss."""
    tokens = evidence.measured.tokens_per_step
    recent = [y for _, y in evidence.run.steps.curve("loss")[-20:]]
    vocabulary = evidence.measured.whole("vocab_size")
    if tokens is None or len(recent) < health.LEAST_STEPS or vocabulary is None or vocabulary < LEAST_VOCABULARY:
        return
    if not _from_scratch(evidence):
        return
    loss = sorted(recent)[len(recent) // 2]
    critical = CRITICAL_TOKENS / max(loss, 1.5) ** CRITICAL_EXPONENT
    numbers: dict[str, Scalar] = {"tokens_per_step": tokens, "critical_tokens": critical, "loss": loss}
    law = f"At a loss of {loss:.2f}, about {count(critical)} tokens per step need the fewest FLOPs (Kaplan et al. 2020)"
    if tokens < SMALL_BATCH * critical:
        text = (
            f"{law}; {tokens:,} are few: gradients are noisy, and the usual learning rates, meant for half a million, "
            "are too high. More accumulation steps cost no memory."
        )
        yield Finding("batch.small", "warning", "The batch is small for this loss", text, numbers)
    else:
        much = " A larger batch is faster only on many cards." if tokens > 4 * critical else ""
        title = f"{tokens:,} tokens per step are enough"
        yield Finding("batch.enough", "info", title, f"{law}; the run has {tokens:,}.{much}", numbers)


# --- data, and what to expect ------------------------------------------------------------------------


def _data(evidence: Evidence) -> Iterator[Finding]:
    tokens, steps = evidence.measured.tokens_per_step, evidence.planned_steps
    if tokens is None or steps is None:
        return
    total = tokens * steps
    dataset = evidence.measured.value("dataset_tokens")
    whole = f"{steps:,} steps × {tokens:,} tokens = {count(total)} tokens"
    numbers: dict[str, Scalar] = {"total_tokens": total}
    if not isinstance(dataset, int) or not dataset:
        text = sentences((whole, "for the number of passes over the data, give its size: --dataset_tokens=3.68B"))
        yield Finding("data.tokens", "info", f"The run reads {count(total)} tokens", text, numbers)
        return
    passes = total / dataset
    numbers |= {"dataset_tokens": dataset, "passes": passes}
    worth = effective_tokens(total, dataset)
    text = sentences(
        (
            f"{whole}; the dataset has {count(dataset)}",
            f"repeated tokens are worth a little less: {count(worth)} new ones (Muennighoff et al. 2023)"
            if passes > 1
            else None,
            "after about four passes a repeated token is worth much less: use more data, or fewer steps"
            if passes > GOOD_PASSES
            else None,
        )
    )
    title = f"The run makes {passes:.2f} passes over the data"
    yield Finding("data.passes", "warning" if passes > GOOD_PASSES else "info", title, text, numbers)


def _expected(evidence: Evidence) -> Iterator[Finding]:
    """The loss that published scaling laws give for the end, and for half and twice the steps."""
    tokens, steps = evidence.measured.tokens_per_step, evidence.planned_steps
    parameters, vocabulary = evidence.measured.params, evidence.measured.whole("vocab_size")
    if not tokens or not steps or not parameters or vocabulary is None or vocabulary < LEAST_VOCABULARY:
        return
    dataset = evidence.measured.value("dataset_tokens")
    data = float(dataset) if isinstance(dataset, int) and dataset else None
    total = float(tokens * steps)
    at = expected_loss(parameters, total, data)
    reached = evidence.run.evals.totals["val_loss"].low
    if not _from_scratch(evidence) or reached < at.low:
        return  # the log itself has a better forecast
    half, twice = (expected_loss(parameters, total * share, data) for share in (0.5, 2.0))
    middle, before, after = ((each.low + each.high) / 2 for each in (at, half, twice))
    low, high = curves.perplexity(at.low), curves.perplexity(at.high)
    balanced = TOKENS_PER_PARAMETER * parameters
    text = sentences(
        (
            f"published scaling laws give {count(parameters)} parameters after {count(total)} tokens a loss of "
            f"{at.low:.2f} to {at.high:.2f}, a perplexity of {low:.0f} to {high:.0f}; they were fitted on other text, "
            "another vocabulary and finished schedules, so this is a guide to about 0.3, not a forecast",
            f"the run has {at.tokens_per_parameter:.0f} tokens per parameter; Chinchilla's optimum is "
            f"{TOKENS_PER_PARAMETER:.0f} ({balanced / tokens:,.0f} steps here): up to there more steps help most, "
            "beyond it a larger model",
            f"half the steps would end {before - middle:.2f} higher, twice the steps {middle - after:.2f} lower",
        )
    )
    numbers: dict[str, Scalar] = {
        "low": at.low,
        "high": at.high,
        "tokens_per_parameter": at.tokens_per_parameter,
        "balanced_steps": balanced / tokens,
        "gain_of_twice": middle - after,
    }
    title = f"Expected loss at the end: about {middle:.1f} ± 0.3"
    yield Finding("loss.expected", "info", title, text, numbers)


def _forecast(evidence: Evidence) -> Iterator[Finding]:
    found = curves.expected_end(evidence.measured)
    if found is None:
        return
    planned = evidence.measured.whole("max_iters") or 0
    far = "" if found.step >= planned else "; no forecast goes further than twice the steps seen"
    text = sentences(
        (
            f"from its own validation losses up to step {found.seen_until:,.0f}: {found.loss:.3f} at step "
            f"{found.step:,.0f} (90 %: {found.low:.3f} to {found.high:.3f}){far}; {found.note}",
            f"twice as many steps would bring it {found.gain_per_doubling:.3f} lower",
        )
    )
    numbers: dict[str, Scalar] = {"step": found.step, "loss": found.loss, "low": found.low, "high": found.high}
    numbers["gain_per_doubling"] = found.gain_per_doubling
    title = f"Forecast: a loss of {found.loss:.2f} ({found.low:.2f} to {found.high:.2f}) at step {found.step:,.0f}"
    yield Finding("loss.forecast", "info", title, text, numbers)


# --- scaling laws ----------------------------------------------------------------------------------


class ScalingLaw(msgspec.Struct, frozen=True):
    """loss = floor + a · parameters^-alpha + b · tokens^-beta."""

    floor: float
    a: float
    alpha: float
    b: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        return self.floor + self.a * math.pow(parameters, -self.alpha) + self.b * math.pow(tokens, -self.beta)


HOFFMANN = ScalingLaw(1.69, 406.4, 0.34, 410.7, 0.28)  # Hoffmann et al. 2022, arXiv:2203.15556, equation 10
BESIROGLU = ScalingLaw(1.8172, 482.01, 0.3478, 2085.43, 0.3658)  # Besiroglu et al. 2024, arXiv:2404.10102
_REUSE = 15.39  # R*_D of Muennighoff et al. 2023, arXiv:2305.16264: how fast repeated tokens lose value


class ExpectedLoss(msgspec.Struct, frozen=True):
    """The range of losses that published laws give."""

    low: float
    high: float
    tokens_per_parameter: float


def effective_tokens(tokens: float, dataset_tokens: float | None) -> float:
    """New tokens that are worth as much as `tokens` from a smaller dataset."""
    if not dataset_tokens or tokens <= dataset_tokens:
        return tokens
    passes = tokens / dataset_tokens - 1
    return dataset_tokens * (1 + _REUSE * (1 - math.exp(-passes / _REUSE)))


def expected_loss(parameters: float, tokens: float, dataset_tokens: float | None = None) -> ExpectedLoss:
    """The loss of a model of that size after so many tokens, by published scaling laws."""
    losses = [law.loss(parameters, effective_tokens(tokens, dataset_tokens)) for law in (HOFFMANN, BESIROGLU)]
    return ExpectedLoss(min(losses), max(losses), tokens / parameters)
