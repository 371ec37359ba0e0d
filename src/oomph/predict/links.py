"""Seconds of collectives, and how much of that computation hides.

A collective takes a latency plus its ring's volume over the link. It runs beside the kernels: it begins when the
program starts it, or when the one before it ends; the time that a kernel waits for it is exposed. In forward, gathering
begins one group ahead, since the host runs ahead of the device. All collectives share the link: one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from oomph.config import TrainConfig
from oomph.devices import Device
from oomph.devices.links import Link, find_link, find_network, usual_link, usual_network
from oomph.predict.gpu_kernels import BEST, WORST, Assumptions
from oomph.step.ops import COLLECTIVES, Kernel, Op, Phase

_PASSES = {Kernel.ALL_REDUCE: 2.0, Kernel.BROADCAST: 1.0}  # multiples of the ring's volume; others: one


class Wires(NamedTuple):
    """The connections between a run's ranks."""

    link: Link  # between the cards of one machine
    network: Link | None  # one card's port between machines; None for a single machine
    near: int  # cards in one machine

    def seconds(self, op: Op, assume: Assumptions) -> float:
        """Seconds of a collective that runs alone."""
        ranks, size, *inside = op.shape
        near = min(ranks, inside[0] if inside else self.near)
        reduces = op.kernel is Kernel.ALL_REDUCE
        rate, latency_us = float("inf"), 0.0
        if near > 1:
            rate, latency_us = _bus_gbs(self.link, assume, reduces), self.link.latency_us
        if near < ranks and self.network is not None:
            rate = min(rate, near * _bus_gbs(self.network, assume, reduces))
            latency_us = self.network.latency_us
        volume = _PASSES.get(op.kernel, 1.0) * size * (ranks - 1) / ranks
        return latency_us * 1e-6 + volume / (rate * 1e9)

    def slowdown(self, sm_count: int | None) -> float:
        """The share of the card that collectives take from concurrent kernels: a multiprocessor per channel."""
        return min(1.0, self.link.channels / sm_count) if sm_count else 0.0

    @property
    def nccl_mib(self) -> float:
        """Card memory that NCCL holds for one communicator."""
        return self.link.nccl_mib + (self.network.nccl_mib if self.network is not None else 0.0)


def _bus_gbs(link: Link, assume: Assumptions, reduces: bool) -> float:
    likely = link.reduce_gbs if reduces else link.bus_gbs
    ratio = {BEST: link.bus_high_gbs, WORST: link.bus_low_gbs}.get(assume, link.bus_gbs) / link.bus_gbs
    return likely * ratio


def wires(config: TrainConfig, device: Device) -> Wires | None:
    """The connections between a config's ranks; None for a single rank, and on CPUs, whose links are unknown."""
    if config.world_size == 1 or device.kind not in ("cuda", "rocm"):
        return None
    link = find_link(config.link or usual_link(device)[0], device)
    network = find_network(config.network or usual_network(device)[0]) if config.nodes > 1 else None
    return Wires(link, network, max(1, config.world_size // config.nodes))


class Communication(NamedTuple):
    """Seconds of collectives, and the part that kernels wait for."""

    total_s: float
    exposed_s: float

    def slowing(self, share: float) -> Communication:
        """The same, plus what kernels lose beside the hidden part, which takes this share of the device."""
        return Communication(self.total_s, self.exposed_s + share * max(0.0, self.total_s - self.exposed_s))


def overlapped(
    ops: Sequence[Op],
    joined: Wires | None,
    assume: Assumptions,
    seconds: Mapping[object, float],
    kind_of: Callable[[Op], object],
) -> Communication:
    """The collectives among the operations, run beside kernels that take `seconds` by kind."""
    now = total = exposed = free = waited = 0.0
    done: dict[str, float] = {}
    for op in ops:
        if op.kernel in COLLECTIVES:
            takes = 0.0 if joined is None else op.times * joined.seconds(op, assume)
            begun = max(free, waited if op.phase in (Phase.FORWARD, Phase.EVAL) else now)
            free = done[op.name] = begun + takes
            total += takes
        elif op.kernel is Kernel.WAIT:
            late = max(0.0, done.get(op.name, 0.0) - now)
            exposed += late
            now = waited = now + late
        else:
            now += op.times * seconds.get(kind_of(op), 0.0)
    return Communication(total, exposed)
