"""Which card a run was on: by its name, or by what its memory, power limit and speed leave open."""

from __future__ import annotations

import msgspec

from oomph.devices import Device, all_devices, find
from oomph.errors import InputError
from oomph.runs.model import Gpu, How

SAME_MIB = 8  # drivers differ by so much
OLD_DRIVER = 0.025  # of the memory, which drivers before 510 did not show
TORCH_TOTAL = 0.02  # of what torch can use: drivers leave 12002, 11902 or 11837 MiB of the same RTX 4070


class Card(msgspec.Struct, frozen=True):
    """The card, or those it may be."""

    device: Device | None
    how: How | None
    where: str  # the reasoning
    candidates: tuple[str, ...] = ()
    doubt: str | None = None  # what was read that a given card cannot show


def identify(gpu: Gpu | None, tflops: float | None = None, given: str | None = None) -> Card:
    """The card. `tflops` is what the run achieves: no card does more than its peak. `given` is the user's word."""
    total = round(gpu.total_mib) if gpu is not None and gpu.total_mib else None
    if given is not None:
        device = find(given, total)
        return Card(device, "given", f"--gpu {given}", doubt=_doubt(device, gpu))
    if gpu is None:
        return Card(None, None, "nothing names the card: give it with --gpu")
    if gpu.name is not None:
        try:
            return Card(find(gpu.name, total), "read", f"named {gpu.name}")
        except InputError:
            pass  # a name cut short, or a card that the catalogue lacks: its memory may still tell
    fitting, reason = _by_memory(gpu)
    if gpu.name is not None:
        words = gpu.name.lower().removeprefix("nvidia ").rstrip(". ")
        fitting = [device for device in fitting if words in device.name.lower()] or fitting
    if gpu.limit_watts is not None and (limited := [d for d in fitting if d.watts == gpu.limit_watts]):
        fitting, reason = limited, f"{reason} and a power limit of {gpu.limit_watts:.0f} W"
    if tflops is not None and (able := [d for d in fitting if (d.tflops_fp16 or 0.0) >= 0.97 * tflops]):
        fitting = able
    if len(fitting) == 1:
        return Card(fitting[0], "inferred", f"the only card with {reason}")
    names = tuple(device.name for device in fitting)
    return Card(None, None, f"several cards have {reason}" if names else f"no known card has {reason}", names)


def _doubt(device: Device, gpu: Gpu | None) -> str | None:
    """Why the card that was given cannot be the one that was seen."""
    if gpu is None or device.kind != "cuda":
        return None
    if gpu.name is not None:
        try:
            named = find(gpu.name, round(gpu.total_mib) if gpu.total_mib else None)
        except InputError:
            named = device
        if named.name != device.name:
            return f"what was read names a {named.name}"
    if gpu.torch_total_mib is not None and not _shows(device, gpu.torch_total_mib):
        fitting, _ = _by_memory(gpu)
        others = f", as cards of {round(fitting[0].memory_mib / 1024)} GB have" if fitting else ""
        return (
            f"the out-of-memory message tells of {gpu.torch_total_mib / 1024:.2f} GiB in all{others}; a {device.name} "
            f"has {device.usable_mib / 1024:.2f} for torch"
        )
    return None


def _shows(device: Device, torch_mib: float) -> bool:
    """Whether torch may print such a total on the card: near the usable figure, or anything from it to the whole."""
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
