"""A run's metrics.jsonl as columns for a plot, thinned to some of its real rows."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

METRICS = "metrics.jsonl"
PIECE_BYTES = 2**20  # read at a time; longer lines are skipped
LAST_BYTES = 4096  # remembered from the end of what was read, to notice that the file was replaced
ROWS = 2000  # at most, for a plot of a whole run
EVALUATIONS = 5000
EVENTS = 500
MS_PER_HOUR = 3.6e6
FIGURES = ("tokens", "loss", "lr", "grad_norm", "step_ms", "tokens_per_s", "mfu", "memory_mib")
COLUMNS = ("step", "hours", "flops", *FIGURES)
_LOSS = COLUMNS.index("loss")

MetricsRow = tuple[float | None, ...]  # in the order of COLUMNS
Count = Annotated[int, msgspec.Meta(ge=0, le=10**18)]  # far beyond any run


class MetricColumns(msgspec.Struct, frozen=True):
    """A run's metrics.jsonl for a plot."""

    columns: dict[str, list[float | None]]  # a list for each of COLUMNS
    evals: list[dict[str, float | None]]
    events: list[dict[str, Any]]
    count: int  # of logged steps, before thinning
    steps: int | None


class MetricsRecord(msgspec.Struct, gc=False):
    """One line. A figure that is not finite is written as null."""

    step: Count
    tokens: Count | None = None
    loss: float | msgspec.UnsetType | None = msgspec.UNSET
    lr: float | None = None
    grad_norm: float | None = None
    step_ms: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    memory_mib: float | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    event: str | None = None
    reason: str | None = None


class Clock(msgspec.Struct):
    """Training hours so far. A logged step has the mean time of all steps since the previous one."""

    hours: float = 0.0
    last_step: int = -1

    def tick(self, line: MetricsRecord) -> float:
        """Training hours including this line's step."""
        if line.step_ms is not None and line.step > self.last_step:
            self.hours += line.step_ms * (line.step - self.last_step) / MS_PER_HOUR
            self.last_step = line.step
        return self.hours


_POSITION = re.compile(r"(\d{1,15})(?::(-1|\d{1,18}):(\d{1,15}(?:\.\d{1,20})?(?:e-\d{1,3})?))?", re.ASCII)


def position(offset: int, clock: Clock) -> str:
    """How far a file has been read, and its clock there, as text for `read_position`."""
    return f"{offset}:{clock.last_step}:{clock.hours!r}" if offset else "0"


def read_position(text: str) -> tuple[int, Clock] | None:
    """The byte and the clock of a position; None if the text is not one."""
    found = _POSITION.fullmatch(text)
    if found is None:
        return None
    return int(found[1]), Clock(float(found[3]), int(found[2])) if found[2] else Clock()


class Figures(msgspec.Struct):
    """What metrics.jsonl contains: logged steps, evaluations, events."""

    rows: list[MetricsRow] = msgspec.field(default_factory=list)
    evals: list[dict[str, float | None]] = msgspec.field(default_factory=list)
    events: list[dict[str, Any]] = msgspec.field(default_factory=list)
    count: int = 0
    steps: int | None = None  # steps done, by the last line
    last_event: str | None = None  # name and reason, if the last line is an event
    last_reason: str = ""

    def columns(self) -> MetricColumns:
        """The figures in the form the page gets."""
        rows = thinned(self.rows, ROWS)
        columns = {name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)}
        return MetricColumns(columns, self.evals[-EVALUATIONS:], self.events[-EVENTS:], self.count, self.steps)

    def add(self, line: MetricsRecord, clock: Clock, flops_per_token: float | None) -> None:
        """Add one line."""
        tokens, loss = line.tokens, line.loss
        flops = tokens * flops_per_token if tokens is not None and flops_per_token else None
        self.last_event = line.event
        if line.event is not None:
            self.last_reason = (line.reason or "")[:500]
            self.events.append({"step": line.step, "event": line.event[:200], "reason": self.last_reason})
        if line.val_loss is not None or line.train_loss is not None:
            losses = {"train_loss": line.train_loss, "val_loss": line.val_loss}
            at: dict[str, float | None] = {"step": line.step, "tokens": tokens, "hours": clock.hours, "flops": flops}
            self.evals.append(at | losses)
        if loss is msgspec.UNSET:
            self.steps = line.step
            return
        self.steps = line.step + 1  # a step is logged once it is done
        self.count += 1
        hours, pace = clock.tick(line), (line.step_ms, line.tokens_per_s, line.mfu, line.memory_mib)
        self.rows.append((line.step, hours, flops, tokens, loss, line.lr, line.grad_norm, *pace))

    def bound(self) -> None:
        """Thin out lists that have become too long, so that memory stays bounded."""
        if len(self.rows) >= 8 * ROWS:
            self.rows = thinned(self.rows, 4 * ROWS)
        if len(self.evals) >= 2 * EVALUATIONS:
            self.evals = self.evals[::2]
        if len(self.events) >= 2 * EVENTS:
            self.events = self.events[-EVENTS:]


_decoder = msgspec.json.Decoder(MetricsRecord)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def read_lines(text: bytes, clock: Clock, flops_per_token: float | None, found: Figures | None = None) -> Figures:
    """Add the lines to `found`. Unreadable ones are skipped: the run may still be writing them."""
    found = found or Figures()
    for line in _records(text):
        found.add(line, clock, flops_per_token)
    found.bound()
    return found


def _records(text: bytes) -> Iterator[MetricsRecord]:
    try:
        yield from _decoder.decode_lines(text)
        return
    except _UNREADABLE:
        pass  # at least one is bad: decode them one by one
    for line in text.splitlines():
        try:
            yield _decoder.decode(line)
        except _UNREADABLE:
            continue


def thinned(rows: list[MetricsRow], most: int) -> list[MetricsRow]:
    """At most that many of the rows: the first, the last, and the rows with the lowest and highest loss of each bucket,
    so that no spike is lost."""
    if len(rows) <= most:
        return rows
    buckets = most // 2 - 1
    inner = len(rows) - 2
    losses = [float("inf") if (loss := row[_LOSS]) is None else loss for row in rows]
    kept = [rows[0]]
    for bucket in range(buckets):
        places = range(1 + bucket * inner // buckets, 1 + (bucket + 1) * inner // buckets)
        low, high = min(places, key=losses.__getitem__), max(places, key=losses.__getitem__)
        kept += [rows[low]] if low == high else [rows[min(low, high)], rows[max(low, high)]]
    return [*kept, rows[-1]]


def open_file(path: Path) -> BinaryIO:
    """The regular file, opened for reading. Raises `OSError`, also for links and pipes."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(handle, "rb")


def whole_lines(stream: BinaryIO, most: int = PIECE_BYTES) -> tuple[bytes, int]:
    """The next complete lines, about `most` bytes, and how many bytes were consumed: more if an overlong line was
    skipped. The stream is left after them."""
    start = stream.tell()
    text = stream.read(most)
    end = text.rfind(b"\n") + 1
    if not end and len(text) == most:
        end = len(text)
        while (piece := stream.read(most)) and b"\n" not in piece:
            end += len(piece)
        if not piece:
            return b"", 0  # the line may still be completed
        end += piece.index(b"\n") + 1
        text = b""
    stream.seek(start + end)
    return text[:end], end


class MetricsFile:
    """A metrics.jsonl, read incrementally: each update reads only what was appended."""

    def __init__(self, path: Path, flops_per_token: float | None) -> None:
        self.path, self.flops_per_token = path, flops_per_token
        self._begin()

    def _begin(self) -> None:
        self.figures, self.clock, self.offset = Figures(), Clock(), 0
        self._last = b""  # the bytes before `offset`

    def update(self) -> None:
        """Read on, or from the start if the file was replaced."""
        try:
            with open_file(self.path) as stream:
                stream.seek(self.offset - len(self._last))
                if stream.read(len(self._last)) != self._last:
                    self._begin()
                    stream.seek(0)
                while (found := whole_lines(stream))[1]:
                    text, size = found
                    self.offset += size
                    self._last = (self._last + text)[-LAST_BYTES:] if text else b""
                    read_lines(text, self.clock, self.flops_per_token, self.figures)
        except OSError:
            self._begin()
