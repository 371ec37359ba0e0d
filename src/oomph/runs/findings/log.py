"""Findings about the sources: the card, what was inferred, what could not be read, what a memory snapshot holds."""

from __future__ import annotations

from collections.abc import Iterator

from oomph.runs.figures import Evidence
from oomph.runs.findings import Finding, known, listed, sentences
from oomph.runs.run import Scalar
from oomph.units import counted, mib, tflops

SHOWN = 5  # unreadable lines, and open choices
SHOWN_FRAMES = 6


def findings(evidence: Evidence) -> Iterator[Finding]:
    """The findings, most useful first."""
    yield from _card(evidence)
    yield from _inferred(evidence)
    yield from _incomplete(evidence)
    yield from _unreadable(evidence)
    yield from _resumed(evidence)
    yield from _snapshot(evidence)


def _card(evidence: Evidence) -> Iterator[Finding]:
    card, device = evidence.measured.inference.card, evidence.device
    if device is None:
        if evidence.run.program is None and not evidence.run.gpus and not evidence.run.ooms:
            return
        choices = f"it may be {', '.join(card.candidates)}" if card.candidates else None
        text = sentences((card.where, choices, "name it with --gpu: memory and MFU are relative to the card"))
        yield Finding("card.unknown", "warning", "The card is unknown", text)
        return
    how = {
        "read": "named in what was read",
        "given": "as given",
        "inferred": card.where,
        "assumed": card.where,
    }.get(card.how or "", "")
    dtype = evidence.config.dtype if evidence.config is not None else None
    peak = device.peak_tflops(dtype) if dtype else None
    figures = [f"{device.memory_mib:,} MiB, about {device.usable_mib:,} of it usable by a process"]
    if peak:
        figures.append(tflops(peak))
    if device.bandwidth_gbs:
        figures.append(f"{device.bandwidth_gbs:,.0f} GB/s")
    text = sentences((how, ", ".join(figures), f"source: {device.source}"))
    numbers: dict[str, Scalar] = {"memory_mib": device.memory_mib, "usable_mib": device.usable_mib, "tflops": peak}
    what = "processor" if device.kind == "cpu" else "card"
    yield Finding("card.known", "info", f"The {what}: {device.name}", text, known(numbers))
    if card.doubt is not None:
        text = sentences((card.doubt, f"all figures here are for the {device.name} that was given"))
        yield Finding("card.contradiction", "warning", "The given card is not the one in the log", text)


def _inferred(evidence: Evidence) -> Iterator[Finding]:
    """Settings that are not in the log but follow from its numbers."""
    inference = evidence.measured.inference
    inferred = {key: each for key, each in inference.settings.items() if each.how in ("inferred", "assumed")}
    if inferred:
        text = sentences(f"{key} = {each.value} ({each.how}: {each.where})" for key, each in inferred.items())
        title = f"Not in the log, but inferred: {', '.join(inferred)}"
        yield Finding("log.inferred", "info", title, f"{text} Override any of them with --key=value.")
    if inference.contradictions:
        text = sentences(inference.contradictions)
        given = any(each.how == "given" for each in inference.settings.values())
        title = "The given settings contradict the log" if given else "The log contradicts itself"
        yield Finding("log.contradiction", "warning", title, text)


def _incomplete(evidence: Evidence) -> Iterator[Finding]:
    inference = evidence.measured.inference
    if inference.config is not None:
        return
    shown = [", ".join(f"{k} = {v}" for k, v in each.items()) for each in inference.ambiguous[:SHOWN]]
    text = sentences(
        (
            f"missing: {', '.join(inference.missing)}" if inference.missing else None,
            *inference.notes,
            f"it may be: {'; '.join(shown)}" if shown else None,
            "to get a prediction of memory and time, give them as --key=value or add the config file",
        )
    )
    yield Finding("log.incomplete", "warning", "The log is not enough to predict the run", text)


def _unreadable(evidence: Evidence) -> Iterator[Finding]:
    run = evidence.run
    if run.unreadable_count:
        shown = "; ".join(map(str, run.unreadable[:SHOWN]))
        title = f"{counted(run.unreadable_count, 'line')} could not be read"
        yield Finding("log.unreadable", "info", title, f"{shown}.", {"lines": run.unreadable_count})
    if run.steps.backward:
        text = "The run was restarted, or two runs share the log. Of a step logged twice, the later one counts."
        yield Finding("log.restarted", "info", "The step count goes back", text, {"times": run.steps.backward})


def _resumed(evidence: Evidence) -> Iterator[Finding]:
    if evidence.run.program == "nanogpt" and "resume" in evidence.run.event_counts:
        text = (
            "On resume nanoGPT seeds its batches as at the start, so it reads the same batches again in the same "
            "order. A different seed in train.py avoids that; oomph train continues where it stopped."
        )
        yield Finding("data.resumed", "warning", "The run was resumed and reads its first batches again", text)


def _snapshot(evidence: Evidence) -> Iterator[Finding]:
    """The lines of the program that hold the peak; of several snapshots, the fullest."""
    recordings = sorted(evidence.run.snapshots, key=lambda recording: -recording.peak_bytes)
    for recording in recordings[:1]:
        rows = recording.by_frame()[:SHOWN_FRAMES]
        held = [f"{row.frame} {mib(row.bytes):,.0f} MiB in {row.count:,}" for row in rows]
        failures = [f"{mib(asked):,.0f} MiB asked for, {mib(free):,.0f} free" for asked, free in recording.failures[:3]]
        text = sentences(
            (
                f"at most {mib(recording.peak_reserved_bytes):,.0f} MiB were reserved",
                f"at the peak, memory is held by {listed(held)}" if held else None,
                f"failed allocations: {'; '.join(failures)}" if failures else None,
                None if recording.from_the_start else "the history does not go back to the start of the program",
            )
        )
        numbers: dict[str, Scalar] = {
            "peak_mib": mib(recording.peak_bytes),
            "peak_reserved_mib": mib(recording.peak_reserved_bytes),
            "failures": len(recording.failures),
        }
        title = f"The snapshot peaks at {mib(recording.peak_bytes):,.0f} MiB of tensors"
        yield Finding("memory.snapshot", "info", title, text, numbers)
