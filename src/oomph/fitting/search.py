"""The fastest setting that fits: best first, each candidate looked at no more closely than it must be.

What exceeds the card by a safe bound is dismissed. Each other candidate waits in a queue under a time it cannot beat.
The one in front is looked at more closely each time it comes up: a better estimate of its time, then its exact time and
its peak, then the full simulation on the card. The first that passes is the fastest: everything behind it is slower.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable
from enum import IntEnum
from math import inf

from oomph import config as configs
from oomph.config import LoadedConfig, TrainConfig
from oomph.devices import Device
from oomph.fitting.estimate import Estimator, replace
from oomph.planner import Plan, plan
from oomph.units import MIB

OPTIMISM = 0.995  # a shallow estimate of the time is right to less than half a percent


class _Look(IntEnum):
    """How closely a candidate has been looked at."""

    NONE = 0
    SHALLOW = 1
    EXACT = 2


class Searcher:
    """Plans and estimates on one device, each made once."""

    def __init__(self, device: Device, reserve_mib: float = 0.0) -> None:
        self.device = device
        self.reserve_mib = reserve_mib
        self.estimator = Estimator(device)
        self.room_bytes = (device.usable_mib - reserve_mib - (device.context_mib or 0)) * MIB
        self._plans: dict[TrainConfig, Plan] = {}

    def plan(self, loaded: LoadedConfig) -> Plan:
        """The full simulation of a config on the device."""
        settled = configs.settle(loaded, self.device)
        known = self._plans.get(settled.config)
        if known is None:
            known = self._plans[settled.config] = plan(settled, self.device, reserve_mib=self.reserve_mib)
        return known

    def simulate(self, like: LoadedConfig, config: TrainConfig) -> Plan:
        """The full simulation of a settled config that came from `like`."""
        return self.plan(LoadedConfig(config, like.sources, like.notes, like.files))

    def may_fit(self, config: TrainConfig) -> bool:
        """False only where the safe bound already exceeds the card."""
        return self.estimator.floor_bytes(config) <= self.room_bytes

    def fastest(self, like: LoadedConfig, candidates: Iterable[TrainConfig]) -> Plan | None:
        """The fastest candidate that fits without the allocator having to give its cache back; None where none does.

        Of equally fast ones the first, so candidates should come with the ones that change least in front.
        """
        queue = [(self._best_s(each), rank, _Look.NONE, each) for rank, each in self._possible(candidates)]
        heapq.heapify(queue)
        while queue:
            _, rank, looked, config = heapq.heappop(queue)
            if looked is _Look.NONE:
                heapq.heappush(queue, (self.estimator.step_s(config) * OPTIMISM, rank, _Look.SHALLOW, config))
            elif looked is _Look.SHALLOW:
                heapq.heappush(queue, (self.estimator.exact(config).step_s, rank, _Look.EXACT, config))
            elif self.estimator.exact(config).peak[0] <= self.room_bytes:
                found = self.simulate(like, config)
                if found.memory.fits and not found.memory.retries:
                    return found
        return None

    def _possible(self, candidates: Iterable[TrainConfig]) -> list[tuple[int, TrainConfig]]:
        """The candidates that may fit, each with its rank. Memory grows with the micro-batch, so that of those alike
        otherwise halving finds the last that may."""
        families: dict[TrainConfig, list[tuple[int, TrainConfig]]] = {}
        for rank, each in enumerate(candidates):
            families.setdefault(_family(each), []).append((rank, each))
        possible: list[tuple[int, TrainConfig]] = []
        for members in families.values():
            members.sort(key=lambda pair: pair[1].batch_size)
            possible += members[: bisect_left(members, True, key=lambda pair: not self.may_fit(pair[1]))]
        return possible

    def _best_s(self, config: TrainConfig) -> float:
        """A time that a candidate cannot beat: compiled, it runs the same products with fewer passes over memory."""
        return self.estimator.step_s(replace(config, compile=True)) * OPTIMISM

    def roomiest(self, like: LoadedConfig, candidates: Iterable[TrainConfig], at_most_s: float = inf) -> Plan | None:
        """Of the candidates that take no longer than that a step, the one that takes the least memory, or nearly.

        The two with the smallest peaks are simulated: fragmentation may turn the order of near equals.
        """
        if at_most_s == inf:
            every = list(candidates)
            smallest = min(each.batch_size for each in every)
            quick = [each for each in every if each.batch_size == smallest]
        else:
            hopeful = [each for _, each in self._possible(candidates) if self._best_s(each) <= at_most_s]
            quick = [each for each in hopeful if self.estimator.step_s(each) <= at_most_s]
        lean = heapq.nsmallest(2, quick, key=self.estimator.lean_bytes)
        plans = [self.simulate(like, each) for each in lean]
        return min(plans, key=lambda each: each.memory.total_mib, default=None)


def _family(config: TrainConfig) -> TrainConfig:
    """What candidates that differ in their micro-batch alone have in common."""
    alone = config.gradient_accumulation_steps <= config.world_size  # a lone micro-step holds no second gradients
    return replace(config, batch_size=1, gradient_accumulation_steps=1 if alone else 2, expandable_segments=False)
