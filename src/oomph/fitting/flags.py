"""What each flag of a run saves and costs, and the longest context that fits its card."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from oomph.config import LoadedConfig, TrainConfig
from oomph.config.layer import UNSET
from oomph.config.programs import TRANSFORMERS
from oomph.devices import Device
from oomph.errors import InputError
from oomph.planning.plan import Plan, plan

Changer = Callable[[Mapping[str, str]], LoadedConfig]  # the config with more keys, as written on a command line
LENGTH_STEP, MOST_STEPS = 256, 4096  # tokens between the lengths tried, and the number of lengths


class Flag(msgspec.Struct, frozen=True):
    """One key changed, all others as they are."""

    keys: dict[str, str]
    plan: Plan
    saved_mib: float  # allocated at the peak; the memory reserved beyond it is arbitrary if it does not fit
    faster: float | None  # ratio of tokens a second to the unchanged run's, minus 1
    effect: str  # on the training

    def to_dict(self) -> dict[str, Any]:
        """The flag as a JSON object."""
        found: dict[str, Any] = {"keys": self.keys, "total_mib": self.plan.memory.total_mib}
        return found | {"saved_mib": self.saved_mib, "faster": self.faster, "effect": self.effect}


class Flags(msgspec.Struct, frozen=True):
    """A run as it is, and with each flag changed, the largest saving first."""

    now: Plan
    flags: tuple[Flag, ...]

    def to_dict(self) -> dict[str, Any]:
        """The table as a JSON object."""
        now = {"total_mib": self.now.memory.total_mib, "fits": self.now.memory.fits}
        return {"now": now, "flags": [flag.to_dict() for flag in self.flags]}


SAME, NEARLY, OTHER = "same", "nearly", "another"  # the training, with the key changed


def _turns(config: TrainConfig) -> Iterator[tuple[dict[str, str], str]]:
    """Keys to change, and what that does to the training."""
    yield {"checkpoint_layers": "0" if config.checkpoint_layers else "all"}, SAME
    for loss in ("liger", "cce"):
        yield {"fused_loss": loss}, SAME
    yield {"liger_kernel": "True"}, SAME
    if config.batch_size > 1 and config.batch_size % 2 == 0:
        steps = 2 * config.gradient_accumulation_steps
        yield {"batch_size": str(config.batch_size // 2), "gradient_accumulation_steps": str(steps)}, SAME
    yield {"block_size": str(config.block_size // 2)}, OTHER
    yield {"block_size": str(2 * config.block_size)}, OTHER
    yield {"expandable_segments": "True"}, SAME
    for optimizer in ("adamw8bit", "paged_adamw8bit"):
        yield {"optimizer": optimizer}, NEARLY
    if config.method == "full":
        yield {"optimizer": "adafactor"}, OTHER
        yield {"autocast": "False"}, NEARLY
        yield {"method": "lora"}, OTHER
        yield {"method": "qlora"}, OTHER
        return
    yield {"adapter_dtype": "bfloat16"}, NEARLY
    yield {"upcast": "off"}, NEARLY
    yield {"method": "lora" if config.method == "qlora" else "qlora"}, NEARLY
    yield {"method": "dora"}, OTHER
    yield {"lora_targets": "q_proj,v_proj" if config.lora_targets == "all-linear" else "all-linear"}, OTHER
    yield {"lora_rank": str(max(1, config.lora_rank // 2))}, OTHER
    yield {"lora_dropout": "0.05" if not config.lora_dropout else "0"}, NEARLY


def what_flags_do(change: Changer, device: Device, *, reserve_mib: float = 0.0) -> Flags:
    """What every flag of a run of transformers' models saves and costs, each by itself."""
    now = plan(change({}), device, reserve_mib=reserve_mib)
    found: list[Flag] = []
    for keys, effect in _turns(now.config):
        if now.config.trainer not in TRANSFORMERS or all(str(getattr(now.config, k)) == v for k, v in keys.items()):
            continue
        try:
            other = plan(change(keys), device, reserve_mib=reserve_mib)
        except InputError:
            continue  # this model or program does not have it
        saved = now.memory.allocated_mib - other.memory.allocated_mib
        faster = other.time.tokens_per_s / now.time.tokens_per_s - 1 if other.time and now.time else None
        moved = abs(now.memory.total_mib - other.memory.total_mib)
        if max(abs(saved), moved) >= 1 or (faster is not None and abs(faster) >= 0.001):
            found.append(Flag(keys, other, saved, faster, effect))
    return Flags(now, tuple(sorted(found, key=lambda flag: -flag.saved_mib)))


class LongestContext(msgspec.Struct, frozen=True):
    """The longest sequences that fit, and the plan of a run with them."""

    plan: Plan | None  # None: not even the shortest fits
    device: Device

    @property
    def verdict(self) -> str:
        """The answer in a sentence."""
        if self.plan is None:
            return f"No, not even {LENGTH_STEP} tokens fit {self.device.name}"
        return f"{self.plan.config.block_size:,} tokens a sequence are the most that fit {self.device.name}"

    def to_dict(self) -> dict[str, Any]:
        """The length as a JSON object, and the plan."""
        length = None if self.plan is None else self.plan.config.block_size
        return {"block_size": length, "plan": None if self.plan is None else self.plan.to_dict()}


def longest_context(change: Changer, device: Device, *, reserve_mib: float = 0.0) -> LongestContext:
    """The longest sequences that fit the card, in steps of 256 tokens: more tokens never take less memory."""

    def planned(steps: int) -> Plan | None:
        try:
            found = plan(
                change({"block_size": str(LENGTH_STEP * steps), "lengths": UNSET}), device, reserve_mib=reserve_mib
            )
        except InputError:
            if steps == 1:
                raise
            return None  # longer than the model's table of positions
        return found if found.memory.fits is not False else None

    best, low, high = planned(1), 1, 2
    if best is None:
        return LongestContext(None, device)
    while high < MOST_STEPS and (found := planned(high)) is not None:
        best, low, high = found, high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        found = planned(middle)
        best, low, high = (best, low, middle) if found is None else (found, middle, high)
    return LongestContext(best, device)
