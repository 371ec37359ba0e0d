"""Child processes that run a job, the messages between them and us, and the card's power meanwhile.

A message is one JSON object per line. Nothing here needs torch.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from types import TracebackType
from typing import IO

import msgspec

from oomph.config import TrainConfig
from oomph.devices.cpu_rates import child_environment, is_shared, let_threads_sleep
from oomph.devices.nvml import Sampler, sampler
from oomph.errors import Problem


class Job(msgspec.Struct, frozen=True):
    """What a child runs."""

    config: TrainConfig  # settled
    device: str  # torch's name: "cpu", "cuda", "cuda:1"
    steps: int  # optimizer steps after the first
    micro_steps: int  # in each step, at most the config's
    allocations: bool  # record torch's CPU allocations, which takes time, instead of timing
    data: str | None  # the folder with train.bin; None: random tokens
    model: str | None = None  # a Hugging Face config.json in place of the config's own model


class StepDone(msgspec.Struct, frozen=True, tag="step"):
    """One step is done, with its times."""

    step: int  # from 0, which compiles
    first_s: float  # its first micro-step
    rest_s: float  # the other micro-steps that ran
    end_s: float  # clipping and optimizer
    loss: float
    waited_s: float = 0.0  # of these times, while another program used the CPU
    processor_s: float = 0.0  # that this thread had the CPU


class JobDone(msgspec.Struct, frozen=True, tag="done"):
    """All steps are done, with the memory they took."""

    allocated_mib: float | None
    reserved_mib: float | None  # CUDA
    process_mib: float | None  # on a CPU the peak resident set; on a GPU as NVML reports it
    imports_mib: float | None = None  # of that, before the model


class JobFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The steps did not finish."""

    reason: str
    out_of_memory: bool


class JobRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Something is wrong with the config that only a child can detect."""

    problems: tuple[Problem, ...]


Ended = JobDone | JobFailed | JobRefused
Message = StepDone | Ended


SAMPLE_S = 0.25  # between power readings: NVML updates them about every 0.1 s
LAST_OUTPUT_BYTES = 400  # of a dead child's output, for the report


def run_job(job: Job, on_step: Callable[[StepDone], None], on_start: Callable[[int], None]) -> Ended:
    """Run the job in its own process, which never outlives the call."""
    command = [sys.executable, "-m", "oomph.checking.child"]
    environment = child_environment()
    if job.device == "cpu" and is_shared():
        let_threads_sleep(environment)
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment)
        try:
            on_start(child.pid)
            return _listen(child, job, on_step) or _died(child.wait(), errors)
        finally:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    _close(pipe)


def _listen(child: subprocess.Popen[bytes], job: Job, on_step: Callable[[StepDone], None]) -> Ended | None:
    """The child's last message; None if it ended without one."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(msgspec.json.encode(job))
        child.stdin.close()
    except BrokenPipeError:
        return None  # it died early: its exit status says why
    for line in child.stdout:
        message: Message = msgspec.json.decode(line, type=Message)
        if not isinstance(message, StepDone):
            return message
        on_step(message)
    return None


def _close(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:
        return


def _died(status: int, errors: IO[bytes]) -> JobFailed:
    if status == -signal.SIGKILL:  # most likely by Linux's out-of-memory killer
        return JobFailed("killed by the system, most likely for lack of memory", True)
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - LAST_OUTPUT_BYTES))
    words = errors.read().decode(errors="replace").strip().splitlines()
    return JobFailed(f"exit status {status}: {words[-1] if words else 'no output'}", False)


class PowerWatch:
    """A context that records the power of the card that a process runs on."""

    def __init__(self, look: Sampler | None = None, sample_s: float = SAMPLE_S) -> None:
        self._look, self._sample_s = look or sampler(), sample_s
        self._process = 0
        self.seen: list[float] = []  # watts
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def follow(self, process: int) -> None:
        """Record the card of this process."""
        self._process = process
        self._thread.start()

    def restart(self) -> None:
        """Drop what was recorded so far: the first step compiles while the card is idle."""
        self.seen.clear()

    def watts(self) -> float | None:
        """The median power in watts; None if the driver reports none."""
        return statistics.median(self.seen) if self.seen else None

    def _watch(self) -> None:
        while not self._over.wait(self._sample_s):
            samples = self._look()
            if not samples:
                return
            own = [s for s in samples if any(process == self._process for process, _ in s.processes)]
            for sample in own or (samples if len(samples) == 1 else []):
                if sample.watts is not None:
                    self.seen.append(sample.watts)

    def __enter__(self) -> PowerWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
