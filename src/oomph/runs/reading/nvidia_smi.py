"""nvidia-smi: its default output with the process table, and CSV from `--query-gpu` and `--query-compute-apps`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from oomph.runs.reading.builder import Builder

_NAME_ROW = re.compile(r"\|\s+(\d{1,3})\s+(\S.{1,60}?)\s+(?:On|Off|N/A|WDDM|TCC|MCDM|ERR!)?\s*\|\s+[0-9A-Fa-f]{4,8}:")
_USE_ROW = re.compile(r"(\d{1,8})\s?MiB\s*/\s*(\d{1,8})\s?MiB")
_MIG_ROW = re.compile(r"\|\s+\d+\s+\d+\s+\d+\s+\d+\s+\|")
_UTILIZATION = re.compile(r"\|\s*(\d{1,3})%\s+(?:Default|Exclusive|E\.|Prohibited|N/A)")
_WATTS = re.compile(r"(\d{1,4})W\s*/\s*(\d{1,4})W")
_CELSIUS = re.compile(r"\s(\d{1,3})C\s")
_PROCESS_ROW = re.compile(
    r"\|\s+(\d{1,3})\s+(?:(?:N/A|\d+)\s+(?:N/A|\d+)\s+)?(\d{1,10})\s+[CGM](?:\+[CG])?\s+(\S.{0,200}?)\s+(\d{1,8})MiB\s*\|"
)
_CELL = re.compile(r"^(\d+(?:\.\d+)?)\s*(MiB|%|W)?$")
_CARD = re.compile(r"NVIDIA|GeForce|Quadro|Tesla|RTX|GTX|TITAN", re.I)


def name_row(builder: Builder, line: str) -> None:
    """A card's first line: its index and name."""
    match = _NAME_ROW.search(line)
    if match is None:
        return
    index = int(match[1])
    builder.gpu_row = index
    gpu = builder.gpu(index)
    name = match[2].rstrip(". ")
    if gpu.name is None or len(name) > len(gpu.name):  # old versions truncate the name
        gpu.name = name


def use_row(builder: Builder, line: str) -> None:
    """A card's second line, or the line of a process."""
    if match := _PROCESS_ROW.search(line):
        builder.process(int(match[2]), match[3], int(match[1]), float(match[4]))
        return
    match = _USE_ROW.search(line)
    if match is None or _MIG_ROW.search(line):
        return
    if builder.gpu_row is None and "|" in line:
        return  # the BAR1 line of a MIG device
    index = builder.gpu_row or 0
    builder.gpu_row = None
    found = {"utilization_percent": _UTILIZATION, "watts": _WATTS, "celsius": _CELSIUS}
    more = {name: float(hit[1]) for name, pattern in found.items() if (hit := pattern.search(line))}
    if power := _WATTS.search(line):
        builder.gpu(index).limit_watts = float(power[2])
    _reading(builder, index, float(match[1]), float(match[2]), more)


def _reading(builder: Builder, index: int, used: float | None, total: float | None, more: dict[str, float]) -> None:
    gpu = builder.gpu(index)
    if total is not None:
        gpu.total_mib = total
    if used is not None:
        more["used_mib"] = used
    if more:
        gpu.readings.append(reading=gpu.readings.count, **more)


# --- comma-separated rows ------------------------------------------------------------------------

_GPU_COLUMNS = {
    "memory.used": "used_mib",
    "utilization.gpu": "utilization_percent",
    "power.draw": "watts",
    "power.draw.instant": "watts",
    "temperature.gpu": "celsius",
}
_USED_BY_PROCESS = ("used_memory", "used_gpu_memory")


def header(builder: Builder, line: str) -> None:
    """The first line of `nvidia-smi --query-… --format=csv`: the names of the columns."""
    names = [cell.strip().split(" ")[0] for cell in line.split(",")]
    if "pid" in names and any(name in names for name in _USED_BY_PROCESS):
        builder.next_lines = lambda row: _process_cells(builder, names, _cells(row))
    elif "memory.used" in names or "memory.total" in names:
        builder.next_lines = lambda row: _gpu_cells(builder, names, _cells(row))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


def _number(cell: str) -> float | None:
    match = _CELL.match(cell)
    return float(match[1]) if match else None


def _gpu_cells(builder: Builder, names: Sequence[str], cells: Sequence[str]) -> bool:
    """Read a row of --query-gpu; False if the line is not one, as other output may be in between."""
    if len(cells) != len(names):
        return False
    row = dict(zip(names, cells, strict=True))
    numbers = {name: number for name, cell in row.items() if (number := _number(cell)) is not None}
    if not numbers.keys() & {"memory.used", "memory.total", "memory.free"}:
        return False
    index = int(numbers.get("index", 0))
    if "name" in row:
        builder.gpu(index).name = row["name"][:80]
    more = {column: numbers[name] for name, column in _GPU_COLUMNS.items() if name in numbers}
    total, used = numbers.get("memory.total"), more.pop("used_mib", None)
    if used is None and total is not None and "memory.free" in numbers:
        used = total - numbers["memory.free"]
    _reading(builder, index, used, total, more)
    return True


def _process_cells(builder: Builder, names: Sequence[str], cells: Sequence[str]) -> bool:
    if len(cells) != len(names):
        return False
    row = dict(zip(names, cells, strict=True))
    pid = _number(row["pid"])
    mib = next((_number(row[name]) for name in _USED_BY_PROCESS if name in row), None)
    if pid is None or mib is None:
        return False
    builder.process(int(pid), row.get("process_name", row.get("name", "?"))[:200], 0, mib)
    return True


def bare_row(builder: Builder, line: str) -> None:
    """A row printed with `noheader`: units and sizes tell what each cell is."""
    cells = _cells(line)
    sizes = [number for cell in cells if cell.endswith("MiB") and (number := _number(cell)) is not None]
    if not sizes or len(sizes) + cells.count("[N/A]") + 1 > 12:
        return
    texts = [cell for cell in cells if _number(cell) is None and not cell.startswith("[")]
    card = next((cell for cell in texts if _CARD.search(cell)), None)
    if len(sizes) == 1 and card is None:
        if len(cells) == 3 and cells[0].isdigit() and len(cells[0]) <= 10:
            builder.process(int(cells[0]), cells[1][:200], 0, sizes[0])
        return
    index = int(cells[0]) if cells[0].isdigit() and len(cells[0]) <= 3 else 0
    if card is not None:
        builder.gpu(index).name = card[:80]
    total = max(sizes) if len(sizes) > 1 else None
    used = next((size for size in sizes if size != total), sizes[0])
    more = {}
    for column, unit in (("utilization_percent", "%"), ("watts", "W")):
        number = next((_number(cell) for cell in cells if cell.endswith(unit)), None)
        if number is not None:
            more[column] = number
    _reading(builder, index, used, total, more)


READERS = (
    ("|", name_row),
    ("MiB", use_row),
    ("MiB", bare_row),
    ("memory.", header),
    ("used_", header),
)
