"""Children that run a job, and what the driver says of the card while one does."""

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

from oomph.checking.wire import Done, Failed, Job, Message, Stepped
from oomph.devices.rates import child_environment
from oomph.runs.nvml import Sampler, sampler

SAMPLE_S = 0.25  # between looks at the card's power: NVML itself renews it about every 0.1 s
LAST_WORDS = 400  # of a child that died, for the report


def run_job(job: Job, on_step: Callable[[Stepped], None], on_start: Callable[[int], None]) -> Done | Failed:
    """Run the job in a process of its own. Whatever becomes of it, it is gone afterwards."""
    command = [sys.executable, "-m", "oomph.checking.child"]
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=child_environment()
        )
        try:
            on_start(child.pid)
            return _listen(child, job, on_step) or _died(child.wait(), errors)
        finally:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    _close(pipe)


def _listen(child: subprocess.Popen[bytes], job: Job, on_step: Callable[[Stepped], None]) -> Done | Failed | None:
    """The child's last message; None where it ended without one."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(msgspec.json.encode(job))
        child.stdin.close()
    except BrokenPipeError:
        return None  # it died before it could listen: its exit says why
    for line in child.stdout:
        message: Message = msgspec.json.decode(line, type=Message)
        if not isinstance(message, Stepped):
            return message
        on_step(message)
    return None


def _close(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:
        return


def _died(status: int, errors: IO[bytes]) -> Failed:
    if status == -signal.SIGKILL:  # no program does that to itself: Linux does, to whoever takes the last memory
        return Failed("the system killed it, as Linux does to a process for which no memory is left", True)
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - LAST_WORDS))
    words = errors.read().decode(errors="replace").strip().splitlines()
    return Failed(f"it ended with status {status}: {words[-1] if words else 'it said nothing'}", False)


class PowerWatch:
    """While entered, notes what the card draws on which a process computes."""

    def __init__(self, look: Sampler | None = None, sample_s: float = SAMPLE_S) -> None:
        self._look, self._sample_s = look or sampler(), sample_s
        self._process = 0
        self.seen: list[float] = []  # watts
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def follow(self, process: int) -> None:
        """The process whose card it is."""
        self._process = process
        self._thread.start()

    def restart(self) -> None:
        """Forget what was drawn so far: the first step compiles, and the card waits."""
        self.seen.clear()

    def watts(self) -> float | None:
        """The middle of what was seen; None where the driver tells nothing."""
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
