"""oomph's own metrics.jsonl: one JSON object per logged step."""

from __future__ import annotations

import math

import msgspec

from oomph.runs.reading.builder import Builder
from oomph.runs.run import STEADY, WARMING_UP


class MetricsLine(msgspec.Struct):
    """One line. JSON has no NaN: a NaN loss is null."""

    step: int
    tokens: int | None = None
    loss: float | msgspec.UnsetType | None = msgspec.UNSET
    val_loss: float | None = None
    train_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    step_ms: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None  # a fraction of the device's own peak
    memory_mib: float | None = None
    event: str | None = None


_decode = msgspec.json.Decoder(MetricsLine).decode


def json_line(builder: Builder, line: str) -> None:
    """A line with a JSON object that has a step."""
    try:
        found = _decode(line[line.find("{") :])
    except (msgspec.DecodeError, RecursionError):
        builder.cannot_read("a line of metrics.jsonl", line)
        return
    if not 0 <= found.step < 1e15:
        builder.cannot_read("a line of metrics.jsonl", line)
        return
    builder.program("oomph")
    if found.event is not None:
        builder.event(found.event[:40], line)
    if found.val_loss is not None:
        train = {} if found.train_loss is None else {"train_loss": found.train_loss}
        builder.evaluation(found.step, False, val_loss=found.val_loss, **train)
    if found.loss is not msgspec.UNSET:
        _step(builder, found, math.nan if found.loss is None else found.loss)


def _step(builder: Builder, found: MetricsLine, loss: float) -> None:
    row = {
        "tokens": found.tokens,
        "lr": found.lr,
        "grad_norm": found.grad_norm,
        "ms": found.step_ms,
        "tokens_per_s": found.tokens_per_s,
        "memory_mib": found.memory_mib,
        "mfu_percent": None if found.mfu is None else 100 * found.mfu,
    }
    kind = STEADY if builder.run.steps.count else WARMING_UP
    known = {name: value for name, value in row.items() if value is not None}
    builder.run.steps.append(step=found.step, loss=loss, kind=kind, **known)


READERS = (('"step":', json_line),)
