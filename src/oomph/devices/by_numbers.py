"""A card described by numbers: one the catalogue does not know, or a known one with other figures."""

from __future__ import annotations

import math

from msgspec.structs import replace

from oomph.devices.device import Device, context_by_rule, usable_by_rule
from oomph.devices.lookup import find, with_memory
from oomph.errors import InputError, Problem

Number = int | float | str
_LIMITS = {  # option: (least, most, unit)
    "mib": (64.0, 64e6, "MiB"),
    "tflops": (1e-3, 1e6, "TFLOPS, dense, half precision"),
    "gbs": (1e-2, 1e6, "GB/s"),
    "watts": (0.1, 1e5, "watts"),
}


def custom(
    name: str | None = None,
    *,
    mib: Number | None = None,
    tflops: Number | None = None,
    gbs: Number | None = None,
    watts: Number | None = None,
    compute_capability: float | None = None,
) -> Device:
    """A device from its memory (MiB), half-precision peak (TFLOPS), bandwidth (GB/s) and power (W).

    With the name of a known card the numbers given replace that card's. What is not given and not
    known stays None, and the predictions that need it are left out.
    """
    problems: list[Problem] = []
    figures = {
        option: _read(option, value, problems)
        for option, value in {"mib": mib, "tflops": tflops, "gbs": gbs, "watts": watts}.items()
    }
    memory = figures["mib"]
    memory_mib = None if memory is None else round(memory)
    base = _known(name, memory_mib, problems)
    if base is None and memory_mib is None and not problems:
        problems.append(Problem("--gpu_mib", "is needed for a card that oomph does not know", allowed=_allowed("mib")))
    if problems:
        raise InputError(problems)
    if base is None:
        base = _blank(name or "custom GPU", memory_mib or 0, compute_capability)
    elif memory_mib is not None:
        base = with_memory(base, memory_mib)
    return _with_figures(base, figures["tflops"], figures["gbs"], figures["watts"])


def _read(option: str, value: Number | None, problems: list[Problem]) -> float | None:
    if value is None:
        return None
    least, most, _ = _LIMITS[option]
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if least <= number <= most:  # false for nan
        return number
    problems.append(Problem(f"--gpu_{option}", "is no such number", found=str(value), allowed=_allowed(option)))
    return None


def _allowed(option: str) -> str:
    least, most, unit = _LIMITS[option]
    return f"{least:g} to {most:g} {unit}"


def _known(name: str | None, memory_mib: int | None, problems: list[Problem]) -> Device | None:
    """The catalogue's card of that name. An unknown name is no problem where the memory is given."""
    if name is None:
        return None
    try:
        return find(name, memory_mib)
    except InputError as error:
        if memory_mib is None:
            problems.extend(error.problems)
        return None


def _blank(name: str, memory_mib: int, compute_capability: float | None) -> Device:
    has_bf16 = compute_capability is None or compute_capability >= 8.0
    notes = () if compute_capability is not None else ("Assumed to have bfloat16 in hardware.",)
    return Device(
        name=name,
        kind="cuda",
        vendor="",
        arch="",
        compute_capability=compute_capability,
        memory_mib=memory_mib,
        usable_mib=usable_by_rule(memory_mib),
        context_mib=context_by_rule(None),
        has_bf16=has_bf16,
        source="given",
        notes=notes,
    )


def _with_figures(device: Device, tflops: float | None, gbs: float | None, watts: float | None) -> Device:
    given = [word for word, value in (("peak", tflops), ("bandwidth", gbs), ("power", watts)) if value is not None]
    if tflops is not None:
        known = device.source != "given"
        device = replace(
            device,
            tflops_fp16=tflops,
            tflops_bf16=tflops if device.has_bf16 else None,
            tflops_tf32=device.tflops_tf32 if known else tflops / 2,
            tflops_fp32=device.tflops_fp32 if known else tflops / 4,
            gemm_tflops_low=None,  # they belong to the peak that was replaced
            gemm_tflops_high=None,
        )
        if not known:
            note = "float32 is taken as a half (TF32) and a quarter of the half-precision peak."
            device = replace(device, notes=(*device.notes, note))
    if gbs is not None:
        device = replace(device, bandwidth_gbs=gbs)
    if watts is not None:
        device = replace(device, watts=watts)
    if given and device.source != "given":
        device = replace(device, source=f"{device.source}; {', '.join(given)} as given")
    return device
