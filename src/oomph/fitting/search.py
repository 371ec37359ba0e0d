"""The fastest setting that fits: best first, each candidate looked at no more closely than it must be.

What exceeds the card by a safe bound is dismissed. Each other setting waits in a queue under a time it cannot beat, of
those that differ in checkpointed blocks alone the quickest for all. The one in front is looked at more closely each
time it comes up: a better estimate of its time, then its exact time and its peak, then the full simulation on the card.
The first that passes is the fastest: everything behind it is slower.
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
from oomph.fitting.space import Ladder
from oomph.planner import Plan, plan
from oomph.predict.footprint import ALLOCATED_SPREAD, CONTEXT_SPREAD_MIB
from oomph.units import MIB

OPTIMISM = 0.995  # a shallow estimate of the time is right to less than half a percent


class _Look(IntEnum):
    """How closely a setting has been looked at."""

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
        self.safe_room_bytes = (self.room_bytes - CONTEXT_SPREAD_MIB * MIB) / (1 + ALLOCATED_SPREAD)
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

    def peak_fits(self, config: TrainConfig) -> bool:
        """Whether what is allocated at the peak is no more than the card has; fragmentation may still add to it."""
        return self.estimator.exact(config).peak[0] <= self.room_bytes

    def fastest(self, like: LoadedConfig, ladders: Iterable[Ladder], safe: bool = False) -> Plan | None:
        """The fastest setting that fits without the allocator having to give its cache back; None where none does.

        Of equally fast ones the first, so ladders should come with the ones that change least in front. `safe` asks
        for one that fits even where the prediction misses by as much as it may. A ladder waits in the queue with its
        lowest rung that is not yet dismissed: those above it are slower.
        """
        room_bytes = self.safe_room_bytes if safe else self.room_bytes
        queue = [(self._best_s(ladder.at(0)), rank, 0, _Look.NONE, ladder) for rank, ladder in self._possible(ladders)]
        heapq.heapify(queue)
        while queue:
            _, rank, rung, looked, ladder = heapq.heappop(queue)
            config = ladder.at(rung)
            if looked is _Look.NONE:
                heapq.heappush(queue, (self.estimator.step_s(config) * OPTIMISM, rank, rung, _Look.SHALLOW, ladder))
                continue
            if looked is _Look.SHALLOW and (higher := self._first_possible(ladder, rung)) > rung:
                later_s = self.estimator.step_s(ladder.at(higher)) * OPTIMISM
                heapq.heappush(queue, (later_s, rank, higher, _Look.SHALLOW, ladder))
                continue
            if looked is _Look.SHALLOW:
                heapq.heappush(queue, (self.estimator.exact(config).step_s, rank, rung, _Look.EXACT, ladder))
                continue
            higher = self._first_fitting(ladder, rung, room_bytes)
            if higher == rung:
                for each in ladder.both(rung):
                    found = self.simulate(like, each)
                    if found.memory.fits and not found.memory.retries and (is_safe(found) or not safe):
                        return found
                higher = rung + 1
            if higher < len(ladder.counts):
                later_s = self.estimator.step_s(ladder.at(higher)) * OPTIMISM
                heapq.heappush(queue, (later_s, rank, higher, _Look.SHALLOW, ladder))
        return None

    def _first_fitting(self, ladder: Ladder, rung: int, room_bytes: float) -> int:
        """The first rung from this one on whose peak fits: the peak sinks with each, so halving finds it."""

        def fits(place: int) -> bool:
            return self.estimator.exact(ladder.at(place)).peak[0] <= room_bytes

        rungs = range(len(ladder.counts))
        return rung if fits(rung) else bisect_left(rungs, True, lo=rung + 1, key=fits)

    def _possible(self, ladders: Iterable[Ladder]) -> list[tuple[int, Ladder]]:
        """The ladders of which the last rung may fit, each with its rank. Memory grows with the micro-batch, so that of
        those alike otherwise halving finds the last that may."""
        families: dict[TrainConfig, list[tuple[int, Ladder]]] = {}
        for rank, each in enumerate(ladders):
            families.setdefault(_family(each.config), []).append((rank, each))
        possible: list[tuple[int, Ladder]] = []
        for members in families.values():
            members.sort(key=lambda pair: pair[1].config.batch_size)
            possible += members[: bisect_left(members, True, key=lambda pair: not self._ends_may_fit(pair[1]))]
        return possible

    def _ends_may_fit(self, ladder: Ladder) -> bool:
        """Whether the last rung may fit; where the first one may, it takes fewer models to know."""
        return self.may_fit(ladder.at(0)) or self.may_fit(ladder.at(-1))

    def _first_possible(self, ladder: Ladder, rung: int = 0) -> int:
        """The first rung from this one on that may fit, where the last one may."""
        rungs = range(len(ladder.counts) - 1)
        return bisect_left(rungs, True, lo=rung, key=lambda place: self.may_fit(ladder.at(place)))

    def _best_s(self, config: TrainConfig) -> float:
        """A time that a setting cannot beat: compiled, it runs the same products with fewer passes over memory."""
        return self.estimator.step_s(replace(config, compile=True)) * OPTIMISM

    def roomiest(self, like: LoadedConfig, ladders: Iterable[Ladder], at_most_s: float = inf) -> Plan | None:
        """Of the settings that take no longer than that a step, the one that takes the least memory, or nearly.

        The two with the smallest peaks are simulated: fragmentation may turn the order of near equals.
        """
        quick: list[TrainConfig] = []
        if at_most_s == inf:
            every = list(ladders)
            smallest = min(each.config.batch_size for each in every)
            for ladder in every:
                if ladder.config.batch_size == smallest:
                    quick += _ends(ladder, 0, len(ladder.counts))
        else:
            for _, ladder in self._possible(ladders):
                if self._best_s(ladder.at(0)) <= at_most_s:
                    rung = self._first_possible(ladder)
                    rungs = range(len(ladder.counts))
                    end = bisect_left(
                        rungs, True, lo=rung, key=lambda n: self.estimator.step_s(ladder.at(n)) > at_most_s
                    )
                    quick += _ends(ladder, rung, end)
        lean = heapq.nsmallest(2, quick, key=self.estimator.lean_bytes)
        plans = [self.simulate(like, each) for each in lean]
        return min(plans, key=lambda each: each.memory.total_mib, default=None)


def is_safe(plan: Plan) -> bool:
    """Whether it fits even where the prediction misses by as much as it may."""
    memory = plan.memory
    return memory.capacity_mib is None or memory.high_mib <= memory.capacity_mib


def _ends(ladder: Ladder, start: int, end: int) -> list[TrainConfig]:
    """The two lowest and the two highest rungs from `start` up to `end`: where the least of a straight line is."""
    rungs = dict.fromkeys((*range(start, end)[:2], *range(start, end)[-2:]))
    return [config for rung in rungs for config in ladder.both(rung)]


def _family(config: TrainConfig) -> TrainConfig:
    """What settings that differ in their micro-batch alone have in common."""
    alone = config.gradient_accumulation_steps <= config.world_size  # a lone micro-step holds no second gradients
    return replace(config, batch_size=1, gradient_accumulation_steps=1 if alone else 2)
