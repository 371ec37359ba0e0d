"""Which card is enough: a config on every card in the catalogue, unchanged or, if that fails, at its best setting."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from typing import Any

import msgspec

from oomph import config as configs
from oomph.config import LoadedConfig, TrainConfig
from oomph.devices import Device, all_devices
from oomph.fitting.fit import names_a_model, with_a_leanest, with_tokens
from oomph.fitting.result import KeyValue, is_patched
from oomph.fitting.search import Searcher, is_late, is_safe
from oomph.fitting.space import (
    COMPILE_CAPABILITY,
    TrainingProgram,
    asked_of,
    changes_between,
    ladders,
    programs,
    same_rows,
    with_changes,
)
from oomph.planning.plan import Plan
from oomph.step import build as steps
from oomph.step.collector import uncollected


class CardOption(msgspec.Struct, frozen=True):
    """A config on a card, fully simulated."""

    plan: Plan
    changes: dict[str, KeyValue]  # to the requested config: keys that leave the training the same
    in_time: bool

    @property
    def unchanged(self) -> bool:
        """Whether the requested config runs unchanged."""
        return not self.changes

    @property
    def device(self) -> Device:
        return self.plan.device

    @property
    def patched(self) -> bool:
        """Whether nanoGPT needs our two-line patch for it."""
        return is_patched(self.plan)

    @property
    def rent(self) -> tuple[float, float] | None:
        """What the run costs on a rented card, in USD: at the cheapest and at the most expensive provider."""
        low, high, time = self.device.usd_per_hour_low, self.device.usd_per_hour_high, self.plan.time
        return (low * time.hours, (high or low) * time.hours) if low is not None and time is not None else None

    @property
    def margin(self) -> str:
        """Why it may not fit after all; else empty."""
        memory = self.plan.memory
        if memory.retries:
            return ", and only just: it must give cached memory back, which costs time"
        if is_safe(self.plan):
            return ""
        return f", with a margin of {memory.headroom_mib:,.0f} MiB that a prediction may miss by"

    def to_dict(self) -> dict[str, Any]:
        """The card as a JSON object."""
        config, memory, time = self.plan.config, self.plan.memory, self.plan.time
        result = {
            "gpu": self.device.name,
            "fits": bool(memory.fits),
            "unchanged": self.unchanged,
            "trainer": config.trainer,
            "patched": self.patched,
            "changes": self.changes,
            "batch_size": config.batch_size,
            "gradient_accumulation_steps": config.gradient_accumulation_steps,
            "total_mib": memory.total_mib,
            "high_mib": memory.high_mib,
            "capacity_mib": memory.capacity_mib,
            "headroom_mib": memory.headroom_mib,
            "tokens_per_s": time.tokens_per_s if time else None,
            "hours": time.hours if time else None,
            "in_time": self.in_time,
            "rent_usd": list(self.rent) if self.rent else None,
        }
        return {name: value for name, value in result.items() if value is not None}


class Cards(msgspec.Struct, frozen=True):
    """Every card in the catalogue: first those that are enough, the smallest of them in front."""

    loaded: LoadedConfig
    cards: tuple[CardOption, ...]
    hours_limit: float | None

    @property
    def assumed(self) -> str:
        """The model that was assumed if none was named; else empty."""
        if names_a_model(self.loaded):
            return ""
        config = self.loaded.config
        return (
            f"no model was named, so this is nanoGPT's default: {config.n_layer} layers × {config.n_embd}, "
            f"{config.batch_size} × {config.gradient_accumulation_steps} sequences of {config.block_size}"
        )

    @property
    def fitting(self) -> tuple[CardOption, ...]:
        """The cards that are enough."""
        return tuple(card for card in self.cards if card.plan.memory.fits and card.in_time)

    @property
    def verdict(self) -> str:
        """The answer on one line."""
        return self._verdict() + (f"; {self.assumed}" if self.assumed else "")

    def _verdict(self) -> str:
        limit = f" in {self.hours_limit:g} h" if self.hours_limit is not None else ""
        if not self.fitting:
            return f"No card that oomph knows trains this{limit} with its effective batch"
        would = f"{len(self.fitting)} of {len(self.cards)} cards would do"
        unchanged = next((card for card in self.fitting if card.unchanged), None)
        first = self.fitting[0]
        size = f"{first.plan.config.batch_size} × {first.plan.config.gradient_accumulation_steps}"
        small = f"the smallest that would do{limit} is the {first.device.name}, as {size}{first.margin}"
        if unchanged is None or unchanged is first:
            return f"{would}: {small}"
        return f"{would}: {small}; unchanged, the {unchanged.device.name}"

    def to_dict(self) -> dict[str, Any]:
        """The answer as a JSON object."""
        return {"verdict": self.verdict, "cards": [card.to_dict() for card in self.cards]}


def which_cards(
    config: LoadedConfig | TrainConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    reserve_mib: float = 0.0,
    tokens: float | None = None,
    hours: float | None = None,
    cards: Iterable[Device] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Cards:
    """Which of the known cards train `config`: as it is or, if that does not fit or takes too long, with a setting
    of any program that keeps the training the same. `progress` is called with the card being tried."""
    loaded = with_tokens(configs.as_loaded(config), tokens)
    chosen = [card for card in (cards or all_devices()) if card.kind != "cpu"]
    chosen.sort(key=lambda card: (_kind_of(card), -_room_mib(card)))
    search = _Search(loaded, reserve_mib, hours)
    found = []
    with uncollected():
        for number, card in enumerate(chosen, 1):
            if progress is not None:
                progress(f"card {number} of {len(chosen)}: {card.name}")
            found.append(search.on_card(card))
    found.sort(key=lambda card: (not card.plan.memory.fits, not card.in_time, card.device.usable_mib, _slowness(card)))
    return Cards(loaded, tuple(found), hours)


def _slowness(card: CardOption) -> float:
    return card.plan.time.hours if card.plan.time else 0.0


def _kind_of(card: Device) -> str:
    """The kind of a card: cards of one kind run the same programs with the same operations."""
    compiles = card.compute_capability is None or card.compute_capability >= COMPILE_CAPABILITY
    return f"{card.kind} {card.has_bf16} {compiles} {steps.workspaces(card.capability)}"


def _room_mib(card: Device) -> float:
    return card.usable_mib - (card.context_mib or 0.0)


class _Search:
    """Tries card after card: those of one kind together, the largest first, so that each reuses earlier results."""

    def __init__(self, loaded: LoadedConfig, reserve_mib: float, hours: float | None) -> None:
        self.loaded = loaded
        self.reserve_mib = reserve_mib
        self.hours = hours
        self._before: Searcher | None = None
        self._too_small: set[str] = set()  # kinds with a card that was too small: smaller ones are skipped

    def on_card(self, card: Device) -> CardOption:
        """The requested config, if it fits in time; else the fastest setting that does, of the requested program first;
        else the first that fits at all."""
        searcher = self._before = Searcher(card, self.reserve_mib, self.loaded.model, self._before)
        now = searcher.plan(self.loaded)
        plan = now if now.memory.fits and not now.memory.retries and not is_late(now, self.hours) else None
        if plan is None and _kind_of(card) not in self._too_small:
            plan = self._searched(searcher, now)
            if plan is None:
                self._too_small.add(_kind_of(card))
        plan = plan or now
        return CardOption(plan, changes_between(now.config, plan.config), not is_late(plan, self.hours))

    def _searched(self, searcher: Searcher, now: Plan) -> Plan | None:
        """A setting that fits in time, if there is one, else a late one; None if nothing fits."""
        limit_s = inf if self.hours is None else self.hours * 3600 / self.loaded.config.max_iters
        found = programs(self.loaded, searcher.device)
        asked = asked_of(found, self.loaded)
        ordered = [found[asked], *(program for key, program in found.items() if key != asked)]
        plans: list[Plan] = []
        for most_s in dict.fromkeys((limit_s, inf)):
            for program in ordered:
                every = list(ladders(program))
                plan = searcher.fastest(program.loaded, every, at_most_s=most_s)
                if plan is not None:
                    plans.append(searcher.in_time(program.loaded, every, plan, self.hours))
                    if most_s == inf or not is_late(plans[-1], self.hours):
                        return plans[-1]
            # The steps alone would be in time, so a setting without compiling or with shorter evaluations may be too.
            # Or nothing fits unless the allocator frees its cache.
            if plans or most_s == inf:
                usual = [
                    searcher.plan(with_changes(found[row.program].loaded, row.changes))
                    for row in same_rows(found, asked)
                ]
                plans = [*plans, now, *usual]
                if in_time := [plan for plan in plans if plan.memory.fits and not is_late(plan, self.hours)]:
                    return in_time[0]
            if now.memory.fits:
                return now
        plans += _leanest(searcher, [found[key] for key in with_a_leanest(found, asked)])
        fitting = [plan for plan in plans if plan.memory.fits]
        return min(fitting, key=lambda plan: is_late(plan, self.hours), default=None)


def _leanest(searcher: Searcher, programs: Iterable[TrainingProgram]) -> Iterator[Plan]:
    """The leanest setting of each program whose peak is below the card's memory: freeing the cache may make it fit."""
    for program in programs:
        every = list(ladders(program))
        plan = searcher.roomiest(program.loaded, every) if searcher.peak_ever_fits(every) else None
        if plan is not None:
            yield plan
