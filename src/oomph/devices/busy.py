"""Whether a time that was measured is this machine's, or that of the programs beside."""

from __future__ import annotations

from pathlib import Path

BUSY = 0.1  # a share of time waited for the CPU that makes a measured time somebody else's


def waits_s() -> dict[str, float]:
    """Seconds in which each thread of this process could have run and another program did; empty but on Linux."""
    waits = {}
    try:
        for thread in Path("/proc/self/task").iterdir():
            waits[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # a thread that ended meanwhile, a system that does not tell
        pass
    return waits


def waited_s(before: dict[str, float]) -> float:
    """The longest that any thread waited since `before`: all of a step's threads wait for the last."""
    return max((after - before.get(thread, 0.0) for thread, after in waits_s().items()), default=0.0)
