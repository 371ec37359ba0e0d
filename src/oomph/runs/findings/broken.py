"""Findings about broken figures: NaN, skipped steps, impossible or constant losses."""

from __future__ import annotations

import math
from collections.abc import Iterator

from oomph.runs import health
from oomph.runs.figures import Evidence
from oomph.runs.findings import Finding, listed, sentences
from oomph.runs.run import Scalar

HIGH_RATE = 5e-3  # for AdamW
SKIPPED = 0.1  # share of the steps: more than a scaler needs to find its scale
# Programs whose loss is a cross-entropy over tokens.
LANGUAGE_MODELS = frozenset(
    ("nanogpt", "nanochat", "build-nanogpt", "llm.c", "modded-nanogpt", "torchtitan", "Megatron-LM", "litgpt", "oomph")
)


def findings(evidence: Evidence) -> Iterator[Finding]:
    """The findings, worst first."""
    yield from _not_finite(evidence)
    yield from _skipped(evidence)
    yield from _impossible(evidence)
    yield from _constant(evidence)


def _not_finite(evidence: Evidence) -> Iterator[Finding]:
    found = health.not_finite(evidence.run)
    mean = evidence.run.printed.mean_loss
    if found is None and mean is not None and not math.isfinite(mean):
        title = "The mean training loss of the whole run is NaN or infinite"
        yield Finding("loss.not_finite", "error", title, "At least one step's loss was.", {}, "read")
        return
    if found is None:
        yield from _not_finite_column(evidence)
        return
    half = (
        "float16 overflows above 65,504 and needs a GradScaler; bfloat16 has the range of float32"
        if evidence.measured.value("dtype") == "float16"
        and not str(evidence.measured.value("device")).startswith("cpu")
        else None
    )
    back = "go back to the last checkpoint before it, with a lower learning rate or a longer warm-up"
    unit = "log entry" if evidence.run.step_unit == "entry" else evidence.run.step_unit
    numbers: dict[str, Scalar] = {"step": found.step, "times": found.times}
    if not found.stays:
        title = f"{found.what} is NaN or infinite at {unit} {found.step:,}, and a number again later"
        text = f"{found.times:,} of {found.rows:,} logged ones are. Under float16 a loss scaler skips such steps."
        yield Finding("loss.not_finite", "warning", title, text, numbers, "read")
        return
    are = "1 logged one is" if found.times == 1 else f"{found.times:,} logged ones are"
    zero = evidence.run.steps.totals["loss"].last == 0.0 and found.what == "The gradient norm"
    masked = "the loss of 0 beside it is a NaN too: transformers' Trainer prints 0 in its place" if zero else None
    if found.times == found.rows:  # NaN from the start: not a divergence
        every = f"{unit} {found.step:,}" if found.times == 1 else f"every {unit.removeprefix('log ')} of the log"
        title = f"{found.what} is NaN at {every}"
        rate = evidence.run.steps.totals["lr"]
        high = (
            f"; the learning rate is {rate.high:g}, and AdamW's are 1e-5 to 1e-3 as a rule"
            if rate.high > HIGH_RATE
            else ""
        )
        causes = (
            "nowhere in this text is it a number. If it was so from the first step on, look at the data (labels that "
            "are all masked), the dtype (float16 without a loss scaler), the attention kernel and the weights; a "
            f"learning rate needs some steps to do that{high}"
        )
        sure = zero or found.what != "The gradient norm" or found.times >= health.LEAST_NAN_NORMS
        text = sentences((causes, masked, half))
        yield Finding("loss.not_finite", "error" if sure else "warning", title, text, numbers, "read")
        return
    lost = "the weights are lost from there on, and every further step is wasted"
    if found.what == "The gradient norm" and not zero:
        lost = "unless the program skipped those steps, the weights are NaN from there on"
    text = sentences(
        (
            f"{are}; {lost}",
            masked,
            back,
            half,
        )
    )
    title = f"{found.what} is NaN from {unit} {found.step:,} on"
    yield Finding("loss.not_finite", "error", title, text, numbers, "read")


def _not_finite_column(evidence: Evidence) -> Iterator[Finding]:
    """NaN in a table whose columns are parts of the loss."""
    for event in evidence.run.events:
        if event.kind == "nan":
            epoch, _, columns = event.text.partition(": ")
            names = columns.split(", ")
            title = f"{listed(names)} {'are' if len(names) > 1 else 'is'} NaN or infinite at epoch {epoch}"
            text = "It is the first such row in this text."
            yield Finding("loss.not_finite", "error", title, text, {"epoch": int(epoch), "columns": columns}, "read")
            return


def _skipped(evidence: Evidence) -> Iterator[Finding]:
    """Steps that a loss scaler skipped because gradients overflowed float16."""
    printed, overflows = evidence.run.printed, evidence.run.event_counts.get("overflow", 0)
    skipped, steps = printed.skipped_steps or 0, printed.counted_steps or 0
    text = (
        "A loss scaler skips a step whose gradients overflow float16 and halves its scale: a few at the start are "
        "usual. If it goes on, the loss or the gradients are NaN: bfloat16 has the range of float32."
    )
    if "lowest scale" in evidence.run.event_counts:
        title = "The loss scale is at its lowest, and the gradients still overflow: such steps change nothing"
        yield Finding("loss.skipped", "warning", title, text, {}, "read")
    elif skipped > SKIPPED * steps and steps >= health.LEAST_STEPS:
        title = f"{skipped:,} of {steps:,} steps were skipped: their gradients overflowed"
        yield Finding("loss.skipped", "warning", title, text, {"skipped": skipped, "steps": steps}, "read")
    elif overflows and overflows > SKIPPED * evidence.run.steps.count:
        times = "one step" if overflows == 1 else f"{overflows:,} steps"
        yield Finding("loss.skipped", "info", f"The loss scaler skipped {times}", text, {"skipped": overflows}, "read")


def _impossible(evidence: Evidence) -> Iterator[Finding]:
    """Impossible figures of a language model: a loss or a step time of 0 or less. Other losses may be negative."""
    steps, evals = evidence.run.steps.totals, evidence.run.evals.totals
    if evidence.run.program not in LANGUAGE_MODELS:
        return
    logged = [("training loss", steps["loss"]), ("validation loss", evals["val_loss"]), ("step time", steps["ms"])]
    wrong = [(name, total.low) for name, total in logged if total.count and total.low <= 0]
    if not wrong:
        return
    text = sentences(
        (
            f"the lowest logged: {listed(f'a {name} of {low:g}' for name, low in wrong)}",
            "a cross-entropy is above 0, and a step takes time: the log is damaged, the model sees its own targets, or "
            "the figures are not from this run",
        )
    )
    title = f"The log has impossible figures: {listed(name for name, _ in wrong)} of 0 or less"
    yield Finding("loss.impossible", "warning", title, text, dict(wrong))


def _constant(evidence: Evidence) -> Iterator[Finding]:
    if (loss := health.constant(evidence.run)) is not None:
        title = f"The loss is the same in all {evidence.run.steps.count:,} logged steps: {loss:g}"
        text = "The weights do not change, or it is not the loss of these steps that is printed."
        yield Finding("loss.constant", "warning", title, text, {"loss": loss}, "read")
    elif (loss := health.constant_evaluation(evidence.run)) is not None:
        count = evidence.run.evals.totals["val_loss"].count
        title = f"The validation loss hardly moves in all {count:,} evaluations: {loss:.4g}"
        text = "The model learns nothing that it is evaluated on, or it is not this model that is evaluated."
        yield Finding("loss.constant", "warning", title, text, {"loss": loss}, "read")
