"""`nvidia-smi -q`: everything about each card, in indented lines or as XML (`-x`)."""

from __future__ import annotations

import re
from collections.abc import Callable

from oomph.runs.reading.builder import Builder
from oomph.runs.reading.screens import NOT_TOLD, reading

_QUERY_GPU = re.compile(r"^GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s*$")
_QUERY_ROW = re.compile(r"^ {4,16}(\S.{1,40}?)\s*: (.*)$")
_QUERY_NUMBER = re.compile(r"^(\d+(?:\.\d+)?) (MiB|%|W|C|MHz)$")
_QUERY = {  # (section, name): column
    ("Utilization", "Gpu"): "utilization_percent",
    ("Utilization", "GPU"): "utilization_percent",
    ("Temperature", "GPU Current Temp"): "celsius",
    ("Clocks", "SM"): "clock_mhz",
    ("FB Memory Usage", "Used"): "used_mib",
}
_REASONS = re.compile(r"Clocks (?:Event|Throttle) Reasons")
_SLOWED = re.compile(r"Slowdown|Power Brake|Power Cap")  # other reasons are settings, or nothing to do


def query_card(builder: Builder, line: str) -> None:
    """The first line of a card in `nvidia-smi -q`; the lines below belong to it."""
    if _QUERY_GPU.match(line) is None:
        return
    index = builder.gpu_row = 0 if builder.gpu_row is None else builder.gpu_row + 1
    process: dict[str, str] = {}
    builder.event("query", line)

    def take(below: str) -> bool:
        match = _QUERY_ROW.match(below)
        if match is not None:
            _query_row(builder, index, process, match[1], match[2].strip())
        elif below.strip() and below.startswith(" "):
            builder.gpu_section = below.strip()
        elif below.strip():
            builder.next_lines = None
            return False
        return True

    builder.next_lines = take


def _query_row(builder: Builder, index: int, process: dict[str, str], name: str, value: str) -> None:
    gpu, section = builder.gpu(index), builder.gpu_section
    number = _QUERY_NUMBER.match(value)
    if name == "Product Name":
        gpu.name = value
    elif name == "Performance State":
        builder.event("state", f"GPU {index}: performance state {value}")
    elif _REASONS.match(section) and value == "Active" and _SLOWED.search(name):
        builder.event("slowed", f"GPU {index}: {name}")
    elif name in ("Process ID", "Type", "Name", "Used GPU Memory") and (process or name == "Process ID"):
        process[name] = value
        if name == "Used GPU Memory" and process.get("Process ID", "").isdigit():
            mib = float(number[1]) if number else NOT_TOLD
            builder.process(int(process["Process ID"]), process.get("Name", "?"), index, mib, process.get("Type", "C"))
            process.clear()
    elif number is None:
        return
    elif (section, name) in _QUERY:
        reading(builder, index, None, None, {_QUERY[section, name]: float(number[1])})
    elif section == "FB Memory Usage" and name == "Total":
        gpu.total_mib = float(number[1])
    elif "Power" in section and name in ("Power Draw", "Average Power Draw", "Instantaneous Power Draw"):
        reading(builder, index, None, None, {"watts": float(number[1])})
    elif "Power" in section and name in ("Power Limit", "Current Power Limit"):
        gpu.limit_watts = float(number[1])


# --- as XML ------------------------------------------------------------------------------------------

_TAG = re.compile(r"<(/?)(\w{1,60})(?: [^>]*)?>([^<]*)")
_SECTIONS = {  # element: section of -q
    "utilization": "Utilization",
    "temperature": "Temperature",
    "clocks": "Clocks",
    "fb_memory_usage": "FB Memory Usage",
    "power_readings": "Power Readings",
    "gpu_power_readings": "GPU Power Readings",
}
_ELEMENTS = {
    "product_name": "Product Name",
    "gpu_util": "Gpu",
    "gpu_temp": "GPU Current Temp",
    "sm_clock": "SM",
    "total": "Total",
    "used": "Used",
    "power_draw": "Power Draw",
    "average_power_draw": "Average Power Draw",
    "instant_power_draw": "Instantaneous Power Draw",
    "power_limit": "Power Limit",
    "current_power_limit": "Current Power Limit",
    "pid": "Process ID",
    "type": "Type",
    "process_name": "Name",
    "used_memory": "Used GPU Memory",
}


def xml(builder: Builder, line: str) -> None:
    """A line of `nvidia-smi -q -x`: its elements are the rows of -q."""
    for closing, tag, text in _TAG.findall(line):
        if tag == "gpu" and not closing:
            builder.gpu_row = 0 if builder.gpu_row is None else builder.gpu_row + 1
            builder.process_rows = {}
        elif not closing and not text.strip():
            builder.gpu_section = _SECTIONS.get(tag, "")
        elif not closing and builder.gpu_row is not None and tag in _ELEMENTS:
            _query_row(builder, builder.gpu_row, builder.process_rows, _ELEMENTS[tag], text.strip())


READERS: tuple[tuple[str, Callable[[Builder, str], None]], ...] = (
    ("GPU 0", query_card),
    ("</", xml),
    ("<gpu", xml),
    ("_usage>", xml),
    ("utilization>", xml),
    ("temperature>", xml),
    ("_readings>", xml),
    ("clocks>", xml),
)
