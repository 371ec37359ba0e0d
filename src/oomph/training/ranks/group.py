"""Several processes, one run: torchrun starts them, each takes its share of a step.

They communicate through torch's process groups; when a group fails, they find out who is gone through torchrun's
store, which outlives it.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from oomph.errors import InputError, Problem
from oomph.training.errors import LostRankError, OtherRankError, is_out_of_memory

TIMEOUT = timedelta(minutes=10)  # without an answer, then a rank counts as dead
STEP_TIMEOUT = timedelta(seconds=45)  # the same during steps in which ranks keep pace: no checkpoint, no compiling
_GRACE_S = 5.0  # for the remaining ranks to report
_PAUSE_S = 0.02  # between two reads of the store
_LOOK_S = 1.0  # between two checks for another rank's trouble
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_COLLECTIVE = re.compile(r"gloo|NCCL|Connection (closed|reset)|[Tt]imed out|aborted", re.IGNORECASE)
_T = TypeVar("_T")


class OutOfMemoryElsewhereError(Exception):
    """Memory ran out on another rank, in the middle of work that all do together."""


class Ranks:
    """This process among those of the run, and what they do together."""

    def __init__(self, rank: int = 0, local_rank: int = 0, size: int = 1, launched: bool = False) -> None:
        self.rank, self.local_rank, self.size = rank, local_rank, size
        self.launched = launched  # by torchrun, even if it is the only process
        self.hosts: list[str] = [socket.gethostname()]  # of every rank
        self.pace: Any = None  # the group of a step: its timeout is short while ranks keep pace
        self.control: Any = None  # a gloo group for flags, if ranks gather weights from each other
        self.saving: Any = None  # a gloo group for checkpoints that all ranks write together
        self._on_gpu = False
        self._gathers = False
        self._store: Any = None
        self._meeting = 0  # how often the groups were made: again after memory ran out
        self._joined: Callable[[], None] = lambda: None

    @property
    def first(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def start(self, backend: str, device: torch.device) -> None:
        """Join the process group."""
        if self.size == 1:
            return
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            torch.cuda.set_device(device)

        def join() -> None:
            if self._store is None:
                shared = next(rendezvous("env://", self.rank, self.size, timeout=TIMEOUT))[0]
                self._store = PrefixStore(f"oomph/{_life(shared, self.rank, self.size)}", shared)
            store = PrefixStore(str(self._meeting), self._store)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=TIMEOUT)
            self.pace = dist.new_group(timeout=TIMEOUT)
            if self._gathers:
                self._open_control()

        self._joined = join
        self._or_lost(join)
        self.hosts = self.gather(socket.gethostname())

    def gather_weights(self) -> None:
        """Prepare for micro-steps that gather weights: flags and checkpoints get gloo groups beside theirs."""
        self._gathers = self.size > 1
        if self._gathers:
            self._or_lost(self._open_control)

    def _open_control(self) -> None:
        self.control, self.saving = (dist.new_group(backend="gloo", timeout=TIMEOUT) for _ in range(2))

    def stop(self) -> None:
        """Leave the process group, if there is one."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def meet_again(self) -> None:
        """Abandon the groups and make new ones: work under way in the old ones is lost."""
        self._abort()
        self._meeting += 1
        self._or_lost(self._joined)

    def keep_pace(self, keeping: bool) -> None:
        """Set whether `in_step` work uses the short timeout after which a silent rank counts as dead."""
        for group in (self.pace, self.control):
            if group is not None:
                dist.distributed_c10d._set_pg_timeout(STEP_TIMEOUT if keeping else TIMEOUT, group)

    def any(self, flags: Sequence[bool], device: torch.device, in_step: bool = False) -> list[bool]:
        """Each flag, True if it is True on any rank, so that all ranks take the same decision.

        `in_step`: the ranks may keep pace here.
        """
        if self.size == 1:
            return list(flags)
        group = self.control or (self.pace if in_step else None)
        tensor = torch.tensor([float(flag) for flag in flags], device="cpu" if self.control else device)
        self._or_lost(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group))
        return [value > 0 for value in tensor.tolist()]

    def sum(self, tensors: Iterable[Tensor], in_step: bool = False) -> None:
        """Sum each tensor over all ranks, in place. `in_step` as for `any`."""
        if self.size > 1:
            everything = list(tensors)
            group = self.pace if in_step else None

            def add() -> None:
                for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in everything]:
                    work.wait()

            self._or_lost(add)

    def together(self, work: Callable[[], _T]) -> _T:
        """Do the work on every rank. If it fails on one, all stop: that rank with its error, the others quietly."""
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
        if failure is None or failures.index(str(failure)) < self.rank:
            raise OtherRankError("another rank failed")
        raise failure

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._or_lost(lambda: dist.all_gather_object(values, value, group=self.control))
        return values

    def in_lockstep(self, work: Callable[[], _T]) -> _T:
        """Do work that contains collectives. If memory runs out on one rank, all stop at once: that one with its
        error, the others with `OutOfMemoryElsewhereError`; if one is gone, with `LostRankError`."""
        ended = threading.Event()
        if self._on_gpu:
            threading.Thread(target=self._watch, args=(ended,), daemon=True).start()
        try:
            return work()
        except Exception as error:
            if is_out_of_memory(error):
                self._tell_trouble()
                raise
            lost = isinstance(error, LostRankError)
            if lost or isinstance(error, dist.DistError) or _COLLECTIVE.search(str(error)):
                if self._trouble(wait_s=0.0 if lost else _GRACE_S):
                    raise OutOfMemoryElsewhereError from None
                raise error if lost else self._lost(error) from None
            raise
        finally:
            ended.set()

    def _watch(self, ended: threading.Event) -> None:
        """Abort NCCL's group when another rank is in trouble: else this one would wait for it on the device.

        A gloo group waits for its timeout instead.
        """
        while not ended.wait(_LOOK_S):
            if self._trouble() and not ended.is_set():
                with suppress(Exception):
                    self.pace.abort()
                return

    def _tell_trouble(self) -> None:
        with suppress(Exception):  # the store may be gone with its host
            self._store.set(f"trouble/{self._meeting}", str(self.rank))
        self._abort()

    def _trouble(self, wait_s: float = 0.0) -> bool:
        """Whether a rank has reported that its memory ran out, since the groups were made."""
        until = time.monotonic() + wait_s
        with suppress(Exception):
            while not self._store.check([f"trouble/{self._meeting}"]):
                if time.monotonic() >= until:
                    return False
                time.sleep(0.05)
            return True
        return False

    def _abort(self) -> None:
        """Close all connections, so that no rank waits for this one."""
        if dist.is_initialized():
            with suppress(Exception):
                dist.distributed_c10d._abort_process_group()

    def _or_lost(self, work: Callable[[], _T]) -> _T:
        """Do the work. If another rank is gone or silent, raise `LostRankError` instead of hanging."""
        try:
            return work()
        except (RuntimeError, dist.DistError) as error:
            if is_out_of_memory(error):
                raise
            raise self._lost(error) from None

    def _lost(self, error: Exception) -> LostRankError:
        """The error that says who is gone: reported by the lowest remaining rank; the others raise quietly."""
        said = re.sub(r"^\[\S+\] ", "", str(error))  # without gloo's source line
        reason = said.splitlines()[0][:200].rstrip(".") if said else type(error).__name__
        left = self._who_is_left()
        gone = [rank for rank in range(self.size) if rank not in left]
        if left and min(left) != self.rank:
            return LostRankError(f"rank {self.rank} lost contact", tells=False)
        if not gone or not left:
            return LostRankError(f"rank {self.rank} lost contact with another rank: {reason}")
        hosts = {rank: f" ({host})" for rank, host in enumerate(self.hosts)} if len(self.hosts) == self.size else {}
        names = ", ".join(f"rank {rank}{hosts.get(rank, '')}" for rank in gone)
        return LostRankError(f"{names} is gone or hangs: rank {self.rank} lost contact: {reason}")

    def _who_is_left(self) -> list[int]:
        """The ranks that report within a few seconds, this one included; empty if the store is gone too."""
        if self._store is None:
            return []
        try:
            keys = [f"left/{self._meeting}/{rank}" for rank in range(self.size)]
            self._store.set(keys[self.rank], "")
            self._abort()
            until = time.monotonic() + _GRACE_S
            while time.monotonic() < until and not self._store.check(keys):
                time.sleep(0.1)
            return [rank for rank, key in enumerate(keys) if self._store.check([key])]
        except Exception:  # the store was on a host that is gone
            return []


def _life(store: Any, rank: int, size: int) -> str:
    """A name for this start of the job, known to all ranks: torchrun's store still has an earlier start's entries."""
    mine = uuid4().hex
    if rank:
        store.set(f"oomph/hello/{rank}", mine)
        store.wait([f"oomph/welcome/{mine}"], TIMEOUT)
        life: str = store.get(f"oomph/welcome/{mine}").decode()
        store.set(f"oomph/accepted/{life}/{rank}", "")
        return life
    missing, until = set(range(1, size)), time.monotonic() + TIMEOUT.total_seconds()
    while missing:
        for other in sorted(missing):  # a greeted rank may be dead: then its successor answers in its place
            if store.check([f"oomph/hello/{other}"]):
                store.set(f"oomph/welcome/{store.get(f'oomph/hello/{other}').decode()}", mine)
            if store.check([f"oomph/accepted/{mine}/{other}"]):
                missing.remove(other)
        if time.monotonic() > until:
            raise RuntimeError(f"timed out waiting for ranks {sorted(missing)}")
        time.sleep(_PAUSE_S)
    return mine


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
    return Ranks(rank, local_rank, size, launched=True)
