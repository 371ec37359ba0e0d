"""`compare`: runs side by side: settings, speed, losses, which wins at what, and what is not comparable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from oomph.config import Override
from oomph.display import Displayed
from oomph.errors import InputError, Problem
from oomph.planning.plan import Plan
from oomph.predict.run_time import NANOGPT_PEAK_FLOPS
from oomph.runs import curves
from oomph.runs.curves import Axis, Forecast, Losses, expected_end, why_no_forecast
from oomph.runs.figures import Evidence, Measured, MemoryReading, measure, predict, predicted_mib
from oomph.runs.reading.reader import Readable, read
from oomph.runs.run import LoggedRun
from oomph.runs.verdicts import GoalVerdict, sentence, verdicts

# Keys that say where a run is stored, not what it is.
_LABELS = frozenset(
    ("out_dir", "wandb_log", "wandb_project", "wandb_run_name", "always_save_checkpoint", "log_interval", "trainer")
)


class Metric(msgspec.Struct, frozen=True):
    """One figure of each run; None if the log does not have it."""

    unit: str
    values: list[float | None]


class Caveat(msgspec.Struct, frozen=True):
    """Something to know about the comparison. The `id` is stable; the words are not."""

    id: str
    text: str


class Comparison(Displayed, msgspec.Struct, frozen=True, kw_only=True):
    """The result. `to_dict` is the JSON contract."""

    measured: list[Measured]
    plans: list[Plan | None]  # None if a log has too little
    runs: list[str]
    differences: dict[str, list[Any]]
    metrics: dict[str, Metric]
    losses: list[Losses]
    sentence: str  # the answer, without its full stop
    verdicts: list[GoalVerdict]
    not_comparable: list[Caveat]
    notes: list[Caveat]
    forecasts: dict[str, Forecast]  # of the validation loss at the end of a run, or at twice its steps so far

    def __repr__(self) -> str:
        wins = "; ".join(f"{each.goal}: {each.winner or 'open'}" for each in self.verdicts[:3])
        return f"<Comparison of {', '.join(self.runs)}{f' ({wins})' if wins else ''}>"

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON object."""
        return {
            "runs": self.runs,
            "sentence": self.sentence,
            "differences": self.differences,
            "metrics": msgspec.to_builtins(self.metrics),
            "losses": msgspec.to_builtins(self.losses),
            "verdicts": msgspec.to_builtins(self.verdicts),
            "not_comparable": [each.text for each in self.not_comparable],
            "notes": [each.text for each in self.notes],
            "forecasts": msgspec.to_builtins(self.forecasts),
        }


def compare(
    runs: Sequence[LoggedRun | Readable], gpu: str | None = None, *, overrides: Sequence[Override] = ()
) -> Comparison:
    """The runs side by side.

    A run is a `LoggedRun`, a log or a run's folder. `gpu` names the card where a log does not; `overrides` are settings
    of all runs. Raises `InputError`, also for fewer than two runs.
    """
    if len(runs) < 2:
        raise InputError(Problem("compare", "too few runs", found=str(len(runs)), allowed="at least two"))
    read_runs = [run if isinstance(run, LoggedRun) else read(run, overrides=overrides) for run in runs]
    measured = [_measure(run, gpu) for run in _with_unique_names(read_runs)]
    plans = [predict(run) for run in measured]
    kind = curves.kind_for(measured)
    same = [_same(measured, at, kind) for at in curves.AXES]
    won = verdicts(measured, same)
    return Comparison(
        measured=measured,
        plans=plans,
        runs=[run.name for run in measured],
        differences=_differences(measured),
        metrics=_metrics(measured, plans),
        losses=same,
        sentence=sentence(measured, won, same),
        verdicts=won,
        not_comparable=_not_comparable(measured, kind),
        notes=[*_notes(measured), *_micro_batches(measured, plans)],
        forecasts={run.name: found for run in measured if (found := expected_end(run)) is not None},
    )


def _same(runs: Sequence[Measured], at: Axis, kind: Literal["val", "train"]) -> Losses:
    """Losses at common points: of evaluations, or of the steps if evaluations do not overlap."""
    found = curves.at_axis(runs, at, kind)
    if found.points:
        return found
    steps = curves.by_steps(runs, at)
    return steps if steps.points else found


def _measure(run: LoggedRun, gpu: str | None) -> Measured:
    found = measure(run)
    return measure(run, gpu) if found.inference.card.device is None and gpu is not None else found


def _with_unique_names(runs: Sequence[LoggedRun]) -> list[LoggedRun]:
    """Two runs with the same name (train.log in two folders) become "name" and "name 2"."""
    seen: dict[str, int] = {}
    named = []
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        again = seen[run.name] > 1
        named.append(msgspec.structs.replace(run, name=f"{run.name} {seen[run.name]}") if again else run)
    return named


def _differences(runs: Sequence[Measured]) -> dict[str, list[Any]]:
    """Settings known for every run that differ."""
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

    a100 = f"of {NANOGPT_PEAK_FLOPS / 1e12:.0f} TFLOPS"
    metrics = {
        "params": of("", lambda run: run.params),
        "tokens_per_step": of("tokens", lambda run: run.tokens_per_step),
        "step_ms": of("ms", lambda run: run.pace.step_ms if run.pace else None),
        "tokens_per_s": of("tokens/s", lambda run: run.tokens_per_s),
        "flops_per_token": of("FLOP", lambda run: run.flops_per_token),
        "tflops": of("TFLOPS", lambda run: run.tflops),
        "mfu_nanogpt": of(a100, lambda run: run.mfu_nanogpt if run.run.program == "nanogpt" else None),
        "mfu": of("of the card's peak", lambda run: run.mfu),
        "memory_mib": of("MiB", lambda run: next((each.mib for each in run.memory()), None)),
        "predicted_memory_mib": Metric("MiB", _predicted_mib(runs, plans)),
        "predicted_step_ms": Metric("ms", [plan.time.step_ms if plan and plan.time else None for plan in plans]),
        "steps": of("steps", lambda run: _reached(run, "step")),
        "tokens": of("tokens", lambda run: _reached(run, "tokens")),
        "train_hours": of("h", lambda run: _reached(run, "hours")),
        "best_val_loss": of("nats", _lowest),
        "val_noise": of("nats", curves.val_noise),
    }
    return {name: metric for name, metric in metrics.items() if any(value is not None for value in metric.values)}


def _predicted_mib(runs: Sequence[Measured], plans: Sequence[Plan | None]) -> list[float | None]:
    """Each plan's figure for the kind of memory its run reported; for a run without, the kind that the others did."""
    kinds = [next((each.of for each in run.memory()), None) for run in runs]
    common = set(kinds) - {None}
    if not common:
        return [plan.memory.total_mib if plan is not None else None for plan in plans]
    fallback = common.pop() if len(common) == 1 else None
    return [
        predicted_mib(plan, MemoryReading("", 0.0, kind or fallback)) for kind, plan in zip(kinds, plans, strict=True)
    ]


def _reached(run: Measured, at: Axis) -> float | None:
    each = curves.scale(run, at)
    return run.run.steps_done * each if run.run.last_step is not None and each else None


def _lowest(run: Measured) -> float | None:
    total = run.run.evals.totals["val_loss"]
    return total.low if total.count else None


def _not_comparable(runs: Sequence[Measured], kind: str) -> list[Caveat]:
    found = []
    for key, text in (
        ("vocab_size", "the vocabularies differ: a loss is per token, and a token is not the same text"),
        ("dataset", "the datasets differ: losses on different text are not the same measure"),
        ("block_size", "the context lengths differ: a longer one lowers the loss of the same model"),
        ("eval_iters", "the evaluations read different numbers of batches: their noise differs"),
    ):
        values = [run.value(key) for run in runs]
        if None not in values and len(set(values)) > 1:
            found.append(Caveat(key, f"{text} ({_against(values)})"))
    schedules = [run.value("max_iters") for run in runs]
    if None not in schedules and len(set(schedules)) > 1 and any(run.value("decay_lr") for run in runs):
        text = f"the schedules end at different steps ({_against(schedules)}): losses before the end favour the shorter"
        found.append(Caveat("max_iters", text))
    tokens = [run.tokens_per_step for run in runs]
    if None not in tokens and len(set(tokens)) > 1:
        text = f"the tokens per step differ ({_against(tokens)}): losses at the same step mean little"
        found.append(Caveat("tokens_per_step", text))
    cards = [device.name for run in runs if (device := run.inference.card.device) is not None]
    if len(set(cards)) > 1:
        found.append(Caveat("card", f"the cards differ ({_against(cards)}): times compare the cards too"))
    if kind == "train":
        text = "not every run has a validation loss: these are training losses, which depend on dropout and the batch"
        found.append(Caveat("train_loss", text))
    readings = [each[0].name for run in runs if (each := run.memory())]
    if len(set(readings)) > 1:
        found.append(Caveat("memory", f"memory was read in different places ({_against(readings)})"))
    found += [Caveat("no_step_time", f"{run.name} has no timed step") for run in runs if run.pace is None]
    found += [Caveat("oom", f"{run.name} ran out of memory") for run in runs if run.run.ooms]
    return found


def _against(values: Sequence[object]) -> str:
    return " against ".join(f"{value:,}" if type(value) is int else str(value) for value in values)


def _notes(runs: Sequence[Measured]) -> list[Caveat]:
    notes = []
    tokens = {run.tokens_per_step for run in runs}
    accumulation = [run.value("gradient_accumulation_steps") for run in runs]
    if len(tokens) == 1 and None not in tokens and len(set(accumulation)) > 1:
        text = (
            f"accumulation differs ({_against(accumulation)}), but every optimizer step is {tokens.pop():,} tokens: "
            "the same number of optimizer steps for the same tokens"
        )
        notes.append(Caveat("accumulation", text))
    rates = [run.value("learning_rate") for run in runs]
    if None not in rates and len(set(rates)) > 1:
        text = f"the learning rates differ ({_against(rates)}): the losses compare these too, not only the models"
        notes.append(Caveat("learning_rate", text))
    unforeseen = [(run.name, why) for run in runs if (why := why_no_forecast(run)) is not None]
    notes += [Caveat("no_forecast", f"{name}: no forecast: {why}") for name, why in unforeseen]
    notes += [Caveat("log", f"{run.name}: {note}") for run in runs for note in (*run.run.notes, *run.inference.notes)]
    notes += [Caveat("contradiction", f"{run.name}: {text}") for run in runs for text in run.inference.contradictions]
    return notes


def _micro_batches(runs: Sequence[Measured], plans: Sequence[Plan | None]) -> list[Caveat]:
    """If micro-batches differ: the predicted MFU of each run with the first one's."""
    notes = []
    first = plans[0]
    for run, plan in zip(runs[1:], plans[1:], strict=True):
        if first is None or plan is None or plan.time is None or plan.time.mfu is None:
            continue
        size, tokens = first.config.batch_size, plan.data.tokens_per_step
        steps, rest = divmod(tokens, size * plan.config.block_size)
        if size == plan.config.batch_size or rest or steps % plan.config.world_size:
            continue
        other = Evidence(run, plan).variant(batch_size=size, gradient_accumulation_steps=steps)
        if other.time is None or other.time.mfu is None:
            continue
        text = (
            f"with {runs[0].name}'s micro-batch, {size} × {steps}, {run.name}'s predicted MFU is "
            f"{100 * other.time.mfu:.0f} % instead of {100 * plan.time.mfu:.0f} %"
        )
        if plan.config.batch_size < size and other.time.mfu >= plan.time.mfu:
            text += ": its smaller micro-batch does not raise it, and gives torch.compile nothing more to fuse"
            notes.append(Caveat("smaller_micro_batch", text))
        else:
            notes.append(Caveat("micro_batch", text))
    return notes
