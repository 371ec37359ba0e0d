"""What `oomph check --save` found out about a device of this user: kept in the cache, used by later plans."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec.structs import replace

from oomph.devices.device import Device
from oomph.devices.rates import cache_folder
from oomph.errors import InputError, Problem

VERSION = 1
PLAN_WITHOUT = "OOMPH_RATIOS"  # set to 0, plans are made without what was measured
LOWEST, HIGHEST = 0.2, 5.0  # a step that is farther off than this was not held up by the device


class Ratios(msgspec.Struct, frozen=True, omit_defaults=True):
    """Measured on one device."""

    date: str  # 2026-11-16
    of: str  # what ran
    torch: str
    eager: float | None = None  # measured step over predicted step
    compiled: float | None = None  # the same under torch.compile
    context_mib: float | None = None  # what the process took beyond its predicted tensors and its optimizer's imports
    watts: float | None = None  # the card's draw


class _File(msgspec.Struct, frozen=True):
    version: int
    devices: dict[str, Ratios]


def ratios_file() -> Path:
    """Where the ratios of all devices are kept."""
    return cache_folder() / "ratios.json"


def load() -> dict[str, Ratios]:
    """What is kept, by device. Raises `InputError` where the file is there and cannot be read."""
    path = ratios_file()
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(Problem(str(path), "cannot be read", found=error.strerror or str(error))) from None
    try:
        found = msgspec.json.decode(content, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(_damaged(path, str(error))) from None
    if found.version != VERSION:
        raise InputError(_damaged(path, f"version {found.version}"))
    return {name: ratios for name, ratios in found.devices.items() if _sound(ratios)}


def save(device: Device, ratios: Ratios) -> Path:
    """Keep the device's ratios in place of earlier ones; where they are kept. Raises `InputError` where it cannot.

    An eager run says nothing of a compiled one: the ratio of the kind that did not run stays as it was.
    """
    from oomph.files import write_whole

    path, kept = ratios_file(), load()
    if (earlier := kept.get(_key(device))) is not None:
        eager, compiled = ratios.eager or earlier.eager, ratios.compiled or earlier.compiled
        ratios = replace(ratios, eager=eager, compiled=compiled)
    kept[_key(device)] = ratios
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(Problem(str(path.parent), "cannot be made", found=error.strerror)) from None
    write_whole(path, msgspec.json.format(msgspec.json.encode(_File(VERSION, kept)), indent=2) + b"\n")
    return path


def calibrated(device: Device) -> Device:
    """The device as it was measured here, with a note that says so; unchanged where nobody measured it.

    Where only eager steps were measured, or only compiled ones, the others are taken to be as far off.
    """
    if os.environ.get(PLAN_WITHOUT, "") == "0":
        return device
    try:
        ratios = load().get(_key(device))
    except InputError as error:
        return replace(device, notes=(*device.notes, f"Planned without measured ratios: {error.problems[0]}"))
    if ratios is None:
        return device
    eager, compiled = ratios.eager or ratios.compiled or 1.0, ratios.compiled or ratios.eager or 1.0
    changes: dict[str, object] = {
        "eager_ratio": eager, "compiled_ratio": compiled, "drawn_watts": ratios.watts
    }  # fmt: skip
    times = {"eager": ratios.eager, "compiled": ratios.compiled}
    said = [f"{how} steps × {ratio:.2f}" for how, ratio in times.items() if ratio]
    if ratios.context_mib is not None:
        changes["context_mib"] = round(ratios.context_mib)
        said.append(f"{ratios.context_mib:,.0f} MiB beside the tensors")
    if ratios.watts:
        said.append(f"{ratios.watts:,.0f} W")
    note = (
        f"As measured here on {ratios.date} with {ratios.of} (oomph check --save): {', '.join(said)}. "
        f"{PLAN_WITHOUT}=0 plans without it"
    )
    return replace(device, notes=(*device.notes, note), **changes)


def _key(device: Device) -> str:
    """A card by its name; a CPU by its threads too, which make it another device."""
    return f"{device.name}, {device.threads} threads" if device.kind == "cpu" else device.name


def _sound(ratios: Ratios) -> bool:
    """Whether the figures can be: a file that somebody edited must not make a plan of nothing."""
    times_are = all(ratio is None or LOWEST <= ratio <= HIGHEST for ratio in (ratios.eager, ratios.compiled))
    context_is = ratios.context_mib is None or 0 <= ratios.context_mib < 2**20
    return times_are and context_is and (ratios.watts is None or 0 < ratios.watts < 1e5)


def _damaged(path: Path, found: str) -> Problem:
    return Problem(
        str(path), "is no file of measured ratios", found=found, allowed="delete it, then oomph check --save"
    )
