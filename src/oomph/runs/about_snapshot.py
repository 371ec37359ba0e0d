"""What an explanation says of a torch memory snapshot: which lines of the program hold the peak."""

from __future__ import annotations

from collections.abc import Iterator

from oomph.runs.case import Case
from oomph.runs.findings import Finding, Number, listed, sentences
from oomph.units import mib

SHOWN = 6  # lines of the program


def findings(case: Case) -> Iterator[Finding]:
    """One finding: of several snapshots, the fullest."""
    recordings = sorted(case.run.snapshots, key=lambda recording: -recording.peak_bytes)
    for recording in recordings[:1]:
        rows = recording.by_frame()[:SHOWN]
        held = [f"{row.frame} {mib(row.bytes):,.0f} MiB in {row.count:,}" for row in rows]
        failures = [f"{mib(asked):,.0f} MiB asked for, {mib(free):,.0f} free" for asked, free in recording.failures[:3]]
        text = sentences(
            (
                f"reserved at most {mib(recording.peak_reserved_bytes):,.0f} MiB",
                f"at the peak the program's lines hold: {listed(held)}" if held else None,
                f"allocations that failed: {'; '.join(failures)}" if failures else None,
                None if recording.from_the_start else "the history does not reach back to the start of the program",
            )
        )
        numbers: dict[str, Number] = {
            "peak_mib": mib(recording.peak_bytes),
            "peak_reserved_mib": mib(recording.peak_reserved_bytes),
            "failures": len(recording.failures),
        }
        title = f"The snapshot's peak is {mib(recording.peak_bytes):,.0f} MiB of tensors"
        yield Finding("memory.snapshot", "info", title, text, numbers)
