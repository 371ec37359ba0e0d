"""Findings about the sources: the card, what was inferred or unreadable, what a memory snapshot contains."""

from __future__ import annotations

import re
from collections.abc import Iterator

from oomph.runs.card import Card
from oomph.runs.figures import Evidence
from oomph.runs.findings import Basis, Finding, Severity, known, listed, sentences
from oomph.runs.reading.tracebacks import CUT_OFF, NCCL_WARNED
from oomph.runs.run import Scalar
from oomph.units import counted, duration, mib, tflops

_TIMEOUT = re.compile(
    r"collective operation timeout: .{0,80}OpType=(\w{1,40}),.{0,120}? ran for (\d{1,12}) milliseconds"
)
# What an error means, where its own words do not say it.
_MEANINGS = (
    (
        re.compile(r"off the bus|device handle for GPU"),
        "The driver has lost the card: power, heat, the slot or the card itself. dmesg shows the Xid; a restart may "
        "bring it back.",
    ),
    (re.compile(r"HW Exception by GPU"), "The card hung or failed: the driver's log (dmesg) has more."),
    (
        re.compile(r"device-side assert"),
        "An index is out of range on the card, as a rule a token beyond the vocabulary, a position beyond the length "
        "or a label. CUDA_LAUNCH_BLOCKING=1, or the same step on the CPU, shows the line.",
    ),
    (
        re.compile(r"no kernel image|is not compatible with the current PyTorch|invalid device function"),
        "This PyTorch was built without kernels for the card: install a build for its architecture.",
    ),
    (
        re.compile(r"illegal memory access"),
        "It is reported late: the line that failed may be another. CUDA_LAUNCH_BLOCKING=1 shows it.",
    ),
    (
        re.compile(r"No available memory for the cache blocks"),
        "The weights and vLLM's buffers take all of its share of the card (gpu_memory_utilization): a larger share, a "
        "shorter context or smaller weights leave room for the cache.",
    ),
    (re.compile(r"CANCELLED"), "Slurm ended the job: by a person, or at its time limit."),
)
SHOWN = 5  # unreadable lines, and open choices
SHOWN_FRAMES = 6
SHOWN_SETTINGS = 12
LONGEST_ERROR = 160


def findings(evidence: Evidence) -> Iterator[Finding]:
    """The findings, most useful first."""
    yield from _unknown(evidence)
    yield from _settings(evidence)
    yield from _summary(evidence)
    yield from _stalled(evidence)
    yield from _crashed(evidence)
    yield from _card(evidence)
    yield from _workers(evidence)
    yield from _inferred(evidence)
    yield from _incomplete(evidence)
    yield from _unreadable(evidence)
    yield from _resumed(evidence)
    yield from _snapshot(evidence)


def _card(evidence: Evidence) -> Iterator[Finding]:
    card = evidence.measured.inference.card
    device = card.device
    if device is None:
        if evidence.run.program is None and not evidence.run.gpus and not evidence.run.ooms:
            return
        yield _unknown_card(card, listed(dict.fromkeys(gpu.name for gpu in evidence.run.gpus.values() if gpu.name)))
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
    title = f"The {what}: {device.name}" if card.how != "inferred" else f"The {what} may be a {device.name}"
    basis: Basis = "guess" if card.how in ("inferred", "assumed") else "read"
    yield Finding("card.known", "info", title, text, known(numbers), basis)
    if card.doubt is not None:
        text = sentences((card.doubt, f"all figures here are for the {device.name} that was given"))
        yield Finding("card.contradiction", "warning", "The given card is not the one in the log", text)


def _unknown_card(card: Card, named: str) -> Finding:
    choices = f"it may be {', '.join(card.candidates)}" if card.candidates else None
    text = sentences((card.where, choices, "name it with --gpu: memory and MFU are relative to the card"))
    title = f"oomph does not know the card {named}" if named else "The card is not named"
    if named.endswith("…"):
        title = f"The screen cuts off the card's name: {named}"
    return Finding("card.unknown", "info", title, text)


def _inferred(evidence: Evidence) -> Iterator[Finding]:
    """Settings that are not in the log but follow from its numbers."""
    inference = evidence.measured.inference
    inferred = {key: each for key, each in inference.settings.items() if each.how in ("inferred", "assumed")}
    if inferred:
        text = sentences(f"{key} = {each.value} ({each.how}: {each.where})" for key, each in inferred.items())
        title = f"Not in the log, but inferred: {', '.join(inferred)}"
        yield Finding("log.inferred", "info", title, f"{text} Override any of them with --key=value.")
    contradictions = [*inference.contradictions, *_trained(evidence)]
    if contradictions:
        text = sentences(contradictions)
        given = any(each.how == "given" for each in inference.settings.values())
        title = "The given settings contradict the log" if given else "The log contradicts itself"
        yield Finding("log.contradiction", "warning", title, text)


def _trained(evidence: Evidence) -> Iterator[str]:
    """That the log counts other trained weights than the settings have, in a run with adapters."""
    plan, printed = evidence.plan, evidence.run.printed.params_trained
    if plan is None or printed is None or not evidence.has_adapters:
        return
    ours = plan.model.params - plan.model.params_frozen
    if ours != printed:
        other = "method" if plan.config.method == "full" else "lora_rank or lora_targets"
        yield f"the settings train {ours:,} weights, the log prints {printed:,}: {other} may be another"


def nothing_read(evidence: Evidence) -> bool:
    """Whether nothing in the sources is in a known format."""
    run = evidence.run
    read = run.has_happened or run.gpus or run.processes or run.snapshots
    printed = run.printed
    counts = (
        printed.params,
        printed.params_total,
        printed.tokens_per_step,
        printed.mean_loss,
        printed.peak_allocated_mib,
        printed.peak_reserved_mib,
    )
    return not (read or run.program or run.settings or any(counts) or run.event_counts or run.unreadable_count)


def _unknown(evidence: Evidence) -> Iterator[Finding]:
    """Text in no known format, with its first line."""
    if not nothing_read(evidence):
        return
    first = evidence.run.first_unread
    lines = sum(source.lines for source in evidence.run.sources)
    if first is None:
        yield Finding("log.unknown", "warning", "There is nothing in it to read", "", {"lines": lines}, "read")
        return
    text = (
        f"The first line: {first.text!r} ({first.source}:{first.line}). oomph reads step lines with a loss, "
        "out-of-memory messages, screens of nvidia-smi, gpustat, nvitop and rocm-smi, CSV and JSON of metrics, configs "
        "and memory snapshots."
    )
    title = f"None of its {counted(max(lines, 1), 'line')} is in a format that oomph knows"
    yield Finding("log.unknown", "warning", title, text, {"lines": lines}, "read")


def _settings(evidence: Evidence) -> Iterator[Finding]:
    """The settings, if the text has nothing about how the run went."""
    run = evidence.run
    read = {key: each.value for key, each in run.settings.items() if each.how == "read"}
    printed = run.printed
    counts = {
        "parameters": printed.params or printed.params_total,
        "trained parameters": printed.params_trained,
        "tokens a step": printed.tokens_per_step,
        "steps planned": printed.steps_planned,
    }
    told = [f"{key} = {value}" for key, value in read.items()]
    told += [f"{name} {value:,}" for name, value in counts.items() if value]
    told += dict.fromkeys(event.text for event in run.events if event.kind == "argument")
    if told and not run.has_happened:
        yield Finding("log.settings", "info", f"It sets {listed(told[:SHOWN_SETTINGS])}", "", {}, "read")


def _summary(evidence: Evidence) -> Iterator[Finding]:
    """W&B's summary at the end of a run."""
    for event in [event for event in evidence.run.events if event.kind == "summary"][-1:]:
        yield Finding("log.summary", "info", f"W&B's summary of the run: {event.text}", "", {}, "read")


def _stalled(evidence: Evidence) -> Iterator[Finding]:
    """A run that was silent for long before it ended."""
    for event in [event for event in evidence.run.events if event.kind == "stalled"][-1:]:
        last = evidence.run.last_step
        after = f" after step {last:,}" if last is not None else " before its first step"
        text = (
            "Usual places: a loader that waits for data or a worker, a collective that another rank has not reached "
            "(NCCL), a network disk, a long compilation. py-spy dump --pid PID shows where a process stands."
        )
        yield Finding("log.stalled", "error", f"The run stood still{after}: {event.text}", text, {}, "read")


def _crashed(evidence: Evidence) -> Iterator[Finding]:
    """The error that ended the program, if it is not about memory."""
    crash = evidence.run.crash
    if crash is None or evidence.run.ooms:
        return
    what = crash.what.rstrip(". ") if len(crash.what) <= LONGEST_ERROR else f"{crash.what[:LONGEST_ERROR]}…"
    if crash.what.startswith("killed"):
        title = "The process was killed by SIGKILL"
        text = (
            "Nothing says by whom. Linux does that when main memory runs out (dmesg shows it), a scheduler at a limit, "
            "or a person."
        )
    elif (timeout := _TIMEOUT.search(crash.what)) is not None:
        operation, ms = timeout.groups()
        title = f"A collective operation of the cards ({operation}) timed out after {duration(int(ms) / 1e3)}"
        text = (
            "One card waited for another. The other may have failed, stood still, or called another operation: the "
            "first error of any rank tells; the timeouts after it only follow."
        )
    elif crash.what.startswith("DataLoader worker"):
        title = f"A process of the data loader died: {what.partition(': ')[2] or 'it exited unexpectedly'}"
        text = (
            "Usual causes: main memory or /dev/shm is full (in a container: docker run --shm-size=16g), or a library "
            "failed in it. num_workers=0 shows the error itself."
        )
    elif crash.what.startswith(NCCL_WARNED):
        title = f"NCCL warned: {what.removeprefix(NCCL_WARNED)}"
        text = "Whether the program ended with it, the text does not show."
    elif crash.what == CUT_OFF:
        title = "The program failed: the text ends inside a traceback"
        text = (
            f"Its last lines name the error; it was at {crash.code}."
            if crash.code
            else "Its last lines name the error."
        )
    elif "ChildFailedError" in crash.what or "of the launcher" in crash.what:
        title = f"One of the processes failed: {what}" if "exit code" in what else "One of the processes failed"
        if "code -11" in what:
            title += " (a segmentation fault)"
        text = "The launcher only reports it: the first error of that rank, where it was printed, tells why."
    else:
        title = f"The program ended with {what}"
        place = f"It was at {crash.code} ({crash.where})." if crash.code else None
        meaning = next((text for pattern, text in _MEANINGS if pattern.search(crash.what)), None)
        warned = [event.text for event in evidence.run.events if event.kind == "nccl"] if "NCCL" in crash.what else []
        said = f"NCCL warned before: {warned[0].rstrip('. ')}." if warned and warned[0] not in crash.what else None
        text = " ".join(filter(None, (said, meaning, place)))
    severity: Severity = "warning" if crash.what.startswith(NCCL_WARNED) else "error"
    yield Finding("log.crash", severity, title, text, {}, "read")


def _incomplete(evidence: Evidence) -> Iterator[Finding]:
    """What would make the answer exact."""
    inference = evidence.measured.inference
    if inference.config is not None or nothing_read(evidence):
        return
    shown = [", ".join(f"{k} = {v}" for k, v in each.items()) for each in inference.ambiguous[:SHOWN]]
    text = sentences(
        (
            f"missing: {', '.join(inference.missing)}" if inference.missing else None,
            *inference.notes,
            f"it may be: {'; '.join(shown)}" if shown else None,
            "give them as --key=value, or add the config file or the model's name",
        )
    )
    yield Finding("log.incomplete", "info", "Memory and time are predicted once the run's config is there", text)


def _workers(evidence: Evidence) -> Iterator[Finding]:
    measured = evidence.measured
    setting = measured.inference.settings.get("world_size")
    if measured.least_cards is not None:
        title = f"The run may be on {measured.least_cards} cards or more: one cannot compute as fast"
        text = "The log does not say how many processes there are; give --world_size for figures of one card."
        yield Finding("card.several", "info", title, text, {"least": measured.least_cards}, "guess")
    elif setting is not None and setting.how == "inferred":
        title = f"The run is on {setting.value} cards: {setting.where}"
        yield Finding("card.several", "info", title, "", {"world_size": setting.value})


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
