"""Rows of numbers as a log gives them: at most a few thousand kept, every one counted.

A log may hold a hundred million steps. A `Series` keeps exact totals of each column (count, sum, least, greatest,
first, last) and a sample of the rows: the first `HEAD`, and from each following block of equally many rows one drawn at
random. When the sample is full, every second row goes and blocks double. A random row of each block, and not every n-th
row, because steps that contain an evaluation come at regular intervals.
"""

from __future__ import annotations

import math
import operator
import random
from array import array
from collections.abc import Mapping, Sequence

import msgspec

HEAD = 64  # rows at the start that are always kept: compilation and warm-up show there
KEPT = 4096  # rows kept at most
WAITING = 256  # single rows put off
KIND = "kind"  # a column of marks, of which no totals are kept


class Total(msgspec.Struct):
    """What is exactly known of a column, whichever rows were kept."""

    count: int = 0  # finite values
    non_finite: int = 0
    sum: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    first: float | None = None
    last: float | None = None  # the last finite value
    first_non_finite_key: float | None = None  # the row's key (its step) where a value was first not a number

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None

    def take(self, values: Sequence[float], keys: Sequence[float]) -> None:
        """Add the values of some rows, of which `keys` are the keys."""
        total = sum(values)
        if not math.isfinite(total):  # one test for all: a NaN or an infinity anywhere makes the sum one
            bad = [index for index, value in enumerate(values) if not math.isfinite(value)]
            if bad and self.first_non_finite_key is None:
                self.first_non_finite_key = float(keys[bad[0]])
            self.non_finite += len(bad)
            values = [value for value in values if math.isfinite(value)]
            total = sum(values)
        if not values:
            return
        self.count += len(values)
        self.sum += total
        self.low = float(min(self.low, min(values)))
        self.high = float(max(self.high, max(values)))
        if self.first is None:
            self.first = float(values[0])
        self.last = float(values[-1])


class Series:
    """A table of numbers. The first column is the key (the step); a value that a row lacks is NaN."""

    def __init__(self, columns: Sequence[str], kept: int = KEPT) -> None:
        self.columns = tuple(columns)
        self._totals = {name: Total() for name in self.columns if name != KIND}
        self._count = 0
        self._waiting: list[dict[str, float]] = []  # single rows, taken together: an addition costs the same for many
        self._backward = 0
        self._rows = {name: array("d") for name in self.columns}
        self._limit = max(kept, 2 * HEAD)
        self._stride = 1
        self._block = 0  # where the next block begins
        self._pick = 0  # the row of it that will be kept
        self._last: list[float] = []
        self._last_kept = -1  # which row was kept last
        self._random = random.Random(0)

    @property
    def count(self) -> int:
        """Rows seen, kept or not."""
        return self._count + len(self._waiting)

    @property
    def totals(self) -> dict[str, Total]:
        """Exact totals by column."""
        self._flush()
        return self._totals

    @property
    def backward(self) -> int:
        """Rows whose key is not above the one before: a restart, or two runs in one log."""
        self._flush()
        return self._backward

    def append(self, **row: float) -> None:
        """Add one row. The key column must be in it."""
        self._waiting.append(row)
        if len(self._waiting) >= WAITING:
            self._flush()

    def extend(self, columns: Mapping[str, Sequence[float]]) -> None:
        """Add rows, column by column. The key column must be among them, and all of one length."""
        self._flush()
        self._extend(columns)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        while waiting:  # runs of rows with the same columns
            names = waiting[0].keys()
            size = next((index for index, row in enumerate(waiting) if row.keys() != names), len(waiting))
            self._extend({name: [row[name] for row in waiting[:size]] for name in names})
            del waiting[:size]

    def _extend(self, columns: Mapping[str, Sequence[float]]) -> None:
        keys = columns[self.columns[0]]
        if not keys:
            return
        self._count_backward(keys)
        for name, values in columns.items():
            if name != KIND:
                self._totals[name].take(values, keys)
        end = self._count + len(keys)
        while self._pick < end:
            self._keep(columns, self._draw(end))
        self._count = end
        self._last = [float(columns[name][-1]) if name in columns else math.nan for name in self.columns]

    def column(self, name: str) -> list[float]:
        """The kept values of a column in the order they were read; the very last row is always among them."""
        self._flush()
        values = self._rows[name].tolist()
        if self._last and self._last_kept != self._count - 1:
            values.append(self._last[self.columns.index(name)])
        return values

    def curve(self, name: str, key: str | None = None) -> list[tuple[float, float]]:
        """(key, value) of the kept rows that have both, by rising key; of equal keys the last read counts."""
        points = dict(zip(self.column(key or self.columns[0]), self.column(name), strict=True))
        return sorted((x, y) for x, y in points.items() if math.isfinite(x) and math.isfinite(y))

    def to_dict(self) -> dict[str, object]:
        """Counts, totals and kept rows, for JSON: NaN and infinities are null."""
        totals = {name: _finite(total) for name, total in self.totals.items() if total.count or total.non_finite}
        names = [name for name in self.columns if name in totals or name == KIND]
        kept = {name: [v if math.isfinite(v) else None for v in self.column(name)] for name in names}
        return {"count": self.count, "totals": totals, "kept": kept}

    def _count_backward(self, keys: Sequence[float]) -> None:
        if self._last and keys[0] <= self._last[0]:
            self._backward += 1
        if len(keys) > 1:
            self._backward += sum(map(operator.le, keys[1:], keys))

    def _draw(self, end: int) -> list[int]:
        """Which of the rows before `end` are kept, as many as there is room for."""
        room = self._limit - len(self._rows[self.columns[0]])
        chosen: list[int] = []
        while self._pick < end and len(chosen) < room:
            chosen.append(self._pick - self._count)
            self._begin_block(self._block + self._stride)
        return chosen

    def _begin_block(self, start: int) -> None:
        self._block = start
        self._pick = start + int(self._random.random() * self._stride)

    def _keep(self, columns: Mapping[str, Sequence[float]], chosen: Sequence[int]) -> None:
        for name, kept in self._rows.items():
            values = columns.get(name)
            kept.extend([math.nan] * len(chosen) if values is None else [values[index] for index in chosen])
        self._last_kept = self._count + chosen[-1]
        if len(kept) >= self._limit:
            self._thin()

    def _thin(self) -> None:
        """Of each two neighbours after the head, keep one at random."""
        size = len(self._rows[self.columns[0]])
        chosen = [index + self._random.getrandbits(1) for index in range(HEAD, size - 1, 2)]
        for name, kept in self._rows.items():
            self._rows[name] = kept[:HEAD] + array("d", [kept[index] for index in chosen])
        if chosen[-1] != size - 1:
            self._last_kept = -1
        self._stride *= 2
        self._begin_block(self._block)


def _finite(total: Total) -> dict[str, object]:
    plain: dict[str, object] = msgspec.to_builtins(total)
    return {name: v for name, v in plain.items() if v is not None and (not isinstance(v, float) or math.isfinite(v))}
