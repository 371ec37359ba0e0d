"""The fastest setting that fits: best first, each candidate looked at no more closely than it must be.

What exceeds the card by a safe bound is dismissed. Each other candidate waits in a queue under a time it cannot beat.
The one in front is looked at more closely each time it comes up: a better estimate of its time, then its exact time and
its peak, then the full simulation on the card. The first that passes is the fastest: everything behind it is slower.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from enum import IntEnum
from math import inf

from oomph import config as configs
from oomph.config import LoadedConfig, TrainConfig
from oomph.devices import Device
from oomph.fitting.estimate import Estimator, replace
from oomph.planner import Plan, plan
from oomph.predict.footprint import ALLOCATED_SPREAD, CONTEXT_SPREAD_MIB
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

    def fastest(self, like: LoadedConfig, candidates: Iterable[TrainConfig], safe: bool = False) -> Plan | None:
        """The fastest candidate that fits without the allocator having to give its cache back; None where none does.

        Of equally fast ones the first, so candidates should come with the ones that change least in front. `safe`
        asks for one that fits even where the prediction misses by as much as it may.
        """
        possible = self._possible(candidates)
        room_bytes = self.safe_room_bytes if safe else self.room_bytes
        ladders = _ladders(each for _, each in possible)
        fewest: dict[TrainConfig, int] = {}  # blocks to be checkpointed, by what else is set
        queue = [(self._best_s(each), rank, _Look.NONE, each) for rank, each in possible]
        heapq.heapify(queue)
        while queue:
            _, rank, looked, config = heapq.heappop(queue)
            alike = _but_checkpoints(config)
            if config.checkpoint_layers < fewest.get(alike, 0):
                continue
            if looked is _Look.NONE:
                heapq.heappush(queue, (self.estimator.step_s(config) * OPTIMISM, rank, _Look.SHALLOW, config))
            elif looked is _Look.SHALLOW:
                heapq.heappush(queue, (self.estimator.exact(config).step_s, rank, _Look.EXACT, config))
            elif self.estimator.exact(config).peak[0] > room_bytes:
                fewest[alike] = self._fewest_checkpoints(config, ladders[alike], room_bytes)
            else:
                found = self.simulate(like, config)
                if found.memory.fits and not found.memory.retries and (is_safe(found) or not safe):
                    return found
        return None

    def _fewest_checkpoints(self, config: TrainConfig, counts: list[int], room_bytes: float) -> int:
        """How many blocks must be checkpointed for the peak to fit, where this many are too few: the peak sinks with
        each, so halving finds it."""

        def fits(count: int) -> bool:
            return self.estimator.exact(replace(config, checkpoint_layers=count)).peak[0] <= room_bytes

        place = bisect_left(counts, True, lo=bisect_right(counts, config.checkpoint_layers), key=fits)
        return counts[place] if place < len(counts) else config.n_layer + 1

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


def is_safe(plan: Plan) -> bool:
    """Whether it fits even where the prediction misses by as much as it may."""
    memory = plan.memory
    return memory.capacity_mib is None or memory.high_mib <= memory.capacity_mib


def _but_checkpoints(config: TrainConfig) -> TrainConfig:
    """What candidates that differ in their checkpointed blocks alone have in common."""
    return replace(config, checkpoint_layers=0, expandable_segments=False)


def _ladders(configs: Iterable[TrainConfig]) -> dict[TrainConfig, list[int]]:
    """The numbers of checkpointed blocks that may be tried, by what else is set."""
    found: dict[TrainConfig, set[int]] = {}
    for each in configs:
        found.setdefault(_but_checkpoints(each), set()).add(each.checkpoint_layers)
    return {alike: sorted(counts) for alike, counts in found.items()}


def _family(config: TrainConfig) -> TrainConfig:
    """What candidates that differ in their micro-batch alone have in common."""
    alone = config.gradient_accumulation_steps <= config.world_size  # a lone micro-step holds no second gradients
    return replace(config, batch_size=1, gradient_accumulation_steps=1 if alone else 2, expandable_segments=False)
