"""Runs held against each other: what differs, how fast, how good, who wins at what, and what cannot be said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from oomph.errors import InputError, Problem
from oomph.planner import Plan
from oomph.runs import losses
from oomph.runs.case import Case, predict
from oomph.runs.forecast import Forecast
from oomph.runs.losses import Losses
from oomph.runs.measured import Measured, measure
from oomph.runs.model import Run
from oomph.runs.reader import Override, Readable, read
from oomph.runs.verdicts import Verdict, expected_end, verdicts, why_no_forecast

# Keys that say where a run was kept, not what it was.
_LABELS = frozenset(
    ("out_dir", "wandb_log", "wandb_project", "wandb_run_name", "always_save_checkpoint", "log_interval", "trainer")
)


class Metric(msgspec.Struct, frozen=True):
    """One figure of each run; None where the log does not tell."""

    unit: str
    values: list[float | None]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome. `to_dict` is the JSON contract."""

    measured: list[Measured]
    plans: list[Plan | None]  # each run's prediction, where its log tells enough
    runs: list[str]
    differences: dict[str, list[Any]]
    metrics: dict[str, Metric]
    losses: list[Losses]
    verdicts: list[Verdict]
    not_comparable: list[str]
    notes: list[str]
    forecasts: dict[str, Forecast]  # of each run's validation loss at its end, or twice as far as it got

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON object."""
        return {
            "runs": self.runs,
            "differences": self.differences,
            "metrics": msgspec.to_builtins(self.metrics),
            "losses": msgspec.to_builtins(self.losses),
            "verdicts": msgspec.to_builtins(self.verdicts),
            "not_comparable": self.not_comparable,
            "notes": self.notes,
            "forecasts": msgspec.to_builtins(self.forecasts),
        }


def compare(
    runs: Sequence[Run | Readable], gpu: str | None = None, *, overrides: Sequence[Override] = ()
) -> Comparison:
    """The runs side by side.

    A run is a `Run`, a log or a run's folder. `gpu` names the card of runs whose logs do not; `overrides` are settings
    of all of them. Raises `InputError`, for fewer than two runs too.
    """
    if len(runs) < 2:
        raise InputError(Problem("compare", "too few runs", found=str(len(runs)), allowed="at least two"))
    read_runs = [run if isinstance(run, Run) else read(run, overrides=overrides) for run in runs]
    measured = [_measure(run, gpu) for run in _named_apart(read_runs)]
    plans = [predict(run) for run in measured]
    kind = losses.kind_for(measured)
    same = [_same(measured, at, kind) for at in losses.AXES]
    return Comparison(
        measured=measured,
        plans=plans,
        runs=[run.name for run in measured],
        differences=_differences(measured),
        metrics=_metrics(measured, plans),
        losses=same,
        verdicts=verdicts(measured, same),
        not_comparable=_not_comparable(measured, kind),
        notes=[*_notes(measured), *_micro_batches(measured, plans)],
        forecasts={run.name: found for run in measured if (found := expected_end(run)) is not None},
    )


def _same(runs: Sequence[Measured], at: losses.At, kind: Literal["val", "train"]) -> Losses:
    """Losses at the same places: of evaluations, or of steps where evaluations stand apart."""
    found = losses.at_axis(runs, at, kind)
    if found.points:
        return found
    steps = losses.by_steps(runs, at)
    return steps if steps.points else found


def _measure(run: Run, gpu: str | None) -> Measured:
    found = measure(run)
    return measure(run, gpu) if found.inference.card.device is None and gpu is not None else found


def _named_apart(runs: Sequence[Run]) -> list[Run]:
    """Two runs of one name (two folders' train.log) become "name" and "name 2"."""
    seen: dict[str, int] = {}
    named = []
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        again = seen[run.name] > 1
        named.append(msgspec.structs.replace(run, name=f"{run.name} {seen[run.name]}") if again else run)
    return named


def _differences(runs: Sequence[Measured]) -> dict[str, list[Any]]:
    """Settings that are known of every run and not all the same."""
    names = dict.fromkeys(key for run in runs for key in run.inference.settings if key not in _LABELS)
    found: dict[str, list[Any]] = {}
    for key in names:
        values = [run.value(key) for run in runs]
        if all(key in run.inference.settings for run in runs) and any(value != values[0] for value in values):
            found[key] = values
    return found


def _metrics(runs: Sequence[Measured], plans: Sequence[Plan | None]) -> dict[str, Metric]:
    def of(unit: str, figure: Callable[[Measured], float | None]) -> Metric:
        return Metric(unit, [figure(run) for run in runs])

    def predicted(unit: str, figure: Callable[[Plan], float | None]) -> Metric:
        return Metric(unit, [None if plan is None else figure(plan) for plan in plans])

    metrics = {
        "params": of("", lambda run: run.params),
        "tokens_per_step": of("tokens", lambda run: run.tokens_per_step),
        "step_ms": of("ms", lambda run: run.pace.step_ms if run.pace else None),
        "tokens_per_s": of("tokens/s", lambda run: run.tokens_per_s),
        "flops_per_token": of("FLOP", lambda run: run.flops_per_token),
        "tflops": of("TFLOPS", lambda run: run.tflops),
        "mfu_nanogpt": of("of 312 TFLOPS", lambda run: run.mfu_nanogpt if run.run.program == "nanogpt" else None),
        "mfu": of("of the card's peak", lambda run: run.mfu),
        "memory_mib": of("MiB", lambda run: (run.memory_mib() or (None,))[0]),
        "predicted_memory_mib": predicted("MiB", lambda plan: plan.memory.total_mib),
        "predicted_step_ms": predicted("ms", lambda plan: plan.time.step_ms if plan.time else None),
        "steps": of("steps", lambda run: _reached(run, "step")),
        "tokens": of("tokens", _tokens),
        "train_hours": of("h", lambda run: _reached(run, "hours")),
        "best_val_loss": of("nats", lambda run: _lowest(run)),
        "val_noise": of("nats", losses.val_noise),
    }
    return {name: metric for name, metric in metrics.items() if any(value is not None for value in metric.values)}


def _tokens(run: Measured) -> float | None:
    return _reached(run, "tokens")


def _reached(run: Measured, at: losses.At) -> float | None:
    each = losses.scale(run, at)
    return run.run.steps_done * each if run.run.last_step is not None and each else None


def _lowest(run: Measured) -> float | None:
    total = run.run.evals.totals["val_loss"]
    return total.low if total.count else None


def _not_comparable(runs: Sequence[Measured], kind: str) -> list[str]:
    found = []
    for key, text in (
        (
            "vocab_size",
            "the vocabularies differ: a loss is per token, and a token is not the same text",
        ),
        ("dataset", "the data differ: losses over different text are not the same measure"),
        ("block_size", "the contexts differ: a longer one lowers the loss of the same model"),
        ("eval_iters", "the evaluations read different numbers of batches: their noise differs"),
    ):
        values = [run.value(key) for run in runs]
        if None not in values and len(set(values)) > 1:
            found.append(f"{text} ({_listed(values)})")
    schedules = [run.value("max_iters") for run in runs]
    if None not in schedules and len(set(schedules)) > 1 and any(run.value("decay_lr") for run in runs):
        found.append(
            f"the schedules end at different steps ({_listed(schedules)}): losses before the end favour the shorter"
        )
    tokens = [run.tokens_per_step for run in runs]
    if None not in tokens and len(set(tokens)) > 1:
        found.append(f"a step is not the same tokens ({_listed(tokens)}): losses at the same step mean little")
    cards = [device.name for run in runs if (device := run.inference.card.device) is not None]
    if len(set(cards)) > 1:
        found.append(f"the cards differ ({_listed(cards)}): times compare the cards too")
    if kind == "train":
        found.append("not every run has a validation loss: training losses, which dropout and luck of the batch move")
    kinds = [found_mib[1] for run in runs if (found_mib := run.memory_mib()) is not None]
    if len(set(kinds)) > 1:
        found.append(f"memory was read in different places ({_listed(kinds)})")
    found += [f"{run.name} has no step that was timed" for run in runs if run.pace is None]
    found += [f"{run.name} ran out of memory" for run in runs if run.run.ooms]
    return found


def _listed(values: Sequence[object]) -> str:
    return " against ".join(f"{value:,}" if type(value) is int else str(value) for value in values)


def _notes(runs: Sequence[Measured]) -> list[str]:
    notes = []
    tokens = {run.tokens_per_step for run in runs}
    accumulation = [run.value("gradient_accumulation_steps") for run in runs]
    if len(tokens) == 1 and None not in tokens and len(set(accumulation)) > 1:
        notes.append(
            f"accumulation differs ({_listed(accumulation)}), but an optimizer step is {tokens.pop():,} tokens in all: "
            "the same number of optimizer steps for the same tokens"
        )
    rates = [run.value("learning_rate") for run in runs]
    if None not in rates and len(set(rates)) > 1:
        notes.append(f"the learning rates differ ({_listed(rates)}): losses compare these too, not the models alone")
    notes += [f"{run.name}: no forecast: {why}" for run in runs if (why := why_no_forecast(run)) is not None]
    notes += [f"{run.name}: {note}" for run in runs for note in (*run.run.notes, *run.inference.notes)]
    notes += [f"{run.name}: {text}" for run in runs for text in run.inference.contradictions]
    return notes


def _micro_batches(runs: Sequence[Measured], plans: Sequence[Plan | None]) -> list[str]:
    """Where micro-batches differ: what each run would do with the first one's, so that nobody has to guess."""
    notes = []
    first = plans[0]
    for run, plan in zip(runs[1:], plans[1:], strict=True):
        if first is None or plan is None or plan.time is None or plan.time.mfu is None:
            continue
        size, tokens = first.config.batch_size, plan.data.tokens_per_step
        steps, rest = divmod(tokens, size * plan.config.block_size)
        if size == plan.config.batch_size or rest or steps % plan.config.world_size:
            continue
        other = Case(run, plan).variant(batch_size=size, gradient_accumulation_steps=steps)
        if other.time is None or other.time.mfu is None:
            continue
        smaller = plan.config.batch_size < size and other.time.mfu >= plan.time.mfu
        notes.append(
            f"with {runs[0].name}'s micro-batch, {size} × {steps}, {run.name} is predicted at an MFU of "
            f"{100 * other.time.mfu:.0f} % instead of {100 * plan.time.mfu:.0f} %"
            + (
                ": its smaller micro-batch does not raise it, and gives torch.compile nothing to fuse"
                if smaller
                else ""
            )
        )
    return notes
