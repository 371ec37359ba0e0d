"""The fastest setting that fits: best-first search, each candidate evaluated no more closely than necessary.

Settings whose lower bound exceeds the card are dropped. Each other setting waits in a queue under a time it cannot
beat; the quickest stands for all that differ only in checkpointed blocks. The one in front is evaluated more closely
each time it comes up: a better estimate of its time, then its exact time and peak, then the full simulation.
The first that passes is the fastest: everything behind it is slower.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from math import inf
from typing import TypeVar

from oomph import config as configs
from oomph.config import LoadedConfig, TrainConfig
from oomph.devices import Device
from oomph.fitting.estimate import Estimator, replace, slack_of
from oomph.fitting.space import Ladder
from oomph.planning.plan import Plan, plan
from oomph.predict.spread import CONTEXT_MIB
from oomph.step.trace.cache import OwnModel
from oomph.units import MIB

OPTIMISM = 0.99  # a shallow estimate of the time is off by less than a percent; seen: 0.56 %
NEAR_THE_LEANEST = 12  # settings, leanest by small models, whose whole step is built
MUCH_EVALUATION = 0.1  # share of a run's hours
LAST_RISE = 2.0  # checkpointing the last block too may raise the peak, by less than this; seen: 1.61 (math attention)


T = TypeVar("T")


class _Depth(IntEnum):
    """How closely a setting has been evaluated."""

    NONE = 0
    SHALLOW = 1  # its time estimated from few layers
    ROUGH = 2  # and a lower bound on the checkpointed blocks it needs
    EXACT = 3  # its time and its peak


class Searcher:
    """Plans and estimates on one device, each made once."""

    def __init__(
        self, device: Device, reserve_mib: float = 0.0, model: str | None = None, other: Searcher | None = None
    ) -> None:
        """`model` is traced in place of the configs' own. `other` has searched on another device: its results that do
        not depend on the device are reused."""
        self.device = device
        self.reserve_mib = reserve_mib
        known = other.own if other is not None else None
        self.own: OwnModel | None = known or (OwnModel(model, of_search=True) if model is not None else None)
        self.estimator: Estimator = Estimator(device, other.estimator if other is not None else None, self.own)
        self.room_bytes = (device.usable_mib - reserve_mib - (device.context_mib or 0)) * MIB
        self.safe_room_bytes = self.room_bytes - CONTEXT_MIB * MIB  # the most that may be reserved, to be safe
        self.fragmented = 1.0  # reserved over allocated in the last simulation
        self._plans: dict[TrainConfig, Plan] = {}

    def plan(self, loaded: LoadedConfig) -> Plan:
        """The full simulation of a config on the device."""
        settled = configs.settle(loaded, self.device)
        known = self._plans.get(settled.config)
        if known is None:
            known = self._plans[settled.config] = plan(
                settled, self.device, reserve_mib=self.reserve_mib, model=self.own
            )
            self.fragmented = known.memory.reserved_mib / known.memory.allocated_mib
        return known

    def simulate(self, like: LoadedConfig, config: TrainConfig) -> Plan:
        """The full simulation of a settled config that came from `like`."""
        return self.plan(replace(like, config=config))

    def may_fit(self, config: TrainConfig) -> bool:
        """False only if the peak exceeds the card's memory."""
        return self.estimator.floor_bytes(config) <= slack_of(config) * self.room_bytes

    def seems_to_do(self, ladders: Iterable[Ladder], at_most_s: float, fragmented: float) -> bool:
        """Whether some setting seems to fit with that fragmentation, in that time per step, estimated from models of
        few layers.

        Smaller micro-batches take less memory; larger ones mostly take less time.
        """
        every = sorted(ladders, key=lambda ladder: ladder.config.batch_size)
        smallest = _smallest_batches(every)
        for ladder in every:
            fitting = [each for each in (ladder.at(0), ladder.at(-1)) if self.seems_to_fit(each, fragmented)]
            if any(self.estimator.step_s(each) <= at_most_s for each in fitting):
                return True
            if not fitting and ladder.config.batch_size not in smallest:
                return False
        return False

    def seems_to_fit(self, config: TrainConfig, fragmented: float = 1.0) -> bool:
        """Whether it seems to fit with that fragmentation, estimated from models of few layers."""
        return fragmented * self.estimator.lean_bytes(config) <= self.room_bytes

    def peak_ever_fits(self, ladders: Iterable[Ladder]) -> bool:
        """Whether any setting's peak is within the card's memory; fragmentation may still add to it."""
        return next(self._lean(ladders), None) is not None

    def _lean(self, ladders: Iterable[Ladder]) -> Iterator[list[TrainConfig]]:
        """The settings whose peak is within the card's memory, the leanest first, each with every kind of segments.
        The smallest micro-batches and the last rung of each strand stand for the others."""
        every = list(ladders)
        smallest = _smallest_batches(every)
        lean = [
            (each.at(strand[-1]), each.both(strand[-1]))
            for each in every
            if each.config.batch_size in smallest
            for strand in each.strands()
        ]
        lean.sort(key=lambda pair: self.estimator.lean_bytes(pair[0]))
        for config, kinds in lean:
            if self.may_fit(config) and self._peak_bytes(config) <= self.room_bytes:
                yield kinds

    def ever_fits(self, like: LoadedConfig, ladders: Iterable[Ladder], safe: bool = False) -> bool:
        """Whether one of the leanest settings fits, or with `safe` surely fits: any other takes more."""
        fits = is_safe if safe else _fits
        return any(fits(self.simulate(like, each)) for kinds in self._lean(ladders) for each in kinds)

    def _peak_bytes(self, config: TrainConfig) -> int:
        return self.estimator.exact(config).peak_bytes

    def fastest(
        self, like: LoadedConfig, ladders: Iterable[Ladder], safe: bool = False, at_most_s: float = inf
    ) -> Plan | None:
        """The fastest setting that fits without the allocator freeing its cache; None if none does, or none in at most
        that many seconds per step.

        Of equally fast ones the first, so ladders that change least should come first. `safe` asks for one that fits
        even if the prediction is off by its largest error. A ladder waits in the queue with its lowest rung that is
        not yet dropped: those above it are slower.
        """
        room_bytes = self.safe_room_bytes if safe else self.room_bytes
        queue = [(self._best_s(ladder.at(0)), rank, 0, _Depth.NONE, ladder) for rank, ladder in self._possible(ladders)]
        heapq.heapify(queue)
        while queue:
            least_s, rank, rung, looked, ladder = heapq.heappop(queue)
            if least_s > at_most_s:
                return None
            if looked is _Depth.EXACT:
                for each in ladder.both(rung):
                    found = self.simulate(like, each)
                    if _fits(found) and (is_safe(found) or not safe):
                        return found
                higher = rung + 1
            elif looked is _Depth.ROUGH and (higher := self._next_fitting(ladder, rung, room_bytes)) == rung:
                heapq.heappush(queue, (self.estimator.exact_s(ladder.at(rung)), rank, rung, _Depth.EXACT, ladder))
                continue
            elif looked is _Depth.SHALLOW:
                higher = self._rough_rung(ladder, rung)
            elif looked is _Depth.NONE:
                higher = rung
            if higher < len(ladder.counts):
                later_s = self.estimator.step_s(ladder.at(higher)) * OPTIMISM
                heapq.heappush(queue, (later_s, rank, higher, _Depth(min(looked + 1, _Depth.ROUGH)), ladder))
        return None

    def in_time(
        self, like: LoadedConfig, ladders: Iterable[Ladder], fastest: Plan, hours: float | None, safe: bool = False
    ) -> Plan:
        """The fastest setting, unless its run is late though its steps alone are not: then the one that finishes first,
        if that is in time."""
        if not is_late(fastest, hours) or (fastest.time is not None and fastest.time.train_hours > (hours or 0.0)):
            return fastest
        soonest = self.soonest(like, ladders, fastest, safe)
        return fastest if is_late(soonest, hours) else soonest

    def soonest(self, like: LoadedConfig, ladders: Iterable[Ladder], fastest: Plan, safe: bool = False) -> Plan:
        """Of the fastest setting and the fastest of every smaller micro-batch, compiled and not, the one whose whole
        run takes the fewest hours: evaluations take whole batches, whatever a step accumulates."""
        groups: dict[tuple[int, bool], list[Ladder]] = {}
        for ladder in ladders:
            groups.setdefault((ladder.config.batch_size, ladder.config.compile), []).append(ladder)
        best = fastest
        for (batch_size, _), members in groups.items():
            if best.time is None or batch_size > fastest.config.batch_size:
                continue
            most_s = best.time.hours * 3600 / like.config.max_iters  # steps that take longer make a longer run
            plan = self.fastest(like, members, safe, most_s)
            if plan is not None and plan.time is not None and plan.time.hours < best.time.hours:
                best = plan
        return best

    def _rough_rung(self, ladder: Ladder, rung: int) -> int:
        """The first rung that could fit, by a bound, from one without checkpointed blocks on; at most the last rung,
        for which the bound does not hold."""
        if ladder.counts[rung]:
            return rung
        fewest = self.estimator.fewest_checkpointed(ladder.at(rung), self.room_bytes)
        return min(bisect_left(ladder.counts, fewest), len(ladder.counts) - 1)

    def _next_fitting(self, ladder: Ladder, rung: int, room_bytes: float) -> int:
        """This rung, if its peak fits; else the next candidate, or one past the last."""

        def fits(place: int) -> bool:
            return self._peak_bytes(ladder.at(place)) <= room_bytes

        def seems_to_fit(place: int) -> bool:
            return self.estimator.lean_bytes(ladder.at(place)) <= room_bytes

        possible = self._first_possible(ladder, rung)
        if possible > rung:
            return possible  # it may never come up again, so that its peak need not be known yet
        if fits(rung):
            return rung
        return self._first(ladder, rung + 1, lambda n: self.may_fit(ladder.at(n)) and fits(n), seems_to_fit)

    def _first_possible(self, ladder: Ladder, rung: int = 0) -> int:
        """The first rung from this one on that may fit; one past the last if there is none."""
        return self._first(ladder, rung, lambda place: self.may_fit(ladder.at(place)))

    def _first(
        self, ladder: Ladder, rung: int, fits: Callable[[int], bool], seems_to_fit: Callable[[int], bool] | None = None
    ) -> int:
        """The first rung from this one on that passes: within a strand the peak falls, so if one fails, all below it
        fail. The search starts from an estimate if there is one, else from below."""
        first = len(ladder.counts)
        for strand in ladder.strands():
            places = strand[bisect_left(strand, rung) : bisect_left(strand, first)]
            guess = bisect_left(places, True, key=seems_to_fit) if seems_to_fit is not None else 0
            failing = boundary(places, guess, lambda place: not fits(place))
            if failing < len(places):
                first = places[failing]
        return first

    def _possible(self, ladders: Iterable[Ladder]) -> list[tuple[int, Ladder]]:
        """The ladders with a rung that may fit, each with its rank. Memory grows with the micro-batch, so if one cannot
        fit, larger ones of its family cannot; the largest that may is near that of the family before."""
        families: dict[TrainConfig, list[tuple[int, Ladder]]] = {}
        for rank, each in enumerate(ladders):
            families.setdefault(_family(each.config), []).append((rank, each))
        possible: list[tuple[int, Ladder]] = []
        largest: int | None = None
        for members in families.values():
            members.sort(key=_batch_size)
            guess = bisect_right(members, largest, key=_batch_size) if largest is not None else len(members) // 2
            fitting = members[: boundary(members, guess, lambda member: self._ever_may_fit(member[1]))]
            possible += fitting
            largest = _batch_size(fitting[-1]) if fitting else 0
        return possible

    def _ever_may_fit(self, ladder: Ladder) -> bool:
        """Whether any rung may fit: the last of each strand takes the least. The ends are tried first, and decide
        unless it is close."""
        first, last = ladder.at(0), ladder.at(-1)
        if self.may_fit(first) or self.may_fit(last):
            return True
        if self.estimator.floor_bytes(last) > LAST_RISE * self.room_bytes:
            return False
        return any(self.may_fit(ladder.at(strand[-1])) for strand in ladder.strands())

    def _best_s(self, config: TrainConfig) -> float:
        """A time that a setting cannot beat. In mixed precision that of the compiled setting: the same products, fewer
        passes over memory. Without casts, compiled may be slower; adapters are not compiled, and a traced model is
        not tried."""
        mixed = config.autocast and config.dtype != "float32"
        if config.compile or not mixed or config.method != "full" or self.own is not None:
            return self.estimator.step_s(config) * OPTIMISM
        measured = self.device.eager_ratio / self.device.compiled_ratio  # as measured by a check on this device
        return self.estimator.step_s(replace(config, compile=True)) * measured * OPTIMISM

    def roomiest(self, like: LoadedConfig, ladders: Iterable[Ladder], at_most_s: float = inf) -> Plan | None:
        """Of the settings that take at most that many seconds per step, the one with the least memory, or nearly.

        Those with the smallest peaks are simulated, until every remaining peak is above what one of them takes in
        full: fragmentation can reverse the order of near equals.
        """
        quick: list[TrainConfig] = []
        if at_most_s == inf:
            every = list(ladders)
            smallest = _smallest_batches(every)
            for ladder in every:
                if ladder.config.batch_size in smallest:
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
        near = heapq.nsmallest(NEAR_THE_LEANEST, dict.fromkeys(quick), key=self.estimator.lean_bytes)
        # Of equal peaks the one with expandable segments, which wastes less between them.
        near.sort(key=lambda each: (self._peak_bytes(each), not each.expandable_segments))
        leanest: Plan | None = None
        for each in near:
            if leanest is not None and self._peak_bytes(each) >= leanest.memory.reserved_mib * MIB:
                break
            found = self.simulate(like, each)
            if leanest is None or found.memory.total_mib < leanest.memory.total_mib:
                leanest = found
        return leanest


def boundary(things: Sequence[T], guess: int, passes: Callable[[T], bool]) -> int:
    """How many pass, given that those that do come first: by ever longer strides from a guess, then by bisection."""
    low, high, reach = 0, len(things), 1  # everything below `low` passes, nothing from `high` on
    if guess == 0 or passes(things[guess - 1]):
        low = guess
        while low < high:
            place = min(high, low + reach) - 1
            if not passes(things[place]):
                high = place
                break
            low, reach = place + 1, 2 * reach
    else:
        high = guess - 1
        while low < high:
            place = max(low, high - reach)
            if passes(things[place]):
                low = place + 1
                break
            high, reach = place, 2 * reach
    return bisect_left(things, True, lo=low, hi=high, key=lambda thing: not passes(thing))


def _fits(plan: Plan) -> bool:
    """Whether it fits without the allocator freeing its cache."""
    return plan.memory.fits is True and not plan.memory.retries


def is_safe(plan: Plan) -> bool:
    """Whether it fits even if the prediction is off by its largest error, and without emptying the cache."""
    memory = plan.memory
    return memory.fits is not False and memory.is_sure and not memory.retries


def is_evaluating(plan: Plan) -> bool:
    """Whether evaluations take so much of the run that the fastest step may not make the shortest run."""
    return plan.time is not None and plan.time.eval_hours > MUCH_EVALUATION * plan.time.hours


def is_late(plan: Plan, hours: float | None) -> bool:
    """Whether the whole run takes longer than that; True if its time is not known."""
    return hours is not None and (plan.time is None or plan.time.hours > hours)


def _ends(ladder: Ladder, start: int, end: int) -> list[TrainConfig]:
    """The two lowest and the three highest rungs from `start` up to `end`: one of each strand's ends is among them."""
    rungs = dict.fromkeys((*range(start, end)[:2], *range(start, end)[-3:]))
    return [config for rung in rungs for config in ladder.both(rung)]


def _smallest_batches(ladders: Iterable[Ladder]) -> set[int]:
    """The smallest micro-batch of the settings that accumulate gradients, and of those that do not."""
    batches: dict[bool, set[int]] = {}
    for ladder in ladders:
        batches.setdefault(_is_alone(ladder.config), set()).add(ladder.config.batch_size)
    return {min(sizes) for sizes in batches.values()}


def _is_alone(config: TrainConfig) -> bool:
    """Whether a step is one micro-step, which holds no second copy of gradients."""
    return config.gradient_accumulation_steps <= config.world_size


def _batch_size(member: tuple[int, Ladder]) -> int:
    return member[1].config.batch_size


def _family(config: TrainConfig) -> TrainConfig:
    """What is common to settings that differ only in their micro-batch."""
    return replace(config, batch_size=1, gradient_accumulation_steps=1 if _is_alone(config) else 2)
