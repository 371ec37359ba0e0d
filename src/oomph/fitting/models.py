"""Which popular models for fine-tuning fit a card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from oomph import config as configs
from oomph.config import LoadedConfig
from oomph.config.reading.hugging_face import known_models
from oomph.devices import Device
from oomph.errors import InputError
from oomph.planning.plan import Plan, plan
from oomph.step.loop import model_buffers
from oomph.units import MIB, counted

Loader = Callable[[str], LoadedConfig]  # the config of a model by its name, with the requested keys
SHOWN = 6  # the largest models that fit; the rest are not simulated


class ModelOption(msgspec.Struct, frozen=True):
    """A model by its name on the hub, planned on the card."""

    name: str
    plan: Plan

    @property
    def fits(self) -> bool:
        return bool(self.plan.memory.fits)

    def to_dict(self) -> dict[str, Any]:
        """The model as a JSON object."""
        memory, time = self.plan.memory, self.plan.time
        found = {"model": self.name, "params": self.plan.model.params, "fits": self.fits}
        return found | {"total_mib": memory.total_mib, "tokens_per_s": time.tokens_per_s if time else None}


class Models(msgspec.Struct, frozen=True):
    """The largest models that fit, the largest first, and the smallest that does not."""

    device: Device
    options: tuple[ModelOption, ...]
    tried: int

    @property
    def fitting(self) -> list[ModelOption]:
        return [option for option in self.options if option.fits]

    @property
    def verdict(self) -> str:
        """The answer in a sentence."""
        if not self.fitting:
            return f"No, none of {counted(self.tried, 'model')} fits {self.device.name} so"
        best = self.fitting[0]
        return f"{best.name} is the largest of {counted(self.tried, 'model')} that fits {self.device.name} so"

    def to_dict(self) -> dict[str, Any]:
        """The models as a JSON object."""
        return {"gpu": self.device.name, "tried": self.tried, "models": [each.to_dict() for each in self.options]}


def which_models(load: Loader, device: Device, *, reserve_mib: float = 0.0) -> Models:
    """The largest of the known models that fit the card, by number of parameters."""
    room = None if device.usable_mib is None else (device.usable_mib - reserve_mib) * MIB
    sized = []
    for name in known_models():
        try:
            loaded = configs.settle(load(name), device)
        except InputError:
            continue  # a family without this method, or a table of positions that is too short
        held = sum(buffer.bytes for buffer in model_buffers(loaded.config, True))
        sized.append((held, name, loaded))
    sized.sort(key=lambda each: -each[0])
    options: list[ModelOption] = []
    for held, name, loaded in sized:
        if room is not None and held > room:
            continue
        option = ModelOption(name, plan(loaded, device, reserve_mib=reserve_mib))
        if option.fits or not options:
            options.append(option)
        elif not options[-1].fits:
            options[-1] = option
        if sum(each.fits for each in options) == SHOWN:
            break
    options.sort(key=lambda each: -each.plan.model.params)
    return Models(device, tuple(options), len(sized))
