"""What rocm-smi shows of AMD's cards: its table, and its figures one by one."""

from __future__ import annotations

import re
from collections.abc import Callable

from oomph.runs.reading.builder import Builder
from oomph.runs.reading.screens import reading

_ROCM_VALUE = re.compile(r"GPU\[(\d{1,3})\]\s*: (.{3,60}?): (.+?)\s*$")
_ROCM_ROW = re.compile(
    r"^(\d{1,3})\s.*?([\d.]+)(?:°C|c)\s.*?([\d.]+)W\s.*?(?:([\d.]+)W\s+)?(?:(\d+)%|N/A)\s+(\d+)%\s*$"
)
_ROCM_COLUMNS = {"Temp": "celsius", "AvgPwr": "watts", "Power": "watts", "GPU%": "utilization_percent"}


def rocm_table(builder: Builder, line: str) -> None:
    """The heading of rocm-smi's table: "GPU  Temp  AvgPwr  …"; the rows follow."""
    names = re.split(r"\s{2,}", line.strip())
    if names[0] != "GPU" or "AvgPwr" not in names:
        return

    def take(row: str) -> bool:
        cells = re.split(r"\s{2,}", row.strip())
        if len(cells) != len(names) or not cells[0].isdigit():
            return False
        found = dict(zip(names, cells, strict=True))
        numbers = {name: match for name, cell in found.items() if (match := re.match(r"[\d.]+", cell))}
        index = int(cells[0])
        builder.gpu(index).nvidia = False
        if "PwrCap" in numbers:
            builder.gpu(index).limit_watts = float(numbers["PwrCap"][0])
        more = {column: float(numbers[name][0]) for name, column in _ROCM_COLUMNS.items() if name in numbers}
        reading(builder, index, None, None, more)
        if "VRAM%" in numbers:
            builder.event("vram", f"GPU {index}: {numbers['VRAM%'][0]} % of its memory in use")
        return True

    builder.next_lines = take


def rocm(builder: Builder, line: str) -> None:
    """rocm-smi: the table, and "GPU[0] : VRAM Total Used Memory (B): …"."""
    if match := _ROCM_VALUE.search(line):
        _rocm_value(builder, int(match[1]), match[2].strip(), match[3])
    elif match := _ROCM_ROW.match(line):
        index = int(match[1])
        builder.gpu(index).nvidia = False
        more = {"celsius": float(match[2]), "watts": float(match[3]), "utilization_percent": float(match[6])}
        if match[4]:
            builder.gpu(index).limit_watts = float(match[4])
        reading(builder, index, None, None, more)
        if match[5]:
            builder.event("vram", f"GPU {index}: {match[5]} % of its memory in use")


def _rocm_value(builder: Builder, index: int, name: str, value: str) -> None:
    if name in ("Card series", "Card Series", "Device Name") and not value.startswith("0x"):
        builder.gpu(index).name = value
    elif not re.fullmatch(r"\d{1,18}(?:\.\d+)?", value):
        return
    elif name == "VRAM Total Memory (B)":
        builder.gpu(index).total_mib = float(value) / 2**20
    elif name == "VRAM Total Used Memory (B)":
        reading(builder, index, float(value) / 2**20, None, {})
    elif name == "GPU use (%)":
        reading(builder, index, None, None, {"utilization_percent": float(value)})
    elif name.startswith("Temperature") and "edge" in name:
        reading(builder, index, None, None, {"celsius": float(value)})
    else:
        return
    builder.gpu(index).nvidia = False


READERS: tuple[tuple[str, Callable[[Builder, str], None]], ...] = (
    ("AvgPwr", rocm_table),
    ("GPU[", rocm),
    ("W  ", rocm),
)
