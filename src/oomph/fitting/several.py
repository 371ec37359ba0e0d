"""How few cards are enough: a config on 1, 2, 4, … cards of a kind, until it fits, in time and within the budget."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from typing import Any

import msgspec

from oomph import config as configs
from oomph.config import LoadedConfig, TrainConfig
from oomph.config.programs import TRANSFORMERS
from oomph.devices import Device, all_devices
from oomph.fitting.fit import with_tokens
from oomph.fitting.result import KeyValue
from oomph.fitting.search import is_late
from oomph.fitting.space import TrainingProgram, asked_of, batches, programs, with_changes
from oomph.planning.plan import Plan, plan
from oomph.step.collector import uncollected

MOST_CARDS = 64
EACH_MACHINE = 8  # cards in a machine, if there are more


class CardsOption(msgspec.Struct, frozen=True):
    """A config on a number of cards of a kind, fully simulated."""

    plan: Plan
    in_time: bool
    in_budget: bool

    @property
    def cards(self) -> int:
        return self.plan.config.world_size

    @property
    def device(self) -> Device:
        return self.plan.device

    @property
    def usd(self) -> float | None:
        """What the run costs on rented cards, at the cheapest provider known."""
        price, time = self.device.usd_per_hour_low, self.plan.time
        return price * time.hours * self.cards if price is not None and time is not None else None

    @property
    def does(self) -> bool:
        """Whether it is within every limit."""
        return self.in_time and self.in_budget

    def to_dict(self) -> dict[str, Any]:
        """The option as a JSON object."""
        config, memory, time = self.plan.config, self.plan.memory, self.plan.time
        keys = ("trainer", "parallel", "checkpoint_layers", "batch_size", "gradient_accumulation_steps", "nodes")
        result = {
            "gpu": self.device.name,
            "cards": self.cards,
            **{key: getattr(config, key) for key in keys},
            "total_mib": memory.total_mib,
            "capacity_mib": memory.capacity_mib,
            "tokens_per_s": time.tokens_per_s if time else None,
            "hours": time.hours if time else None,
            "usd": self.usd,
            "in_time": self.in_time,
            "in_budget": self.in_budget,
        }
        return {name: value for name, value in result.items() if value is not None}


class FewCards(msgspec.Struct, frozen=True):
    """For every kind of card how few are enough: the fewest first, then the cheapest; then those that come close."""

    options: tuple[CardsOption, ...]
    kinds: int  # kinds of card that were tried
    hours_limit: float | None
    usd_limit: float | None

    @property
    def fitting(self) -> tuple[CardsOption, ...]:
        return tuple([option for option in self.options if option.does])

    @property
    def verdict(self) -> str:
        """The answer on one line."""
        limits = ((self.hours_limit, "h"), (self.usd_limit, "USD"))
        within = [f"{value:g} {unit}" for value, unit in limits if value is not None]
        limit = f" in {' and '.join(within)}" if within else ""
        if not self.fitting:
            near = "" if self.options else ": it does not fit, with the same effective batch"
            return f"Up to {MOST_CARDS} cards of one kind do not do this{limit}{near}"
        fewest = self.fitting[0]
        found = f"{len(self.fitting)} of {self.kinds} kinds of card would do{limit}: the fewest are {named(fewest)}"
        cheapest = min(self.fitting, key=lambda option: inf if option.usd is None else option.usd)
        if cheapest is not fewest and cheapest.usd is not None:
            found += f"; the cheapest, {named(cheapest)}"
        return found

    def to_dict(self) -> dict[str, Any]:
        """The answer as a JSON object."""
        return {"verdict": self.verdict, "options": [option.to_dict() for option in self.options]}


def named(option: CardsOption) -> str:
    """Such as "4 × H100 SXM5 80GB, 12 USD"."""
    cost = "" if option.usd is None else f", {option.usd:,.0f} USD"
    return f"{option.cards} × {option.device.name}{cost}"


def few_cards(
    config: LoadedConfig | TrainConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    cards: Iterable[Device] | None = None,
    reserve_mib: float = 0.0,
    tokens: float | None = None,
    hours: float | None = None,
    usd: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> FewCards:
    """The fewest cards of each kind that train `config` within the hours and the money; without `cards`, of every
    kind that can be rented. `progress` is called with the card being tried."""
    loaded = with_tokens(configs.as_loaded(config), tokens)
    rented = [card for card in all_devices() if card.kind != "cpu" and card.usd_per_hour_low is not None]
    chosen = list(cards) if cards is not None else rented
    found: list[CardsOption] = []
    with uncollected():
        for number, card in enumerate(chosen, 1):
            if progress is not None:
                progress(f"card {number} of {len(chosen)}: {card.name}")
            option = _fewest(loaded, card, reserve_mib, hours, usd)
            found += [option] if option is not None else []
    found.sort(key=lambda option: (not option.does, option.cards, inf if option.usd is None else option.usd))
    return FewCards(tuple(found), len(chosen), hours, usd)


def _fewest(
    loaded: LoadedConfig, card: Device, reserve_mib: float, hours: float | None, usd: float | None
) -> CardsOption | None:
    """The first count that is within the limits; else the last that fits at all."""
    last: CardsOption | None = None
    count = 1
    while count <= MOST_CARDS:
        shared = _shared(loaded, count)
        best = _fastest(shared, card, reserve_mib) if shared is not None else None
        if best is not None:
            late = is_late(best, hours)
            last = CardsOption(best, not late, in_budget=True)
            dear = usd is not None and (last.usd is None or last.usd > usd)
            last = msgspec.structs.replace(last, in_budget=not dear)
            if last.does or (dear and not late):  # more cards would not make it cheaper
                return last
        count *= 2
    return last


def _shared(loaded: LoadedConfig, count: int) -> LoadedConfig | None:
    """The config on that many cards: the same effective batch or, if a program counts micro-steps per card and they
    are not set, as many tokens in fewer steps. None if the batch cannot be divided."""
    config = loaded.config
    changes: dict[str, KeyValue] = {"world_size": count, "nodes": max(1, count // EACH_MACHINE)}
    each = config.trainer in (*TRANSFORMERS, "torchtitan") and not loaded.said("gradient_accumulation_steps")
    if each:
        changes["gradient_accumulation_steps"] = config.gradient_accumulation_steps * count
        changes["max_iters"] = max(1, config.max_iters // count)
    if config.batch_size * int(str(changes.get("gradient_accumulation_steps", config.gradient_accumulation_steps))) % count:  # fmt: skip  # noqa: E501
        return None
    return with_changes(loaded, changes)


def _fastest(loaded: LoadedConfig, card: Device, reserve_mib: float) -> Plan | None:
    """The fastest setting of the requested program that fits, with its micro-batch or smaller ones."""
    found = programs(loaded, card)
    program = found[asked_of(found, loaded)]
    settings = list(_settings(program))
    if not settings or _fits(program, settings[-1][-1], card, reserve_mib) is None:  # the leanest
        return None
    plans: list[Plan] = []
    for sizes in settings:
        fitting = (_fits(program, changes, card, reserve_mib) for changes in sizes)
        quickest = next((each for each in fitting if each is not None), None)
        plans += [quickest] if quickest is not None else []
        if quickest is not None and _is_plain(quickest, sizes[0]):
            break  # the rest shards more, or recomputes more
    return min(plans, key=lambda each: each.time.hours if each.time else inf)


def _is_plain(found: Plan, first: dict[str, KeyValue]) -> bool:
    """Whether it checkpoints nothing, with the micro-batch that was tried first."""
    return not found.config.checkpoint_layers and found.config.batch_size == first["batch_size"]


def _settings(program: TrainingProgram) -> Iterator[list[dict[str, KeyValue]]]:
    """Ways to shard and to checkpoint, each with micro-batches from the requested one down; the leanest way last."""
    config = program.loaded.config
    sizes = [(size, steps) for size, steps in batches(config) if size <= config.batch_size]
    layers = sorted({min(program.checkpoint_layers, default=0), max(program.checkpoint_layers, default=0)})
    for parallel, reshard in sorted(program.sharing, key=lambda way: (way[0] == "fsdp", way[1] is None)):
        told: dict[str, KeyValue] = {"parallel": parallel or "none"}
        told |= {"reshard_after_forward": reshard} if reshard is not None else {}
        for checkpointed in layers if sizes else ():
            own = told | {"checkpoint_layers": checkpointed}
            yield [own | {"batch_size": size, "gradient_accumulation_steps": steps} for size, steps in sizes]


def _fits(program: TrainingProgram, changes: dict[str, KeyValue], card: Device, reserve_mib: float) -> Plan | None:
    found = plan(with_changes(program.loaded, changes), card, reserve_mib=reserve_mib)
    return found if found.memory.fits and not found.memory.retries else None
