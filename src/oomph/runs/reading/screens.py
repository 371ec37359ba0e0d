"""Output of tools for cards: nvidia-smi (table, -L, --query-… as CSV, dmon, pmon), gpustat, nvitop."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress

from oomph.runs.reading.builder import Builder
from oomph.runs.reading.patterns import Columns, LinePattern, Span
from oomph.runs.run import GPU_COLUMNS, Gpu

_NAME_ROW = re.compile(r"\|\s+(\d{1,3})\s+(\S.{1,60}?)\s+(On|Off|N/A|WDDM|TCC|MCDM|ERR!)?\s*\|\s+[0-9A-Fa-f]{4,8}:")
_USE_ROW = re.compile(r"(\d{1,8}(?:\.\d{1,3})?)\s?([MG])iB\s*/\s*(\d{1,8}(?:\.\d{1,3})?)\s?([MG])iB")
_MIG_ROW = re.compile(r"\|\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)\s+\|\s*(\d+)MiB\s*/\s*(\d+)MiB")
_UTILIZATION = re.compile(r"\|\s*(\d{1,3})%\s+(?:Default|Exclusive|E\.|Prohibited|N/A)")
_WATTS = re.compile(r"(\d{1,4})W\s*/\s*(?:(\d{1,4})W|N/A)")
_CELSIUS = re.compile(r"\s(\d{1,3})C\s")
_PROCESS_ROW = re.compile(
    r"\|\s+(\d{1,3})\s+(?:(?:N/A|\d+)\s+(?:N/A|\d+)\s+)?(\d{1,10})\s+([CGM](?:\+[CG])?)\s+(\S.{0,200}?)\s+"
    r"(?:(\d{1,8})MiB|N/A)\s*\|"
)
_NVITOP_PROCESS = re.compile(
    r"\|\s+(\d{1,3})\s+(\d{1,10})\s+([CGX])\s+(\S+)\s+([\d.]{1,9})([MG])iB\s+.*?\s(\S.{0,80}?)\s*\|\s*$"
)
_CELL = re.compile(r"^(\d+(?:\.\d+)?)\s*(MiB|%|W|MHz|C)?$")
_CARD = re.compile(r"NVIDIA|GeForce|Quadro|Tesla|RTX|GTX|TITAN|[AHLV]\d{2,3}\b", re.I)
_LISTED = re.compile(r"^\s*GPU (\d{1,3}): (\S.{2,60}?) \(UUID: ")
NOT_TOLD = math.nan


def table_row(builder: Builder, line: str) -> None:
    """A line of nvidia-smi's or nvitop's table: a card's first or second line, a process, a slice of a card."""
    line = line.replace("│", "|").replace("║", "|")
    row = line[max(0, line.find("|")) :]
    if match := _NAME_ROW.match(row):
        builder.gpu_row, builder.gpu_line = int(match[1]), row
        gpu = builder.gpu(int(match[1]))
        gpu.windows = match[3] in ("WDDM", "MCDM")
        name = match[2].rstrip(". ")
        if match[2].endswith("...") and not re.search(r"\d", name):
            name += " …"  # cut off before the part that identifies the card
        if gpu.name is None or len(name) > len(gpu.name):  # old versions truncate the name
            gpu.name = name
    elif match := _PROCESS_ROW.match(row):
        mib = float(match[5]) if match[5] else NOT_TOLD
        builder.process(int(match[2]), match[4], int(match[1]), mib, match[3])
        if match[5] and line == row:
            _learn_process(builder, row, match)
    elif match := _MIG_ROW.match(row):
        gpu = builder.gpu(int(match[1]))
        gpu.mig = True
        builder.event("slice", f"slice {match[4]} of GPU {match[1]}: {int(match[5]):,} of {int(match[6]):,} MiB in use")
    elif (match := _NVITOP_PROCESS.match(row)) and "│" not in match[7]:
        builder.process(int(match[2]), match[7], int(match[1]), _mib(match[5], match[6]), match[3])
    else:
        _use_row(builder, line)


def _use_row(builder: Builder, line: str) -> None:
    match = _USE_ROW.search(line)
    patterns = {"utilization_percent": _UTILIZATION, "watts": _WATTS, "celsius": _CELSIUS}
    hits = {name: hit for name, pattern in patterns.items() if (hit := pattern.search(line))}
    more = {name: float(hit[1]) for name, hit in hits.items()}
    alone = match is not None and match[0] == line.strip()
    if match is None and builder.gpu_row is not None and "utilization_percent" in more:  # "Not Supported"
        reading(builder, builder.gpu_row, None, None, more)
        builder.gpu_row = None
    if match is None or (builder.gpu_row is None and not alone):  # a slice's BAR1 line, or another program's
        return
    index, builder.gpu_row = builder.gpu_row or 0, None
    gpu = builder.gpu(index)
    if (power := hits.get("watts")) is not None and power[2]:
        gpu.limit_watts = float(power[2])
    reading(builder, index, _mib(match[1], match[2]), _mib(match[3], match[4]), more)
    name_row = _NAME_ROW.match(builder.gpu_line)
    if name_row is None or match[2] + match[4] != "MM" or not line.startswith("|"):
        return
    begin = len(builder.gpu_line) + 1
    spans = {(begin + hit.start(1), begin + hit.end(1)): name for name, hit in (*hits.items(), ("used_mib", match))}
    fixed = [name_row.span(2), (begin + match.start(3), begin + match.end(3))]
    if power is not None and power[2]:
        fixed.append((begin + power.start(2), begin + power.end(2)))
    _learn_card(builder, f"{builder.gpu_line}\n{line}", {name_row.span(1): "index"} | spans, fixed, gpu)


def _learn_card(builder: Builder, text: str, spans: dict[Span, str], fixed: list[Span], seen: Gpu) -> None:
    """Read the lines of cards that differ from these in numbers alone many at a time: cards of this kind."""
    builder.learn_screen(LinePattern.of_screen(text, spans, fixed, partial(add_readings, builder, seen)))


def _learn_process(builder: Builder, row: str, match: re.Match[str]) -> None:
    """Read the rows of processes with this name many at a time."""
    spans = {match.span(1): "gpu", match.span(2): "pid", match.span(5): "mib"}
    name, kind = match[4], match[3]

    def rows(found: Columns) -> None:
        for gpu, pid, mib in dict.fromkeys(zip(found["gpu"], found["pid"], found["mib"], strict=True)):
            builder.process(int(pid), name, int(gpu), mib, kind)

    builder.learn_screen(LinePattern.of_screen(row, spans, [match.span(4)], rows))


def add_readings(builder: Builder, seen: Gpu, found: Columns) -> None:
    """Add many readings of the cards that "index" tells, which are like the one seen, else of that one."""
    cards = found.pop("index", None)
    for index in [seen.index] if cards is None else map(int, dict.fromkeys(cards)):
        gpu, values = builder.gpu(index), found
        gpu.name = gpu.name or seen.name
        gpu.total_mib, gpu.limit_watts = seen.total_mib or gpu.total_mib, seen.limit_watts or gpu.limit_watts
        gpu.nvidia, gpu.windows = seen.nvidia, seen.windows
        if cards is not None and cards.count(index) < len(cards):
            of_card = list(map(float(index).__eq__, cards))
            values = {name: list(compress(each, of_card)) for name, each in found.items()}
        readings = gpu.readings
        first, count = readings.count, len(next(iter(values.values())))
        readings.extend({"reading": [float(first + n) for n in range(count)], **values})


def _mib(number: str, unit: str) -> float:
    return float(number) * (1024.0 if unit == "G" else 1.0)


def reading(builder: Builder, index: int, used: float | None, total: float | None, more: dict[str, float]) -> None:
    """Add one reading of one card."""
    gpu = builder.gpu(index)
    if total is not None:
        gpu.total_mib = total
    if used is not None:
        more["used_mib"] = used
    if more:
        gpu.readings.append(reading=gpu.readings.count, **more)


def listed(builder: Builder, line: str) -> None:
    """nvidia-smi -L: "GPU 0: NVIDIA A100-SXM4-40GB (UUID: …"."""
    if match := _LISTED.match(line):
        builder.gpu(int(match[1])).name = match[2]


# --- comma-separated rows, dmon, pmon ----------------------------------------------------------------

_COLUMNS = {
    "memory.used": "used_mib",
    "utilization.gpu": "utilization_percent",
    "temperature.gpu": "celsius",
    "power.draw": "watts",
    "power.draw.instant": "watts",
    "power.draw.average": "watts",
    "clocks.sm": "clock_mhz",
    "clocks.current.sm": "clock_mhz",
    "clocks.gr": "clock_mhz",
}
_FIXED = ("name", "gpu_name", "memory.total", "power.limit", "uuid", "gpu_uuid", "serial", "pci.bus_id")
_USED_BY_PROCESS = ("used_memory", "used_gpu_memory")
_DMON = {
    "pwr": "watts",
    "gtemp": "celsius",
    "temp": "celsius",
    "sm": "utilization_percent",
    "pclk": "clock_mhz",
    "fb": "used_mib",
}


# Columns of Intel's `xpu-smi dump`, and nvidia-smi's names for them.
_XPU = {
    "DeviceId": "index",
    "GPU Utilization (%)": "utilization.gpu",
    "GPU Memory Used (MiB)": "memory.used",
    "GPU Power (W)": "power.draw",
    "GPU Frequency (MHz)": "clocks.sm",
    "GPU Core Temperature (Celsius Degree)": "temperature.gpu",
}


def header(builder: Builder, line: str) -> None:
    """The first line of `nvidia-smi --query-… --format=csv`: the names of the columns."""
    names = [_XPU.get(cell.strip(), cell.strip().split(" ")[0]) for cell in line.split(",")]
    if "pid" in names and any(name in names for name in _USED_BY_PROCESS):
        builder.next_lines = lambda row: _process_cells(builder, names, _cells(row))
    elif len(names) > 1 and any(name.partition(".")[0] in ("memory", "utilization", "power") for name in names):

        def take(row: str) -> bool:
            if row == line:  # printed again
                return True
            index = _gpu_cells(builder, names, _cells(row))
            if index is not None:
                builder.gpu(index).nvidia = "DeviceId" not in line
                _learn_row(builder, index, [_COLUMNS.get(name, name) for name in names], row, ",", take)
            return index is not None

        builder.next_lines = take


def _learn_row(
    builder: Builder, index: int, names: Sequence[str], row: str, separator: str, below: Callable[[str], bool]
) -> None:
    """Read following rows of the same form many at a time; cells that do not change keep their values."""
    cells = re.split(separator, row)
    told = [place for place, name in enumerate(names) if name in (*GPU_COLUMNS, "index")]
    told = [place for place in told if _number(cells[place].strip()) is not None]
    columns = {names[place]: place for place in reversed(told)}
    if "used_mib" not in columns and "memory.free" in names:
        return
    fixed = [place for place, name in enumerate(names) if name in _FIXED]

    places = {place: (name, 1.0) for name, place in columns.items()}
    if columns.keys() - {"index"}:
        add = partial(add_readings, builder, builder.gpu(index))
        builder.learn(LinePattern.of_cells(row, separator, places, below, add, fixed))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


def _number(cell: str) -> float | None:
    match = _CELL.match(cell)
    return float(match[1]) if match else None


def _gpu_cells(builder: Builder, names: Sequence[str], cells: Sequence[str]) -> int | None:
    """Read a row of --query-gpu; returns its card's index, or None if the line is other output in between."""
    if len(cells) != len(names):
        return None
    row = dict(zip(names, cells, strict=True))
    numbers = {name: number for name, cell in row.items() if (number := _number(cell)) is not None}
    if not numbers.keys() & {"memory.used", "memory.total", "memory.free", *_COLUMNS}:
        return None
    name = row.get("name", row.get("gpu_name", ""))[:80]
    index = int(numbers["index"]) if "index" in numbers else _index_of(builder, name)
    if name:
        builder.gpu(index).name = name
    if "power.limit" in numbers:
        builder.gpu(index).limit_watts = numbers["power.limit"]
    more = {column: numbers[name] for name, column in _COLUMNS.items() if name in numbers}
    total, used = numbers.get("memory.total"), more.pop("used_mib", None)
    if used is None and total is not None and "memory.free" in numbers:
        used = total - numbers["memory.free"]
    reading(builder, index, used, total, more)
    return index


def _index_of(builder: Builder, name: str) -> int:
    """The card with that name, if rows have no index. Cards with the same name cannot be told apart."""
    named = [gpu.index for gpu in builder.run.gpus.values() if gpu.name == name or gpu.name is None]
    return named[0] if named else max(builder.run.gpus, default=-1) + 1


def _process_cells(builder: Builder, names: Sequence[str], cells: Sequence[str]) -> bool:
    if len(cells) != len(names):
        return False
    row = dict(zip(names, cells, strict=True))
    pid = _number(row["pid"])
    if pid is None:
        return False
    mib = next((_number(row[name]) for name in _USED_BY_PROCESS if name in row), None)
    name = row.get("process_name", row.get("name", "?"))[:200]
    builder.process(int(pid), name, 0, NOT_TOLD if mib is None else mib)
    return True


def bare_row(builder: Builder, line: str) -> None:
    """A row printed with `noheader`: units and magnitudes identify the cells."""
    if "|" in line or ":" in line.partition(",")[0]:
        return
    cells = _cells(line)
    sizes = [number for cell in cells if cell.endswith("MiB") and (number := _number(cell)) is not None]
    if not sizes or len(cells) > 16:
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
    reading(builder, index, used, total, more)


_CLOCKED = ("date", "time")  # columns of -o DT, before the card's index


def dmon(builder: Builder, line: str) -> None:
    """`nvidia-smi dmon` and `pmon`: columns under "# gpu …", or "#Time gpu …"."""
    names = line.lstrip("# ").lower().split()
    place = next((place for place, name in enumerate(names) if name not in _CLOCKED), 0)
    if not line.lstrip().startswith("#") or not names or names[place] != "gpu":
        return

    def take(row: str) -> bool:
        cells = row.split()
        if row == line:  # printed again
            return True
        if row.lstrip().startswith("#") or len(cells) < len(names) or not cells[place].isdigit():
            return row.lstrip().startswith("#") and "Idx" in row
        found = dict(zip(names, cells, strict=False))
        index = int(cells[place])
        if "pid" in found:
            builder.event("processes", "pmon")
            if found["pid"].isdigit():
                fb = found.get("fb", "-")
                mib = float(fb) if fb.isdigit() else NOT_TOLD
                builder.process(int(found["pid"]), found.get("command", "?"), index, mib, found.get("type", "C"))
            return True
        more = {_DMON[name]: float(cell) for name, cell in found.items() if name in _DMON and _number(cell) is not None}
        reading(builder, index, more.pop("used_mib", None), None, more)
        if len(cells) == len(names):
            columns = ["", *("index" if name == "gpu" else _DMON.get(name, name) for name in names)]
            _learn_row(builder, index, columns[not row.startswith(" ") :], row, r"[ \t]+", take)
        return True

    builder.next_lines = take


# --- gpustat -------------------------------------------------------------------------------

_GPUSTAT = re.compile(
    r"\[(\d{1,3})\]\s+(\S.{1,60}?)\s*\|\s*(\d+)\s*['°]C(?:,\s*\d+ ?%)??,\s*(\d+|\?+)\s*%"
    r"(?:,\s*(\d+|\?+) / (\d+|\?+) W)?\s*\|\s*(\d+)\s*/\s*(\d+) MB(?:\s*\|\s*(.*))?"
)
_GPUSTAT_PROCESS = re.compile(r"([\w.-]+)(?::([\w.+-]+))?(?:/(\d+))?\((\d+|\?)M\)")  # user:command/pid, in part


def gpustat(builder: Builder, line: str) -> None:
    """A card's line of gpustat, with its processes by user."""
    line = line.replace("│", "|")
    match = _GPUSTAT.search(line)
    if match is None:
        return
    index = int(match[1])
    gpu = builder.gpu(index)
    gpu.name = match[2]
    if match[6] and match[6].isdigit():
        gpu.limit_watts = float(match[6])
    more = {"celsius": float(match[3])}
    more |= {
        name: float(text)
        for name, text in (("utilization_percent", match[4]), ("watts", match[5]))
        if text and text.isdigit()
    }
    reading(builder, index, float(match[7]), float(match[8]), more)
    processes = match[9] or ""
    for place, (user, name, pid, mib) in enumerate(_GPUSTAT_PROCESS.findall(processes)):
        number = int(pid) if pid else -(1 + 100 * index + place)  # shown without a pid
        builder.process(
            number, name or (user if pid else f"{user}'s process"), index, NOT_TOLD if mib == "?" else float(mib)
        )
    spans = {match.span(1): "index", match.span(3): "celsius", match.span(7): "used_mib"}
    spans |= {
        match.span(n): name for n, name in ((4, "utilization_percent"), (5, "watts")) if (match[n] or "?")[0] != "?"
    }
    # Who is on the card, and with how much, stays as it is: another list of processes is another shape.
    fixed = [match.span(2), match.span(6), match.span(8), match.span(9)]
    _learn_card(builder, line, spans, fixed, gpu)


READERS: tuple[tuple[str, Callable[[Builder, str], None]], ...] = (
    (".0 ", table_row),  # a bus, after the card's name
    ("iB", table_row),
    (" C ", table_row),  # a process whose memory is not told
    (" G ", table_row),
    ("C+G", table_row),
    ("%  ", table_row),  # a card whose memory is not told
    ("MiB", bare_row),
    ("memory.", header),
    ("used_", header),
    ("utilization.", header),
    ("DeviceId", header),
    ("# gpu", dmon),
    ("#Time", dmon),
    ("#Date", dmon),
    ("(UUID: ", listed),
    (" MB", gpustat),
)
