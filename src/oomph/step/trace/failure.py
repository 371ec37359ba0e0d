"""Why a user's own model cannot be traced: the line, what it does, and what to do instead."""

from __future__ import annotations

import os
import sysconfig
import textwrap
import traceback
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from oomph.errors import Problem

_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_STANDARD = sysconfig.get_paths()["stdlib"]
_LINE = 80  # characters of the line to quote
_READS = "reads a tensor's value, and a trace has shapes alone, no values"
_READS_NOT = "keep .item(), .tolist(), float() and conditions on tensors out of forward; torch.where chooses by value"
_SIZED = "makes a tensor whose size depends on values, and a trace has none"
_SIZED_NOT = "a tensor of fixed size: torch.where or a mask instead of indexing by a condition, nonzero or unique"


def failure(spec: str, doing: str, error: BaseException) -> Problem:
    """An exception from the user's code as a problem report; `doing` says what was being done."""
    place = _place(error)
    where = f"{spec}, {place}" if place else spec
    if isinstance(error, DynamicOutputShapeException):
        return Problem(where, f"{_SIZED} ({_named(error.func)})", allowed=_SIZED_NOT)
    if isinstance(error, DataDependentOutputException):
        return Problem(where, f"{_READS} ({_named(error.func)})", allowed=_READS_NOT)
    return Problem(where, f"{doing}: {type(error).__name__}: {error}")


def _named(func: object) -> str:
    """An operator's name; aten._local_scalar_dense is shown as .item() or a condition."""
    name = str(func).removeprefix("aten.").partition(".")[0]
    return ".item(), or a condition on a tensor" if name == "_local_scalar_dense" else name


def _place(error: BaseException) -> str | None:
    """The innermost line that is not PyTorch's, Python's or ours; None if the traceback has none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = frame.filename
        standard = file.startswith(_STANDARD) and "site-packages" not in file
        if not standard and not file.startswith(("<", *_LIBRARIES)):
            return f"line {frame.lineno} of {Path(file).name} ({textwrap.shorten(frame.line or '', _LINE)})"
    return None


def unplannable(spec: str, model: nn.Module) -> list[Problem]:
    """The parts of a model that the planned optimizers cannot train."""
    return [
        Problem(
            f"{spec}, module {name or 'itself'}",
            f"its {type(module).__name__} has sparse gradients, which no optimizer that is planned here takes",
            found="sparse=True",
            allowed="sparse=False",
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    ]
