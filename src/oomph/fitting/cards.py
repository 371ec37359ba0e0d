"""Which card would do: a config on every card of the catalogue, unchanged and, where that fails, at its best batch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from oomph import config as configs
from oomph.collecting import collecting_later
from oomph.config import LoadedConfig, TrainConfig
from oomph.devices import Device, all_devices
from oomph.fitting.answer import names_a_model, with_tokens
from oomph.fitting.search import Searcher
from oomph.fitting.space import batches
from oomph.planner import Plan


class CardOption(msgspec.Struct, frozen=True):
    """A config on a card, simulated in full there."""

    plan: Plan
    unchanged: bool  # as it was asked; else at another micro-batch and the same effective batch
    in_time: bool

    @property
    def device(self) -> Device:
        return self.plan.device

    @property
    def rent(self) -> tuple[float, float] | None:
        """What the run costs on a rented card, in USD: at the cheapest provider, and at the dearest."""
        low, high, time = self.device.usd_per_hour_low, self.device.usd_per_hour_high, self.plan.time
        return (low * time.hours, (high or low) * time.hours) if low is not None and time is not None else None

    def to_dict(self) -> dict[str, Any]:
        """The card as a JSON object."""
        config, memory, time = self.plan.config, self.plan.memory, self.plan.time
        result = {
            "gpu": self.device.name,
            "fits": bool(memory.fits),
            "unchanged": self.unchanged,
            "batch_size": config.batch_size,
            "gradient_accumulation_steps": config.gradient_accumulation_steps,
            "total_mib": memory.total_mib,
            "capacity_mib": memory.capacity_mib,
            "headroom_mib": memory.headroom_mib,
            "tokens_per_s": time.tokens_per_s if time else None,
            "hours": time.hours if time else None,
            "in_time": self.in_time,
            "rent_usd": list(self.rent) if self.rent else None,
        }
        return {name: value for name, value in result.items() if value is not None}


class Cards(msgspec.Struct, frozen=True):
    """Every card of the catalogue, those that would do first, the smallest of them in front."""

    loaded: LoadedConfig
    cards: tuple[CardOption, ...]
    hours_limit: float | None

    @property
    def assumed(self) -> str:
        """What was taken for the model where nobody named one; else empty."""
        if names_a_model(self.loaded):
            return ""
        config = self.loaded.config
        return (
            f"no model was named, so this is nanoGPT's default: {config.n_layer} layers × {config.n_embd}, "
            f"{config.batch_size} × {config.gradient_accumulation_steps} sequences of {config.block_size}"
        )

    @property
    def fitting(self) -> tuple[CardOption, ...]:
        """Those that would do."""
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
        small = f"the smallest that would do{limit} is the {first.device.name}, as {size}"
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
) -> Cards:
    """Which of the known cards trains `config`, as it is or with a smaller micro-batch at the same effective batch."""
    loaded = with_tokens(configs.as_loaded(config), tokens)
    chosen = [card for card in (cards or all_devices()) if card.kind != "cpu"]
    needs = _Needs(loaded)
    with collecting_later():
        found = [_on_card(loaded, card, needs, reserve_mib, hours) for card in chosen]
    found.sort(key=lambda card: (not card.plan.memory.fits, not card.in_time, card.device.usable_mib, _slowness(card)))
    return Cards(loaded, tuple(found), hours)


def _slowness(card: CardOption) -> float:
    return card.plan.time.hours if card.plan.time else 0.0


class _Needs:
    """What each micro-batch takes, which is nearly the same on every card: it tells which to simulate on one."""

    def __init__(self, loaded: LoadedConfig) -> None:
        self.loaded = loaded
        self._known: dict[TrainConfig, float] = {}

    def reserved_mib(self, config: TrainConfig, device: Device) -> float:
        if config not in self._known:
            like = LoadedConfig(config, self.loaded.sources, self.loaded.notes, self.loaded.files)
            roomy = msgspec.structs.replace(device, memory_mib=2**30, usable_mib=2**30)
            self._known[config] = Searcher(roomy).plan(like).memory.reserved_mib
        return self._known[config]


def _on_card(
    loaded: LoadedConfig, device: Device, needs: _Needs, reserve_mib: float, hours: float | None
) -> CardOption:
    """Unchanged where that fits; else the largest micro-batch that does, each simulated on the card itself."""
    settled = configs.settle(loaded, device).config
    room_mib = device.usable_mib - reserve_mib - device.context_mib
    searcher = Searcher(device, reserve_mib)
    sizes = [pair for pair in batches(settled) if pair[0] <= settled.batch_size]
    plan: Plan | None = None
    for size, micro_steps in sizes:
        config = msgspec.structs.replace(settled, batch_size=size, gradient_accumulation_steps=micro_steps)
        last = size == sizes[-1][0]
        if last or needs.reserved_mib(config, device) <= room_mib:
            plan = searcher.simulate(loaded, config)
            if plan.memory.fits:
                break
    assert plan is not None  # a micro-batch of one divides every batch
    in_time = hours is None or (plan.time is not None and plan.time.hours <= hours)
    return CardOption(plan, plan.config.batch_size == settled.batch_size, in_time)
