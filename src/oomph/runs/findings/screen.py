"""Findings from nvidia-smi and the like: use, heat and power of the cards, and who is on them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

from oomph.runs.figures import Evidence
from oomph.runs.findings import Finding, known, listed, sentences
from oomph.runs.run import Gpu, Process, Scalar

HOT_CELSIUS = 83.0  # at which most cards begin to lower their clocks
FULL = 0.97  # of the card's memory
IDLE_PERCENT = 10.0
HELD_PERCENT = 25.0  # of its memory: more than a desktop takes
HELD_MIB = 256.0  # of a process: a CUDA context alone takes about as much
_SHARE = re.compile(r"GPU (\d+): (\d+) %")
AT_LIMIT = 0.97  # of the power limit
SHOWN = 8  # cards, processes


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Findings about all cards, and about any that stands out."""
    gpus = [gpu for gpu in evidence.run.gpus.values() if gpu.readings.count]
    if not gpus:
        slices = [event.text for event in evidence.run.events if event.kind == "slice"]
        if slices:
            title = "; ".join((f"S{slices[0][1:]}", *slices[1:SHOWN]))
            yield Finding("card.screen", "info", title, "", {}, "read")
        elif evidence.run.processes or "processes" in evidence.run.event_counts:
            told = [_of_process(process) for process in evidence.run.processes.values()][:SHOWN]
            title = f"On the cards: {listed(told)}" if told else "No process is on the cards"
            yield Finding("card.screen", "info", title, "", {"processes": len(told)}, "read")
        elif "query" in evidence.run.event_counts:
            cards = len(evidence.run.gpus)
            told = [event.text for event in evidence.run.events if event.kind == "state"]
            states = {text.partition(":")[0]: text for text in told}  # the last of each card
            title = "; ".join(list(states.values())[:SHOWN])
            title = title or f"nvidia-smi lists {cards} card{'s' * (cards != 1)}, with no figure that oomph reads"
            yield Finding("card.screen", "info", title, "", {"cards": cards}, "read")
        yield from _slowed(evidence)
        return
    yield _cards(evidence, gpus)
    yield from _idle_and_full(evidence, gpus)
    yield from _hot(gpus)
    yield from _slowed(evidence)


def _slowed(evidence: Evidence) -> Iterator[Finding]:
    """Cards whose clocks the driver says it has lowered."""
    slowed = list(dict.fromkeys(event.text for event in evidence.run.events if event.kind == "slowed"))
    if slowed:
        title = f"The driver holds clocks down: {listed(slowed[:SHOWN])}"
        text = (
            "A power cap is usual under full load; a thermal slowdown asks for cooling, a power brake for the supply."
        )
        yield Finding("card.slowed", "info" if all("Cap" in each for each in slowed) else "warning", title, text)


def _last(gpu: Gpu, column: str) -> float | None:
    return gpu.readings.totals[column].last


def _shares(evidence: Evidence) -> dict[int, float]:
    """Percent of each card's memory in use, if a screen shows no more."""
    told = [_SHARE.match(event.text) for event in evidence.run.events if event.kind == "vram"]
    return {int(match[1]): float(match[2]) for match in told if match is not None}


def _line(gpu: Gpu, share: float | None = None) -> str:
    """One card in a few words."""
    used, total = _last(gpu, "used_mib"), gpu.total_mib
    parts = [f"{share:.0f} % of its memory in use"] if share is not None and used is None else []
    if used is not None:
        parts.append(f"{used:,.0f}" + (f" of {total:,.0f} MiB" if total is not None else " MiB"))
    for column, unit in (("utilization_percent", "% busy"), ("celsius", "°C"), ("watts", "W"), ("clock_mhz", "MHz")):
        value = _last(gpu, column)
        if value is not None:
            limit = f" of {gpu.limit_watts:,.0f}" if column == "watts" and gpu.limit_watts else ""
            parts.append(f"{value:,.0f}{limit} {unit}")
    return f"GPU {gpu.index}: {', '.join(parts)}"


def _named(process: Process) -> str:
    """A process's name, with its pid if the screen shows it."""
    name = process.name.rpartition("/")[2]
    return f"{name} ({process.pid})" if process.pid > 0 else name


def _of_process(process: Process) -> str:
    size = f" {process.most_mib:,.0f} MiB" if math.isfinite(process.most_mib) else ""
    return f"{_named(process)}{size} on GPU {process.gpu}"


def _cards(evidence: Evidence, gpus: list[Gpu]) -> Finding:
    first, shares = gpus[0], _shares(evidence)
    run = evidence.run
    named = Counter(gpu.name for gpu in gpus if gpu.name)
    names = listed(f"{many} × {name}" if many > 1 else name for name, many in named.items())
    slices = [event.text for event in run.events if event.kind == "slice"]
    told = sorted((p for p in run.processes.values() if math.isfinite(p.most_mib)), key=lambda p: -p.most_mib)
    silent = len(run.processes) - len(told)
    processes = [_of_process(p) for p in told[:SHOWN]]
    text = sentences(
        (
            *(_line(gpu, shares.get(gpu.index)) for gpu in gpus[1:SHOWN]),
            f"and {len(gpus) - SHOWN} more" if len(gpus) > SHOWN else None,
            *slices[:SHOWN],
            f"processes: {listed(processes)}" if processes else None,
            f"{silent} processes have no figure: Windows does not tell the memory of each"
            if silent and any(gpu.windows for gpu in gpus)
            else None,
        )
    )
    numbers: dict[str, Scalar] = {
        "cards": len(gpus),
        "used_mib": _last(first, "used_mib"),
        "utilization_percent": _last(first, "utilization_percent"),
        "celsius": _last(first, "celsius"),
        "watts": _last(first, "watts"),
    }
    which = f"{names}: " if names else ""
    return Finding(
        "card.screen", "info", f"{which}{_line(first, shares.get(first.index))}", text, known(numbers), "read"
    )


def _idle_and_full(evidence: Evidence, gpus: list[Gpu]) -> Iterator[Finding]:
    if evidence.run.ooms:
        return
    full = [g for g in gpus if g.total_mib and (_last(g, "used_mib") or 0.0) > FULL * g.total_mib and not g.mig]
    if full:
        gpu = full[0]
        left = (gpu.total_mib or 0.0) - (_last(gpu, "used_mib") or 0.0)
        where = f"GPU {gpu.index}" if len(gpus) > 1 else "The card"
        title = f"{where} is full: {left:,.0f} MiB are free"
        yield Finding("card.full", "warning", title, "The next larger tensor does not fit.", {"free_mib": left})
    idle = [
        g
        for g in gpus
        if (
            g.readings.totals["utilization_percent"].count
            and g.readings.totals["utilization_percent"].high < IDLE_PERCENT
        )
        and _holds(evidence, g)
    ]
    if idle:
        many = idle[0].readings.totals["utilization_percent"].count
        when = "at that moment" if many == 1 else f"in all {many:,} readings"
        where = f"GPU {listed(str(g.index) for g in idle[:SHOWN])}" if len(gpus) > 1 else "the card"
        title = f"Memory is held, but {where} {'compute' if len(idle) > 1 else 'computes'} nothing {when}"
        text = (
            "One look may meet a pause (data, an evaluation, a checkpoint); if it stays so, the run waits or has ended."
        )
        yield Finding("card.idle", "info" if many == 1 else "warning", title, text, {"readings": many}, "read")


def _holds(evidence: Evidence, gpu: Gpu) -> bool:
    """Whether a computing process is on the card; if no processes are shown, whether much of its memory is in use."""
    if evidence.run.processes:
        return any(
            p.gpu == gpu.index and p.kind.startswith("C") and p.kind != "C+G" and not p.most_mib < HELD_MIB
            for p in evidence.run.processes.values()
        )
    used, total = _last(gpu, "used_mib"), gpu.total_mib
    share = 100 * used / total if used and total else _shares(evidence).get(gpu.index, 0.0)
    return share >= HELD_PERCENT


def _hot(gpus: list[Gpu]) -> Iterator[Finding]:
    hottest = max(gpus, key=lambda gpu: gpu.readings.totals["celsius"].high)
    heat = hottest.readings.totals["celsius"]
    if heat.count and heat.high >= HOT_CELSIUS:
        which = f"GPU {hottest.index}" if len(gpus) > 1 else "The card"
        title = f"{which} was at {heat.high:.0f} °C: it may lower its clock"
        yield Finding(
            "card.hot", "warning", title, "Most cards do from 83 to 90 °C on.", {"celsius": heat.high}, "guess"
        )
    for gpu in gpus:
        watts = gpu.readings.totals["watts"]
        if watts.count and gpu.limit_watts and watts.high >= AT_LIMIT * gpu.limit_watts:
            title = f"GPU {gpu.index} works at its power limit, {gpu.limit_watts:.0f} W"
            text = "Its clocks are set by power: that is usual under full load."
            yield Finding("card.power", "info", title, text, {"watts": watts.high}, "read")
            return
