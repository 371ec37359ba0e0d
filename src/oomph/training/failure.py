"""What goes wrong while a run is under way, and which errors mean that memory ran out."""

from __future__ import annotations

import torch

_COMPILER = ("torch._dynamo", "torch._inductor", "triton")  # where the errors of torch.compile come from
_CPU_WORDS = ("not enough memory", "can't allocate memory")  # of torch's CPU allocator, which has no error of its own


class TrainingError(Exception):
    """The run cannot go on: the message says why, what is kept and what to do. The command exits with 3."""


class DoesNotFitError(TrainingError):
    """The plan says that the run does not fit, and nobody insisted. The command exits with 1."""


class OtherRankError(TrainingError):
    """Another process of this run failed, and says why itself."""


class LostRankError(TrainingError):
    """Another process of this run is gone."""


def in_words(error: Exception) -> TrainingError | None:
    """What a user can do something about, said so; None for errors that speak for themselves or are faults of ours."""
    reason = next((line[:200] for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, TrainingError):
        return None
    if is_out_of_memory(error):
        return TrainingError(f"no memory is left: {reason}")
    if any(kind.__module__.startswith(_COMPILER) for kind in type(error).__mro__):
        needs = "It needs a C++ compiler on a CPU, Triton and a C compiler on a GPU: install what is missing"
        return TrainingError(f"torch.compile failed: {reason.rstrip('.')}. {needs}, or train with --compile=False.")
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_WORDS)
