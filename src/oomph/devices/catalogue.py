"""Reads `catalogue.txt`, the one table of devices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import cast

from oomph.devices.device import Device, Kind, context_by_rule, usable_by_rule

TABLE = Path(__file__).with_name("catalogue.txt")


@cache
def all_devices() -> tuple[Device, ...]:
    """Every device of the catalogue: by maker and generation, then class, then speed or memory."""
    return tuple(parse(TABLE.read_text(encoding="utf-8")))


def parse(text: str) -> Iterator[Device]:
    """The devices of a table in the catalogue's format."""
    section: tuple[str, str, str, str] | None = None
    figures: list[str] = []
    details: dict[str, str] = {}
    for line in [*text.splitlines(), "[end]"]:
        if line.startswith("    "):
            key, _, value = line.strip().partition(": ")
            details[key] = value
        elif line and not line.startswith("#"):
            if figures and section is not None:
                yield from _devices(section, figures, details)
            figures, details = [], {}
            if line.startswith("["):
                rate_class, _, rest = line[1:].partition("]")
                vendor, _, kind_and_arch = rest.partition("#")[0].strip().partition(", ")
                kind, _, arch = kind_and_arch.partition(", ")
                section = (rate_class, vendor, kind, arch)
            else:
                figures = [cell.strip() for cell in line.split("|")]


def _devices(section: tuple[str, str, str, str], figures: list[str], details: dict[str, str]) -> Iterator[Device]:
    """One device, or one for each size where the memory column lists several."""
    rate_class, vendor, kind_text, arch = section
    kind = cast(Kind, kind_text)
    name, capability, sm, mhz, memory, usable, context, *rest = figures
    compute_capability, sm_count = _number(capability), _whole(sm)
    bandwidth, fp16, bf16, tf32, fp32, emulated, low, high, watts, usd_low, usd_high = map(_number, rest)
    sizes = [int(size) for size in memory.split("/")]
    for memory_mib in sizes:
        context_mib, usable_mib = _whole(context), _whole(usable)
        yield Device(
            name=name if len(sizes) == 1 else f"{name} {memory_mib // 1024}GB",
            kind=kind,
            vendor=vendor,
            arch=arch,
            rate_class=rate_class,
            compute_capability=compute_capability,
            sm_count=sm_count,
            boost_mhz=_whole(mhz),
            memory_mib=memory_mib,
            usable_mib=usable_by_rule(memory_mib, kind) if usable_mib is None else usable_mib,
            context_mib=context_by_rule(sm_count, arch, kind) if context_mib is None else context_mib,
            bandwidth_gbs=bandwidth,
            tflops_fp16=fp16,
            tflops_bf16=bf16,
            tflops_tf32=tf32,
            tflops_fp32=fp32,
            bf16_emulated_tflops=emulated,
            gemm_tflops_low=low,
            gemm_tflops_high=high,
            watts=watts,
            usd_per_hour_low=usd_low,
            usd_per_hour_high=usd_high,
            has_bf16=bf16 is not None,
            usual="usual" in details,
            aliases=tuple(details["also"].split("; ")) if "also" in details else (),
            source=details["from"],
            notes=(details["note"],) if "note" in details else (),
        )


def _number(cell: str) -> float | None:
    return None if cell == "-" else float(cell)


def _whole(cell: str) -> int | None:
    return None if cell == "-" else int(cell)
