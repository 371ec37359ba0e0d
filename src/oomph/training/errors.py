"""What can go wrong during a run, and which errors mean that memory ran out."""

from __future__ import annotations

_COMPILER = ("torch._dynamo", "torch._inductor", "triton")  # modules whose errors come from torch.compile
_CPU_WORDS = ("not enough memory", "can't allocate memory")  # torch's CPU allocator raises a plain RuntimeError


class TrainingError(Exception):
    """The run cannot go on. The message says why, what is kept and what to do. The command exits with 3."""


class DoesNotFitError(TrainingError):
    """The plan says that the run does not fit, and --force was not given. The command exits with 1."""


class OtherRankError(TrainingError):
    """Another process of this run failed and reports why."""


class LostRankError(TrainingError):
    """Another process of this run is gone."""


def explain(error: Exception) -> TrainingError | None:
    """A `TrainingError` for errors that the user can fix; None for errors that are clear already or are bugs."""
    reason = next((line[:200] for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, TrainingError):
        return None
    if is_out_of_memory(error):
        return TrainingError(f"out of memory: {reason}")
    if any(kind.__module__.startswith(_COMPILER) for kind in type(error).__mro__):
        needs = "It needs a C++ compiler on a CPU, Triton and a C compiler on a GPU: install what is missing"
        return TrainingError(f"torch.compile failed: {reason.rstrip('.')}. {needs}, or train with --compile=False.")
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host ran out of memory."""
    import torch  # not at the top: oomph.checking uses these classes without torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_WORDS)
