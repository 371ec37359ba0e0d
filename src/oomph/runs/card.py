"""Identify the card: by its name, else by memory, power limit and speed, else only by its size."""

from __future__ import annotations

import re

import msgspec

from oomph.devices import Device, all_devices, custom, find
from oomph.errors import InputError
from oomph.runs.run import Gpu, Provenance

SAME_MIB = 8  # difference between drivers
OLD_DRIVER = 0.025  # share of the memory that drivers before 510 do not show
TORCH_TOTAL = 0.02  # share of the usable memory: drivers leave 12002, 11902 or 11837 MiB of the same RTX 4070


_FORM = re.compile(r"SXM\d", re.I)  # the catalogue may have the card in another form only
NAMELESS = ("graphics device", "gpu", "device", "unknown")  # names that a driver gives to a card it does not know
LEAST_MIB = 1024  # smaller figures are MIG slices or mistakes


class Card(msgspec.Struct, frozen=True):
    """The card, or the candidates if it is not certain."""

    device: Device | None
    how: Provenance | None
    where: str  # the reasoning
    candidates: tuple[str, ...] = ()
    doubt: str | None = None  # what in the log contradicts the given card
    stand_in: Device | None = None  # an unknown card of the stated size, without a speed

    @property
    def planned(self) -> Device | None:
        """The card, or a stand-in of its size, which is enough to plan memory."""
        return self.device or self.stand_in


def identify(gpu: Gpu | None, tflops: float | None = None, given: str | None = None) -> Card:
    """The card. `tflops`: what the run achieves, a lower bound on the card's peak; `given`: the user's name for it."""
    total = round(gpu.total_mib) if gpu is not None and gpu.total_mib else None
    if given is not None:
        device = find(given, total)
        return Card(device, "given", f"--gpu {given}", doubt=_doubt(device, gpu))
    if gpu is None:
        return Card(None, None, "nothing names the card")
    if gpu.name is not None:
        try:
            found = find(gpu.name, total)
            form = _FORM.search(gpu.name)
            if form is None or form[0].upper() in found.name.upper():
                return Card(found, "read", f"named {gpu.name}")
        except InputError:
            pass  # a truncated name, or a card not in the catalogue: try its memory
    if not gpu.nvidia:  # the catalogue has too few others to tell them apart by memory
        return Card(None, None, "nothing names the card", stand_in=_of_size(gpu))
    fitting, reason = _by_memory(gpu)
    if gpu.name is not None:
        words = gpu.name.lower().removeprefix("nvidia ").rstrip("…. ")
        alike = [device for device in fitting if words in device.name.lower()]
        if not alike and words not in NAMELESS:
            return Card(None, None, f"named {gpu.name}", stand_in=_of_size(gpu))
        fitting = alike or fitting
    if gpu.limit_watts is not None and (limited := [d for d in fitting if d.watts == gpu.limit_watts]):
        fitting, reason = limited, f"{reason} and a power limit of {gpu.limit_watts:.0f} W"
    if tflops is not None and (able := [d for d in fitting if (d.tflops_fp16 or 0.0) >= 0.97 * tflops]):
        fitting = able
    if len(fitting) == 1:
        return Card(fitting[0], "inferred", f"the only card with {reason}")
    names = tuple(device.name for device in fitting)
    if gpu.total_mib is None and gpu.torch_total_mib is None:
        return Card(None, None, "neither its name nor its memory is told")
    where = f"several cards have {reason}" if names else f"no known card has {reason}"
    return Card(None, None, where, names, stand_in=_of_size(gpu))


def _of_size(gpu: Gpu) -> Device | None:
    """A card of that memory. torch's total is what one process can use."""
    if gpu.torch_total_mib is not None:
        device = custom(None, mib=gpu.torch_total_mib)
        name = f"a card with {gpu.torch_total_mib / 1024:.1f} GiB"
        return msgspec.structs.replace(device, name=name, usable_mib=round(gpu.torch_total_mib))
    if gpu.total_mib is not None and gpu.total_mib >= LEAST_MIB:
        return msgspec.structs.replace(
            custom(None, mib=gpu.total_mib), name=f"a card with {gpu.total_mib / 1024:.1f} GiB"
        )
    return None


def _doubt(device: Device, gpu: Gpu | None) -> str | None:
    """Why the given card cannot be the one in the log; None if it can."""
    if gpu is None or device.kind != "cuda":
        return None
    if gpu.name is not None:
        try:
            named = find(gpu.name, round(gpu.total_mib) if gpu.total_mib else None)
        except InputError:
            named = device
        if named.name != device.name:
            return f"the log names a {named.name}"
    if gpu.torch_total_mib is not None and not _shows(device, gpu.torch_total_mib):
        fitting, _ = _by_memory(gpu)
        others = f", as a card of {round(fitting[0].memory_mib / 1024)} GB has" if fitting else ""
        return (
            f"the out-of-memory message says {gpu.torch_total_mib / 1024:.2f} GiB in total{others}; a {device.name} "
            f"has {device.usable_mib / 1024:.2f} for torch"
        )
    return None


def _shows(device: Device, torch_mib: float) -> bool:
    """Whether torch could print this total on the card: it lies between the usable and the whole memory."""
    return device.usable_mib * (1 - TORCH_TOTAL) <= torch_mib <= device.memory_mib + SAME_MIB


def _by_memory(gpu: Gpu) -> tuple[list[Device], str]:
    cards = [device for device in all_devices() if device.kind == "cuda"]
    if gpu.total_mib is not None:
        less = {device.name: device.memory_mib - gpu.total_mib for device in cards}
        fitting = [device for device in cards if abs(less[device.name]) <= SAME_MIB]
        old = [device for device in cards if 0 <= less[device.name] <= OLD_DRIVER * device.memory_mib]
        return fitting or old, f"{gpu.total_mib:.0f} MiB"
    if gpu.torch_total_mib is not None:
        total = gpu.torch_total_mib
        return [device for device in cards if _shows(device, total)], f"about {total / 1024:.2f} GiB for torch"
    return [], "an unknown memory"
