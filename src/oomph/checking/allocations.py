"""torch's CPU allocations, every one of them: what a GPU's allocator counts by itself, the profiler sees here."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def watch_allocations(work: Callable[[], object]) -> int:
    """Bytes that torch holds at the fullest moment of `work`, of what is allocated while it runs.

    It must begin before the model is built: the profiler knows only memory whose allocation it saw.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    if results is None:
        return 0
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    held = highest = 0
    for _, change in sorted(changes, key=lambda moment: moment[0]):
        held += change
        highest = max(highest, held)
    return highest
