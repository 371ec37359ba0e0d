"""A run's metrics.jsonl as columns for a plot: every line read once, at most a couple of thousand rows kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

ROWS = 2000  # of a whole run, for a plot
EVALUATIONS = 5000
EVENTS = 500
MS_PER_HOUR = 3.6e6
FIGURES = ("tokens", "loss", "lr", "grad_norm", "step_ms", "tokens_per_s", "mfu", "memory_mib")
COLUMNS = ("step", "hours", "flops", *FIGURES)


Count = Annotated[int, msgspec.Meta(ge=0, le=10**18)]  # beyond it no float would be exact, and none is of a run


class Line(msgspec.Struct):
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
    """Where a run stands in time: a logged step tells the mean time of the steps since the one before."""

    hours: float = 0.0
    last_step: int = -1

    def tick(self, line: Line) -> float:
        """Training hours up to and with this line's step."""
        if line.step_ms is not None and line.step > self.last_step:
            self.hours += line.step_ms * (line.step - self.last_step) / MS_PER_HOUR
            self.last_step = line.step
        return self.hours


class Figures(msgspec.Struct):
    """Rows of steps, evaluations and events."""

    rows: list[list[float | None]] = msgspec.field(default_factory=list)  # in the order of COLUMNS
    evals: list[dict[str, float | None]] = msgspec.field(default_factory=list)
    events: list[dict[str, Any]] = msgspec.field(default_factory=list)
    count: int = 0
    steps: int | None = None  # done, as the last of the lines has it

    def to_dict(self) -> dict[str, Any]:
        rows = thinned(self.rows, ROWS)
        return {
            "columns": {name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)},
            "evals": self.evals[-EVALUATIONS:],
            "events": self.events[-EVENTS:],
            "count": self.count,
            "steps": self.steps,
        }


_decode = msgspec.json.Decoder(Line).decode


def read_lines(lines: Iterable[bytes], clock: Clock, flops_per_token: float | None) -> Figures:
    """What the lines tell. One that cannot be read is passed over: a run may be writing it."""
    found = Figures()
    for text in lines:
        try:
            line = _decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        found.steps = line.step + (line.loss is not msgspec.UNSET)  # a step is logged once it is done
        flops = line.tokens * flops_per_token if line.tokens is not None and flops_per_token else None
        if line.event is not None:
            found.events.append({"step": line.step, "event": line.event[:200], "reason": (line.reason or "")[:500]})
        if line.val_loss is not None or line.train_loss is not None:
            found.evals.append(
                {
                    "step": line.step,
                    "tokens": line.tokens,
                    "hours": clock.hours,
                    "flops": flops,
                    "train_loss": line.train_loss,
                    "val_loss": line.val_loss,
                }
            )
        if line.loss is not msgspec.UNSET:
            hours = clock.tick(line)
            found.count += 1
            found.rows.append([line.step, hours, flops, *(getattr(line, name) for name in FIGURES)])
            if len(found.rows) >= 8 * ROWS:  # memory stays bounded, however long the run
                found.rows = thinned(found.rows, 4 * ROWS)
        if len(found.evals) >= 2 * EVALUATIONS:
            found.evals = found.evals[::2]
        if len(found.events) >= 2 * EVENTS:
            found.events = found.events[-EVENTS:]
    return found


_LOSS = COLUMNS.index("loss")


def thinned(rows: list[list[float | None]], most: int) -> list[list[float | None]]:
    """At most that many of the rows, real ones: the first, the last, and of each bucket the least and greatest loss, so
    that no spike is lost."""
    if len(rows) <= most:
        return rows
    buckets = most // 2 - 1
    inner = len(rows) - 2
    kept = [rows[0]]
    for bucket in range(buckets):
        start, end = 1 + bucket * inner // buckets, 1 + (bucket + 1) * inner // buckets
        places = sorted(range(start, end), key=lambda at: _loss(rows[at]))
        kept += [rows[at] for at in sorted({places[0], places[-1]})]
    return [*kept, rows[-1]]


def _loss(row: list[float | None]) -> float:
    loss = row[_LOSS]
    return float("inf") if loss is None else loss
