"""What an explanation says of its sources: the card, what was worked out, what could not be read."""

from __future__ import annotations

from collections.abc import Iterator

from oomph.runs.case import Case
from oomph.runs.findings import Finding, Number, known, sentences, tflops

SHOWN = 5  # unreadable lines, and choices that are left open


def findings(case: Case) -> Iterator[Finding]:
    """The card first, then what is not certain."""
    yield from _card(case)
    yield from _settings(case)
    yield from _open(case)
    yield from _unreadable(case)
    yield from _resumed(case)


def _card(case: Case) -> Iterator[Finding]:
    card, device = case.measured.inference.card, case.device
    if device is None:
        if case.run.program is None and not case.run.gpus and not case.run.ooms:
            return
        choices = f"it may be {', '.join(card.candidates)}" if card.candidates else None
        text = sentences((card.where, choices, "give it with --gpu: memory and MFU are held against the card"))
        yield Finding("card.unknown", "warning", "Which card it was is not known", text, {})
        return
    how = {
        "read": "it is named in what was read",
        "given": "as given",
        "inferred": card.where,
        "assumed": card.where,
    }.get(card.how or "", "")
    peak = (
        device.peak_tflops(case.config.dtype or "bfloat16") if case.config is not None and case.config.dtype else None
    )
    figures = [f"{device.memory_mib:,} MiB, of which a process can use about {device.usable_mib:,}"]
    if peak:
        figures.append(tflops(peak))
    if device.bandwidth_gbs:
        figures.append(f"{device.bandwidth_gbs:,.0f} GB/s")
    text = sentences((how, ", ".join(figures), f"source: {device.source}"))
    numbers: dict[str, Number] = {"memory_mib": device.memory_mib, "usable_mib": device.usable_mib, "tflops": peak}
    what = "processor" if device.kind == "cpu" else "card"
    yield Finding("card.known", "info", f"The {what}: {device.name}", text, known(numbers))
    if card.doubt is not None:
        text = sentences((card.doubt, f"everything here is held against the {device.name} that was given"))
        yield Finding("card.contradiction", "warning", "The card that was given is not the one that was seen", text, {})


def _settings(case: Case) -> Iterator[Finding]:
    """What the log does not say and its numbers determine."""
    inference = case.measured.inference
    worked = {key: each for key, each in inference.settings.items() if each.how in ("inferred", "assumed")}
    if worked:
        text = sentences(f"{key} = {each.value} ({each.how}: {each.where})" for key, each in worked.items())
        title = f"Not in the log, but worked out: {', '.join(worked)}"
        yield Finding("log.inferred", "info", title, f"{text} Any of them can be given as --key=value.", {})
    if inference.contradictions:
        text = sentences(inference.contradictions)
        given = any(each.how == "given" for each in inference.settings.values())
        title = "What is known of the run contradicts itself" if given else "The log contradicts itself"
        yield Finding("log.contradiction", "warning", title, text, {})


def _open(case: Case) -> Iterator[Finding]:
    inference = case.measured.inference
    if inference.config is not None:
        return
    shown = [", ".join(f"{k} = {v}" for k, v in each.items()) for each in inference.ambiguous[:SHOWN]]
    text = sentences(
        (
            f"missing: {', '.join(inference.missing)}" if inference.missing else None,
            *inference.notes,
            f"it may be: {'; '.join(shown)}" if shown else None,
            "give them as --key=value, or the config file beside the log; then memory and time can be predicted",
        )
    )
    yield Finding("log.incomplete", "warning", "The log does not tell enough to predict the run", text, {})


def _unreadable(case: Case) -> Iterator[Finding]:
    run = case.run
    if run.unreadable_count:
        shown = "; ".join(map(str, run.unreadable[:SHOWN]))
        lines = "1 line" if run.unreadable_count == 1 else f"{run.unreadable_count:,} lines"
        numbers: dict[str, Number] = {"lines": run.unreadable_count}
        yield Finding("log.unreadable", "info", f"{lines} could not be read", f"{shown}.", numbers)
    if run.steps.backward:
        text = "The run was started again, or two runs share the log. Of a step that was logged twice the later counts."
        yield Finding("log.restarted", "info", "The step count goes back", text, {"times": run.steps.backward})


def _resumed(case: Case) -> Iterator[Finding]:
    if case.run.program == "nanogpt" and "resume" in case.run.event_counts:
        text = (
            "nanoGPT seeds its batches anew when it resumes: it reads the same ones again that it began with, in the "
            "same order. A different seed in train.py avoids that; oomph train goes on where it stopped."
        )
        yield Finding("data.resumed", "warning", "The run was resumed, and reads its first batches again", text, {})
