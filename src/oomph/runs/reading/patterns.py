"""Lines of one shape, read many at a time.

A line that was taken apart once becomes a `LinePattern`: its text with the numbers left out. The lines that follow in
the same shape are found by one regular expression for a whole block of text (`read_block`), ten times as fast as one by
one. What is between them is read line by line, unless nothing reads it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from oomph.runs.run import STEP_COLUMNS

if TYPE_CHECKING:
    from oomph.runs.reading.builder import Builder, Record
    from oomph.runs.reading.steps import Pair

Columns = dict[str, list[float]]  # the numbers of many lines, by what they are
Span = tuple[int, int]

_TOKEN = re.compile(r"[-+]?\d(?:[\d.,:eE+\-/]*\d)?|\bnan\b|\binf\b")
_LOOSE = r"[-+]?\d(?:[\d.,:eE+\-/]*\d)?"
_STRICT = r"[-+\d.eE]+"  # conversion decides whether it is a number
_POSITIVE = r"[\d.,]+"  # an MFU below 0: warm-up
_CELL = re.compile(r"^[ \t\"]*[-+\d.eE]+( ?[%A-Za-z]{0,3}[ \t\"]*)$")  # a number and its unit
_decode = msgspec.json.Decoder(list[float]).decode


class LinePattern(NamedTuple):
    """The text of a line with its numbers left out, as a pattern that captures the numbers of its columns."""

    text: str  # "iter #: loss #, time #ms, mfu #%"
    pattern: str  # without the end of the line
    columns: tuple[tuple[str, float], ...]  # (column, factor) of each group
    below: Callable[[str], bool] | None = None  # the reader of single rows, for lines below a heading
    rows: Callable[[Columns], None] | None = None  # takes what was read, where it is no plain step
    end: str = "\n"  # "\r" for a progress bar that is drawn again on the same line

    @classmethod
    def of(cls, line: str, pairs: Sequence[Pair], row: Record) -> LinePattern | None:
        """The shape of a plain step line; None if such lines must be read one by one."""
        chosen = chosen_pairs(pairs, row, (*STEP_COLUMNS, "epoch"))
        if {pair.what for pair in chosen} != row.keys():
            return None
        pattern, columns = numbers_out(line, chosen)
        return cls(tokens(line), pattern, columns)

    @classmethod
    def of_cells(
        cls,
        line: str,
        separator: str,
        columns: dict[int, tuple[str, float]],
        below: Callable[[str], bool],
        rows: Callable[[Columns], None] | None = None,
        fixed: Sequence[int] = (),
    ) -> LinePattern | None:
        """The shape of a row of a table; None if a cell of `columns` is not a number with a unit.

        The numbers of `columns` are read; cells of `fixed` stay as they are, and empty ones empty. `separator` is a
        pattern.
        """
        cells = re.split(separator, line)
        parts, found = [], []
        for place, cell in enumerate(cells):
            match = _CELL.match(cell)
            if place in columns and match is not None:
                parts.append(rf"[ \t\"]*({_STRICT}){re.escape(match[1])}")
                found.append(columns[place])
            elif place in columns:
                return None
            else:
                parts.append(re.escape(cell) if place in fixed or not cell.strip(' "') else r"[^,|\t\n]*?")
        text = separator.join("#" if place in columns else "" for place in range(len(cells)))
        return cls(text, separator.join(parts), tuple(found), below, rows)

    @classmethod
    def of_screen(
        cls, text: str, read: Mapping[Span, str], fixed: Sequence[Span], rows: Callable[[Columns], None]
    ) -> LinePattern:
        """The shape of one or two lines of a screen: `read` are the numbers to read, `fixed` what stays as it is."""
        parts, columns, place = [], [], 0
        for token in _TOKEN.finditer(text):
            begin, end = token.span()
            held = next((span for span in read if begin <= span[0] < end), None)
            if any(span[0] <= begin < span[1] for span in fixed):
                continue
            parts.append(_spaced(text[place:begin]))
            if held is None:
                parts.append(_LOOSE)
            else:
                parts.append(f"{_spaced(text[begin : held[0]])}({_STRICT}){_spaced(text[held[1] : end])}")
                columns.append((read[held], 1.0))
            place = end
        pattern = "".join((*parts, _spaced(text[place:])))
        return cls(pattern, pattern, tuple(columns), None, rows)

    def is_cut(self, line: str) -> bool:
        """Whether the line is such a step with its end cut off."""
        text = tokens(line.rstrip())
        stem = text.rstrip("#., ")
        missing = self.text[len(text) :]
        whole = self.text.startswith(text) and "#" not in missing and text[-1:] != "#"  # without words at the end
        return text != self.text and len(stem) < len(self.text) - 1 and self.text.startswith(stem) and not whole

    @property
    def whole(self) -> str:
        """The pattern of a whole line."""
        return rf"^{self.pattern}\n" if self.end == "\n" else rf"(?:^|(?<=\r)){self.pattern}\r"

    @property
    def lines(self) -> int:
        """Lines that a match takes."""
        return self.pattern.count("\n") + (self.end == "\n")


def chosen_pairs(pairs: Sequence[Pair], row: Record, names: Sequence[str]) -> list[Pair]:
    """The pairs that the values of a row with these names were read from."""
    chosen: dict[str, Pair] = {}
    for pair in sorted(pairs, key=lambda pair: -pair.rank):
        if pair.what in row and pair.what in names and math.isclose(row[pair.what], pair.value):
            chosen[pair.what] = pair
    return list(chosen.values())


def numbers_out(line: str, chosen: Sequence[Pair]) -> tuple[str, tuple[tuple[str, float], ...]]:
    """A pattern of the line, with a group for each chosen pair, and what each group is."""
    parts, columns, place = [], [], 0
    for token in _TOKEN.finditer(line):
        parts.append(_literal(line[place : token.start()]))
        held = next((pair for pair in chosen if token.start() <= pair.span[0] < token.end()), None)
        if held is None:
            parts.append(_LOOSE)
        else:
            whole, rest = line[held.span[0] : held.span[1]], line[held.span[1] : token.end()]
            number = _POSITIVE if "," in whole or held.what == "mfu_percent" else _STRICT
            loose = re.sub(r"[0-9]+", "[0-9]+", re.escape(rest))
            parts.append(f"{_literal(line[token.start() : held.span[0]])}({number}){loose}")
            columns.append((held.what, held.factor))
        place = token.end()
    return "".join((*parts, _literal(line[place:]))), tuple(columns)


def tokens(line: str) -> str:
    """The text of a line with "#" for its numbers and one space for several."""
    return re.sub(r"\s+", " ", _TOKEN.sub("#", line)).strip()


def _literal(text: str) -> str:
    return re.sub(r"(?:\\? ){2,}", " +", re.escape(text)).replace("\\ ", " ") if text else ""


def _spaced(text: str) -> str:
    """The text as a pattern in which spaces may be fewer or more: a table is as wide as its numbers are short."""
    return re.sub(r"(?:\\? )+", " *", re.escape(text).replace("\\\n", "\n"))


# --- blocks of text ----------------------------------------------------------------------------------


class Shapes:
    """Several shapes as one pattern."""

    def __init__(self, shapes: Sequence[LinePattern]) -> None:
        self.shapes = shapes
        self._pattern = re.compile("|".join(shape.whole for shape in shapes), re.M)
        self._size = self._pattern.groups + 1

    def read(self, text: str) -> tuple[list[str], list[tuple[LinePattern, Sequence[int], Columns]]]:
        """(what is between the lines of these shapes; for each shape which of the lines are its, and their numbers).

        Raises ValueError if one of them is not a number.
        """
        parts, size = self._pattern.split(text), self._size
        between = parts[::size]
        found: list[tuple[LinePattern, Sequence[int], Columns]] = []
        first = 1
        for shape in self.shapes:
            places: Sequence[int] = range(len(between) - 1)
            if len(self.shapes) > 1:
                places = [place for place, cell in enumerate(parts[first::size]) if cell is not None]
            columns: Columns = {}
            for name, factor in shape.columns:
                cells = parts[first::size]
                columns[name] = _numbers(
                    cells if len(places) == len(cells) else [cell for cell in cells if cell is not None], factor
                )
                first += 1
            if places:
                found.append((shape, places, columns))
        return between, found


def read_block(builder: Builder, text: str, block: Shapes) -> Iterator[tuple[int, str]]:
    """Read all lines of these shapes; yields (line number within the text, text) of what is to be read between them."""
    try:
        between, found = block.read(text)
    except ValueError:  # one is not a number: read line by line
        yield 0, text
        return
    line, done = 0, [0] * len(found)
    for index, rest in enumerate(between):
        last = index == len(between) - 1
        if not last and (not rest or builder.unread(rest)):
            line += rest.count("\n") if rest else 0
            continue
        for place, (shape, places, columns) in enumerate(found):
            begin, end = done[place], bisect_left(places, index)
            if end > begin:
                (shape.rows or builder.rows)({name: values[begin:end] for name, values in columns.items()})
                line += shape.lines * (end - begin)
                done[place] = end
        if rest:
            yield line, rest
            line += rest.count("\n")


def _numbers(texts: Sequence[str], factor: float) -> list[float]:
    joined = "\n".join(texts)
    if "," in joined:
        joined = joined.replace(",", "")
    try:
        values = _decode(f"[{joined.replace(chr(10), ',')}]")
    except msgspec.DecodeError:  # NaN, or zeros in front
        values = [float(text) for text in joined.split("\n")] if joined else []
    return values if factor == 1.0 else [factor * value for value in values]
