"""What a block of Llama allocates and keeps, for docs/block.md: `make refresh` writes the tables, a test compares them.

A small model is described as for a plan. Each allocation is listed with the line of `step/models/llama.py` that makes
it and, if it is still there when forward ends, the operation that saved it for backward.
"""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import oomph
from oomph.config import TrainConfig
from oomph.step.build import build
from oomph.step.models import llama
from oomph.step.ops import Buffer, Kind, Op, Phase
from oomph.step.tensor.autograd import Node
from oomph.step.tensor.tensor import Ledger, Storage, Tensor

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "block.md"
MODEL = llama.__file__
MACHINERY = ("tape", "tensor", "autograd", "layout")  # files that every operation goes through
SHARED = ("elementwise.pointwise",)
BLOCK = 1  # not the first: its input is a sum that the block before it made
# Widths that no two figures of the table share.
SIZES = {"C": 96, "K": 32, "I": 320, "H": 6, "1": 1, "C/2": 48, "K/2": 16}
SHAPE = {"n_layer": 3, "n_embd": 96, "n_head": 6, "num_key_value_heads": 2, "intermediate_size": 320, "vocab_size": 512}
TOKENS = 64


class Line(NamedTuple):
    """One allocation of the block's forward."""

    place: str  # the function of the model, "norm"
    code: str  # the line of it that runs
    operation: str  # what allocates it: "elementwise.mul"
    buffer: Buffer
    saved_by: tuple[str, ...]  # operations that save it for backward: "products.product"
    kept: bool  # still allocated when forward ends


def config(**changes: Any) -> TrainConfig:
    """transformers' Trainer with a small Llama in bfloat16 autocast, on a GPU."""
    run = {"model_type": "llama", "trainer": "hf", "batch_size": 1, "block_size": TOKENS}
    return oomph.plan({**run, **SHAPE, **changes}, "RTX 4090").config


def lines(settled: TrainConfig) -> list[Line]:
    """Every allocation of one eager block's forward, in order."""
    made: dict[Buffer, tuple[str, str, str]] = {}
    saved: dict[Buffer, dict[str, None]] = {}
    with _watched(made, saved):
        forward, kept = forward_of(settled)
    return [
        Line(*made[buffer], buffer, tuple(saved.get(buffer, ())), buffer in kept)
        for op in forward
        for buffer in op.allocates
        if buffer.block == BLOCK
    ]


def forward_of(settled: TrainConfig) -> tuple[list[Op], set[Buffer]]:
    """The operations of a step's first forward, and what is still allocated at its end."""
    forward = [op for op in build(settled).sections[0].ops if op.phase is Phase.FORWARD]
    gone = {buffer for op in forward for buffer in op.frees}
    return forward, {buffer for op in forward for buffer in op.allocates if buffer not in gone}


@contextmanager
def _watched(made: dict[Buffer, tuple[str, str, str]], saved: dict[Buffer, dict[str, None]]) -> Iterator[None]:
    """Notes where buffers are made, and which operations save them."""
    note, save = Ledger.note, Node.save

    def noted(self: Ledger, name: str, allocated: tuple[Buffer, ...], *rest: Any, **work: Any) -> None:
        place = _model_line(sys._getframe(1))
        made.update(dict.fromkeys(allocated, place))
        note(self, name, allocated, *rest, **work)

    def kept(self: Node, *tensors: Any) -> None:
        for each in tensors:
            storage = each.storage if isinstance(each, Tensor) else each
            if isinstance(storage, Storage):
                saved.setdefault(storage.buffer, {})[_named(sys._getframe(1))] = None
        save(self, *tensors)

    Ledger.note, Node.save = noted, kept  # type: ignore[method-assign]
    try:
        yield
    finally:
        Ledger.note, Node.save = note, save  # type: ignore[method-assign]


def _model_line(frame: FrameType | None) -> tuple[str, str, str]:
    """The innermost function of the model's own module, the line that it runs, and the operation that it leads to."""
    operation = ""
    while frame is not None and frame.f_code.co_filename != MODEL:
        path, name = Path(frame.f_code.co_filename), _named(frame)
        if not operation and path.parent.name == "tensor" and path.stem not in MACHINERY and name not in SHARED:
            operation = name
        frame = frame.f_back
    if frame is None:
        return "", "", operation
    return _function(frame), linecache.getline(MODEL, frame.f_lineno).strip(), operation


def _named(frame: FrameType) -> str:
    """ "products.product": file and function."""
    return f"{Path(frame.f_code.co_filename).stem}.{_function(frame)}"


def _function(frame: FrameType) -> str:
    return frame.f_code.co_qualname.partition(".<locals>")[0]  # what a lambda is written in


def size(buffer: Buffer) -> str:
    """The bytes in the letters of the page: "2·C" for each token, "2·C·I" for a weight."""
    for item in (2, 4):
        if buffer.kind is Kind.HALF_WEIGHTS:
            for pair in (("C", "C"), ("C", "K"), ("C", "I")):
                if buffer.bytes == item * SIZES[pair[0]] * SIZES[pair[1]]:
                    return f"{item}·{'·'.join(pair)}, once"
        for letter, width in SIZES.items():
            if buffer.bytes == item * width * TOKENS:
                return f"{item}·{letter}" if letter != "1" else str(item)
    return f"{buffer.bytes:,} bytes, once"


def total(buffers: Iterable[Buffer]) -> str:
    """The bytes a token of several buffers: "4·H + 12·C + 8"."""
    factors: Counter[str] = Counter()
    for buffer in buffers:
        if not (text := size(buffer)).endswith("once"):
            factor, _, letter = text.partition("·")
            factors[letter] += int(factor)
    return " + ".join(f"{factors[letter]}{'·' * bool(letter)}{letter}" for letter in sorted(factors, reverse=True))


def eager() -> str:
    """The table of an eager block."""
    rows = ["| in | the line | allocates | bytes a token | made by | kept: saved by |\n", "|---|---|---|---|---|---|\n"]
    found, before = lines(config()), ("", "")
    for line in found:
        saved = ", ".join(f"`{each}`" for each in line.saved_by) if line.kept else ""
        here = (f"`{line.place}`", f"`{line.code}`") if (line.place, line.code) != before else ("", "")
        before = line.place, line.code
        cells = (*here, f"`{_short(line.buffer)}`", size(line.buffer), f"`{line.operation}`", saved)
        rows.append(f"| {' | '.join(cells)} |\n")
    kept = [line.buffer for line in found if line.kept]
    return f"{''.join(rows)}\nKept, beside the casts of weights: {total(kept)} bytes a token.\n"


def compiled() -> str:
    """The table of a compiled block."""
    rows = ["| kernel | is a | allocates | bytes a token | kept |\n", "|---|---|---|---|---|\n"]
    forward, kept = forward_of(config(compile=True))
    found: list[Buffer] = []
    for op in forward:
        own = [buffer for buffer in op.allocates if buffer.block == BLOCK]
        found += own
        name = f"`{op.name.removeprefix('model.layers.')}`"
        if not own and op.block == BLOCK:
            rows.append(f"| {name} | {op.kernel} | nothing: it writes into a buffer that is free | | |\n")
        for buffer in own:
            cells = (name, str(op.kernel), f"`{_short(buffer)}`", size(buffer), "yes" if buffer in kept else "")
            rows.append(f"| {' | '.join(cells)} |\n")
    sums = total(buffer for buffer in found if buffer in kept)
    return f"{''.join(rows)}\nKept, beside the casts of weights: {sums} bytes a token.\n"


def _short(buffer: Buffer) -> str:
    return buffer.name.removeprefix(f"model.layers.{BLOCK}.")


def refreshed(page: str) -> str:
    """The page with today's tables."""
    for name, made in (("eager", eager), ("compiled", compiled)):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{made()}\n{end}{rest.partition(end)[2]}"
    return page


def refresh() -> None:
    """Write today's tables into the page."""
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
