"""What `oomph check --save` measured on this user's devices: kept in the cache, used by later plans."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec.structs import replace

from oomph.devices.device import Device
from oomph.errors import InputError, Problem
from oomph.files import cache_folder, write_whole

VERSION = 1
PLAN_WITHOUT = "OOMPH_RATIOS"  # if set to 0, plans ignore saved measurements
LOWEST, HIGHEST = 0.2, 5.0  # a ratio outside these is not due to the device


class Ratios(msgspec.Struct, frozen=True, omit_defaults=True):
    """Measurements on one device, against the prediction."""

    date: str  # 2026-11-16
    of: str  # what ran
    torch: str
    time: float | None = None  # measured step over predicted step
    context_mib: float | None = None  # taken beyond the predicted tensors and the optimizer's imports
    watts: float | None = None  # the card's draw


class _File(msgspec.Struct, frozen=True):
    version: int
    devices: dict[str, Ratios]


def ratios_file() -> Path:
    """The file that holds the ratios of all devices."""
    return cache_folder() / "ratios.json"


def load() -> dict[str, Ratios]:
    """The saved ratios by device and kind of run. Raises `InputError` if the file exists and cannot be read."""
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
    return {name: ratios for name, ratios in found.devices.items() if _is_plausible(ratios)}


def save(device: Device, compiled: bool, ratios: Ratios) -> Path:
    """Save the ratios of a compiled or an eager run, replacing earlier ones of its kind; returns the file.

    Raises `InputError` if it cannot be written.
    """
    path, kept = ratios_file(), load()
    kept[_key(device, compiled)] = ratios
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(Problem(str(path.parent), "cannot be made", found=error.strerror)) from None
    write_whole(path, msgspec.json.format(msgspec.json.encode(_File(VERSION, kept)), indent=2) + b"\n")
    return path


def calibrated(device: Device) -> Device:
    """The device with its measured ratios, and a note for each run they came from; unchanged if there are none.

    If only eager or only compiled steps were measured, the ratio is used for both. Context and power are from the
    latest run that measured them.
    """
    if os.environ.get(PLAN_WITHOUT, "") == "0":
        return device
    try:
        kept = load()
    except InputError as error:
        return replace(device, notes=(*device.notes, f"Planned without measured ratios: {error.problems[0]}"))
    runs = {compiled: kept[key] for compiled in (False, True) if (key := _key(device, compiled)) in kept}
    if not runs:
        return device
    times = {compiled: run.time for compiled, run in runs.items() if run.time}
    only = next(iter(times.values()), 1.0)
    changes: dict[str, object] = {"eager_ratio": times.get(False, only), "compiled_ratio": times.get(True, only)}
    for run in sorted(runs.values(), key=lambda run: run.date):
        changes |= {"context_mib": round(run.context_mib)} if run.context_mib is not None else {}
        changes |= {"drawn_watts": run.watts} if run.watts is not None else {}
    notes = [_note(run, "compiled" if compiled else "eager", alone=len(times) == 1) for compiled, run in runs.items()]
    return replace(device, notes=(*device.notes, *notes), **changes)


def _note(run: Ratios, how: str, alone: bool) -> str:
    said = []
    if run.time:
        said.append(f"{how} steps × {run.time:.2f}{', and so the others' if alone else ''}")
    if run.context_mib is not None:
        said.append(f"{run.context_mib:,.0f} MiB beside the tensors")
    if run.watts:
        said.append(f"{run.watts:,.0f} W")
    return (
        f"As measured here on {run.date} with {run.of} (oomph check --save): {'; '.join(said) or 'nothing'}. "
        f"{PLAN_WITHOUT}=0 plans without it"
    )


def _key(device: Device, compiled: bool) -> str:
    """The device's name, for a CPU with its number of threads; compiled runs have a separate key."""
    name = f"{device.name}, {device.threads} threads" if device.kind == "cpu" else device.name
    return f"{name}, compiled" if compiled else name


def _is_plausible(ratios: Ratios) -> bool:
    """Whether the figures are plausible: the file may have been edited."""
    time_is = ratios.time is None or LOWEST <= ratios.time <= HIGHEST
    context_is = ratios.context_mib is None or 0 <= ratios.context_mib < 2**20
    return time_is and context_is and (ratios.watts is None or 0 < ratios.watts < 1e5)


def _damaged(path: Path, found: str) -> Problem:
    return Problem(
        str(path), "is not a file of measured ratios", found=found, allowed="delete it, then oomph check --save"
    )
