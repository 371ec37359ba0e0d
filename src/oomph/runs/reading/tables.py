"""Tables of steps: CSV (Lightning's metrics.csv, exports of W&B and TensorBoard), tabs (a notebook's), Markdown."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable

from oomph.runs.reading.builder import Builder, Record
from oomph.runs.reading.names import quantity, scale
from oomph.runs.reading.patterns import LinePattern

_MISSING = frozenset(("", "nan", "none", "null", "no log", "-", "n/a"))
_RULE = re.compile(r"^[\s|:+=-]+$")
_LETTER = re.compile(r"[A-Za-z]")
MOST_COLUMNS = 512


def header(builder: Builder, line: str) -> bool:
    """Whether the line names the columns of a table of steps; the lines that follow are read by it."""
    separator = _separator(line)
    if separator is None:
        return False
    cells = _cells(line, separator)
    if not 2 <= len(cells) <= MOST_COLUMNS or sum(bool(_LETTER.search(cell)) for cell in cells) < len(cells) - 1:
        return False
    names = [_column(builder, cell) for cell in cells]
    known = {name[0] for name in names if name is not None}
    if not known & {"step", "epoch"} or not known & {"loss", "val_loss", "val_bpb"}:
        return False
    if any(re.search(r"\d", cell) and "__" not in cell and " - " not in cell for cell in cells) and "," not in line:
        return False

    def take(row: str) -> bool:
        return row == line or _row(builder, names, separator, row, take)

    builder.next_lines = take
    return True


def _separator(line: str) -> str | None:
    if "\t" in line:
        return "\t"
    if line.lstrip().startswith("|") and line.count("|") > 2:
        return "|"
    return "," if "," in line else None


def _cells(row: str, separator: str) -> list[str]:
    if separator == "|":
        row = row.strip().strip("|")
    cells = next(csv.reader([row]), []) if separator == "," else row.split(separator)
    return [cell.strip() for cell in cells]


def _column(builder: Builder, cell: str) -> tuple[str, int, str, str] | None:
    """What a column holds: "run-7 - train/loss" of W&B, and TensorBoard's "Value" by its file's name."""
    if cell.endswith(("__MIN", "__MAX")):
        return None
    if cell == "Value":
        file = builder.source.name.lower()
        return ("val_loss" if "val" in file else "loss", 0, "loss", "") if "loss" in file else None
    return quantity(cell.rpartition(" - ")[2])


def _row(
    builder: Builder,
    names: list[tuple[str, int, str, str] | None],
    separator: str,
    line: str,
    below: Callable[[str], bool],
) -> bool:
    cells = _cells(line, separator)
    if len(cells) != len(names):
        if not line.strip():
            builder.next_lines = None
        return False
    if _RULE.match(line):
        return True
    record: Record = {}
    chosen: dict[str, tuple[int, int, float]] = {}  # rank, place and factor of each quantity
    for place, (name, cell) in enumerate(zip(names, cells, strict=True)):
        if name is None or cell.lower() in _MISSING - {"nan"}:
            continue
        what, rank, printed, unit = name
        value = _number(cell)
        if value is None:
            return False
        factor = scale(printed, what, unit, value, spelled=True)
        if factor is None or (what in record and chosen[what][0] <= rank):
            continue
        record[what], chosen[what] = value * factor, (rank, place, factor)
    if not record.keys() & {"loss", "val_loss", "val_bpb"}:
        return True
    if "loss" in record and "val_loss" in record:  # as in every row of a notebook's table
        builder.evaluation(_place(builder, record), val_loss=record.pop("val_loss"))
        builder.record(record)
    elif row := builder.record(record):
        columns = {place: (what, factor) for what, (_, place, factor) in chosen.items() if what in row}
        if separator != "|" and line.count(separator) == len(names) - 1:
            builder.learn(LinePattern.of_cells(line, separator, columns, below))
    return True


def _place(builder: Builder, record: Record) -> float:
    step = record.get("step", record.get("epoch", 0.0))
    return step if math.isfinite(step) else builder.run.steps.last_key or 0.0


def _number(cell: str) -> float | None:
    try:
        return float(cell.replace(",", "").rstrip("%"))
    except ValueError:
        return None
