"""Who holds a card's memory: the only place where figures of a message or a screen are added and subtracted.

    total  =  free + this process + other processes
    this process  =  tensors + what PyTorch keeps for later ones + the CUDA context and libraries

A message states some of these, others follow; if two of them cannot be separated, their sum is given. A difference
that rounding can explain counts as zero.
"""

from __future__ import annotations

import math

import msgspec

from oomph.runs.run import LoggedRun, Oom

CONTEXT_MIB = 1024.0  # a context with its libraries' workspaces takes 300 to 1,000 MiB
LEAST_PROCESS_MIB = 64.0  # a process with a CUDA context has more
ROUNDED = 3  # rounded figures in a difference


class Holding(msgspec.Struct, kw_only=True):
    """The parts of a card's memory, MiB; None if unknown."""

    total_mib: float | None = None
    free_mib: float | None = None
    process_mib: float | None = None  # this whole process
    tensors_mib: float | None = None
    cached_mib: float | None = None  # kept by PyTorch, not used by a tensor
    context_mib: float | None = None
    others_mib: float | None = None  # other processes
    beside_mib: float | None = None  # context and other processes, if they cannot be separated
    spilled_mib: float | None = None  # tensors beyond the card's memory, in main memory: Windows
    pids: dict[int, float] = msgspec.field(default_factory=dict)  # the other processes that the text names
    slack_mib: float = 0.0

    @property
    def others_at_least_mib(self) -> float:
        """The least that other processes hold, assuming a context of at most `CONTEXT_MIB`."""
        if self.others_mib is not None:
            return self.others_mib
        return max(0.0, (self.beside_mib or 0.0) - CONTEXT_MIB)

    def parts(self) -> list[tuple[str, float]]:
        """The known parts above zero, in a report's words."""
        named = (
            ("this run's tensors", self.tensors_mib),
            ("kept by PyTorch for later tensors", self.cached_mib),
            ("the context and libraries", self.context_mib),
            ("other processes", self.others_mib),
            ("the context, libraries and other processes", self.beside_mib),
            ("free", self.free_mib),
        )
        return [(name, mib) for name, mib in named if mib is not None and mib >= 1]


def of_message(oom: Oom) -> Holding:
    """Who held the card when an allocation failed."""
    held = Holding(total_mib=oom.total_mib, free_mib=oom.free_mib, tensors_mib=oom.allocated_mib)
    held.slack_mib = slack = ROUNDED * oom.slack_mib
    held.cached_mib = oom.unused_mib
    if oom.memory == "mps":
        held.total_mib, held.beside_mib = oom.allowed_mib, oom.outside_mib
        return held
    if oom.memory == "card" and oom.total_mib is not None and (oom.allocated_mib or 0.0) > oom.total_mib + slack:
        held.spilled_mib = (oom.allocated_mib or 0.0) - oom.total_mib
        return held  # the sums do not hold on a card that spills
    reserved = oom.reserved_mib
    own, held.pids = _ours(oom)
    held.process_mib = own
    if own is not None and reserved is not None:
        held.context_mib = _more_than(slack, own - reserved)
    if oom.total_mib is None or oom.free_mib is None:
        held.others_mib = sum(held.pids.values()) or None
        return held
    used = oom.total_mib - oom.free_mib
    if own is not None:
        held.others_mib = _more_than(max(slack, LEAST_PROCESS_MIB), max(used - own, sum(held.pids.values())))
    elif reserved is not None:
        held.beside_mib = _more_than(slack, used - reserved)
    return held


def _ours(oom: Oom) -> tuple[float | None, dict[int, float]]:
    """This process's memory, and the other named processes. In a container a process does not know its own pid."""
    if oom.process_mib is not None or not oom.processes:
        return oom.process_mib, dict(oom.processes)
    reserved = oom.reserved_mib
    if reserved is None:
        return None, {}
    slack = ROUNDED * oom.slack_mib
    large = {pid: mib for pid, mib in oom.processes.items() if mib >= reserved - slack}
    pid = min(large, key=lambda each: large[each], default=None)
    if pid is None:
        return None, dict(oom.processes)
    return large[pid], {other: mib for other, mib in oom.processes.items() if other != pid}


def _more_than(slack: float, difference: float) -> float:
    return difference if difference > slack else 0.0


def of_screen(run: LoggedRun) -> Holding | None:
    """Who holds the card of the training process, by nvidia-smi; None if it does not show it."""
    gpu, process = run.gpu, run.process
    if gpu is None or gpu.used_mib is None or process is None or process.gpu != gpu.index or gpu.mig:
        return None
    if process.most_mib < LEAST_PROCESS_MIB or len({each.gpu for each in run.processes.values()}) > 1:
        return None  # in a container the list has no figures; with several cards, none is the run's alone
    own = process.most_mib
    named = {p.pid: p.most_mib for p in run.processes.values() if p.gpu == gpu.index and p is not process}
    return Holding(
        total_mib=gpu.total_mib,
        free_mib=None if gpu.total_mib is None else max(0.0, gpu.total_mib - gpu.used_mib),
        process_mib=own,
        others_mib=max(0.0, gpu.used_mib - own),
        pids={pid: mib for pid, mib in named.items() if math.isfinite(mib)},
    )
