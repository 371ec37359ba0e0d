"""oomph's own metrics.jsonl: one object a logged step."""

from __future__ import annotations

import math
import re

import msgspec

from oomph.runs.builder import Builder
from oomph.runs.columns import Spans
from oomph.runs.model import STEADY, WARMING_UP


class Line(msgspec.Struct):
    """One line. A NaN cannot be written in JSON and comes as null."""

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


_decode = msgspec.json.Decoder(Line).decode
_COLUMNS = (
    ("tokens", "tokens"),
    ("lr", "lr"),
    ("grad_norm", "grad_norm"),
    ("step_ms", "ms"),
    ("tokens_per_s", "tokens_per_s"),
    ("memory_mib", "memory_mib"),
)


_PLAIN = {"step": "step", "loss": "loss", "mfu": "mfu_percent"} | dict(_COLUMNS)
_FIELD = re.compile(r'"([a-z_]+)": ?(-?\d[\d.]*(?:[eE][+-]?\d+)?)(?=[,}])')


def line(builder: Builder, text: str) -> None:
    """A line that holds a JSON object with a step."""
    start = text.find("{")
    try:
        found = _decode(text[start:] if start else text)
    except (msgspec.DecodeError, RecursionError):
        builder.cannot_read("a line of metrics.jsonl", text)
        return
    if not 0 <= found.step < 1e15:
        builder.cannot_read("a line of metrics.jsonl", text)
        return
    builder.program("oomph")
    if found.event is not None:
        builder.event(found.event[:40], text)
    if found.val_loss is not None:
        train = {} if found.train_loss is None else {"train_loss": found.train_loss}
        builder.evaluation(found.step, False, val_loss=found.val_loss, **train)
    if found.loss is msgspec.UNSET:
        return
    row = {column: value for name, column in _COLUMNS if (value := getattr(found, name)) is not None}
    if found.mfu is not None:
        row["mfu_percent"] = 100 * found.mfu
    loss = math.nan if found.loss is None else found.loss
    kind = STEADY if builder.run.steps.count else WARMING_UP
    builder.run.steps.append(step=found.step, loss=loss, kind=kind, **row)


def step_spans(text: str) -> Spans | None:
    """Where the values of a plain step's line stand; None where it has more to tell than numbers of a step."""
    found = {field[1]: field.span(2) for field in _FIELD.finditer(text)}
    if text.count('"') != 2 * len(found) or not found.keys() <= _PLAIN.keys() or not {"step", "loss"} <= found.keys():
        return None
    return {_PLAIN[name]: span for name, span in found.items()}


def take_steps(builder: Builder, columns: dict[str, list[float]]) -> None:
    """Steps read together."""
    if "mfu_percent" in columns:
        columns["mfu_percent"] = [100 * mfu for mfu in columns["mfu_percent"]]
    columns["kind"] = [STEADY] * len(columns["step"])
    builder.run.steps.extend(columns)


PARTS = {'"step":': (line,)}
