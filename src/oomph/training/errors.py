"""What can go wrong during a run, and which errors mean that memory ran out."""

from __future__ import annotations

from oomph.errors import says_out_of_memory

_COMPILER = ("torch._dynamo", "torch._inductor", "triton")  # modules whose errors come from torch.compile


class TrainingError(Exception):
    """The run cannot continue. The message says why, what is kept and what to do. The command exits with 3."""


class DoesNotFitError(TrainingError):
    """The plan says that the run does not fit, and --force was not given. The command exits with 1."""


class DiskFullError(TrainingError):
    """A file could not be written because the disk or the user's quota is full."""


class OtherRankError(TrainingError):
    """Another process of this run failed and reports why."""


class LostRankError(TrainingError):
    """Another process of this run is gone."""

    def __init__(self, message: str, tells: bool = True) -> None:
        """`tells`: this rank reports it; only one of the remaining ranks does."""
        super().__init__(message)
        self.tells = tells


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
    return isinstance(error, RuntimeError) and says_out_of_memory(str(error))
