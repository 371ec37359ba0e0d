"""Several processes, one run: torchrun starts them, each takes its share of a step, and gradients are summed.

They are summed once a step, after all micro-steps, not bucket by bucket during the backward. So no collective is in
flight where memory can run out, and all ranks can undo a step together. The price is that the last micro-step's
backward does not overlap with the sum, which accumulation makes small.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from oomph.errors import InputError, Problem
from oomph.training.errors import LostRankError, OtherRankError

TIMEOUT = timedelta(minutes=10)  # without an answer, after which a rank counts as dead
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run, and what they do together."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def start(self, backend: str, device: torch.device) -> None:
        """Join the process group."""
        if self.size > 1:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            _or_lost(self, lambda: dist.init_process_group(backend, timeout=TIMEOUT))

    def stop(self) -> None:
        """Leave the process group, if there is one."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def any(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """Each flag, True if it is True on any rank: how all ranks take the same decision."""
        if self.size == 1:
            return list(flags)
        tensor = torch.tensor([float(flag) for flag in flags], device=device)
        _or_lost(self, lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX))
        return [value > 0 for value in tensor.tolist()]

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Sum each tensor over all ranks, in place."""
        if self.size > 1:
            everything = list(tensors)

            def add() -> None:
                for work in [dist.all_reduce(tensor, async_op=True) for tensor in everything]:
                    work.wait()

            _or_lost(self, add)

    def together(self, work: Callable[[], _T]) -> _T:
        """Do the work on every rank. If it fails on one, all stop: that one with its error, the others quietly."""
        if self.size == 1:
            return work()
        failure: Exception | None = None
        result: _T | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        failures = self.gather(None if failure is None else str(failure))
        if all(each is None for each in failures):
            return cast(_T, result)
        if failure is None or (not self.first and failures[0] == str(failure)):
            raise OtherRankError("another rank failed")
        raise failure

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        _or_lost(self, lambda: dist.all_gather_object(values, value))
        return values


def ranks_from_environment() -> Ranks:
    """The ranks that torchrun set up; a single process if it did not."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Ranks()
    said = " ".join(f"{name}={os.environ[name]}" for name in _TORCHRUN if name in os.environ)
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        if size > 1:
            int(os.environ.get("MASTER_PORT", ""))
    except ValueError:
        allowed = "numbers, and MASTER_PORT too for several processes: start them with torchrun"
        raise InputError(Problem("environment", "invalid torchrun variables", said, allowed)) from None
    if not 0 <= rank < size or local_rank < 0:
        allowed = "0 ≤ RANK < WORLD_SIZE; for a single process, neither of them"
        raise InputError(Problem("environment", "no such rank", said, allowed))
    if size > 1 and not os.environ.get("MASTER_ADDR"):
        what = "several processes, but no MASTER_ADDR"
        raise InputError(Problem("environment", what, said, "MASTER_ADDR and MASTER_PORT: start them with torchrun"))
    return Ranks(rank, local_rank, size)


def _or_lost(ranks: Ranks, work: Callable[[], _T]) -> _T:
    """Do the work. If another rank is gone or silent, raise `LostRankError` instead of hanging."""
    try:
        return work()
    except (RuntimeError, dist.DistError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise LostRankError(f"rank {ranks.rank} lost contact with another rank: {reason}") from None
