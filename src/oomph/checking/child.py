"""`python -m oomph.checking.child`: a job on standard input, its steps for real, what they took on standard output.

A process of its own: its memory is the run's alone, and what kills it does not kill who asked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import msgspec
import torch

from oomph.checking.programs import OutOfRoomError, make_program
from oomph.checking.wire import Done, Failed, Job, Message
from oomph.training.failure import TrainingError, is_out_of_memory
from oomph.training.memory import MemoryMeter, return_freed_memory
from oomph.units import MIB

Tell = Callable[[Message], None]


def run(job: Job, tell: Tell) -> None:
    """Do the job's steps, each told as it is done, and then what they took."""
    if torch.device(job.device).type == "cuda" and job.config.allow_tf32:
        torch.set_float32_matmul_precision("high")
    try:
        tell(_watched(job, tell) if job.allocations else _measured(job, tell))
    except Exception as error:
        words = str(error).strip().splitlines() or [""]
        starved = isinstance(error, OutOfRoomError) or is_out_of_memory(error)
        starved = starved or (isinstance(error, TrainingError) and "out of memory" in words[0])
        tell(Failed(f"{type(error).__name__}: {words[0]}", starved))


def _steps(job: Job, tell: Tell) -> None:
    program = make_program(job)
    for _ in range(job.steps + 1):
        tell(program.do_step())


def _watched(job: Job, tell: Tell) -> Done:
    """torch's own allocations on a CPU."""
    from oomph.checking.allocations import watch_allocations

    return Done(watch_allocations(lambda: _steps(job, tell)) / MIB, None, None)


def _measured(job: Job, tell: Tell) -> Done:
    """Time, and the memory that the device's allocator or the process has taken."""
    device = torch.device(job.device)
    if device.type == "cpu" and job.config.trainer == "oomph":
        return_freed_memory()  # as oomph train does
    meter = MemoryMeter(device)
    _steps(job, tell)
    if device.type == "cpu":
        return Done(None, None, meter.peak_mib(), meter.began_mib)
    return Done(meter.peak_mib(), meter.reserved_mib(), _on_the_card())


def _on_the_card() -> float | None:
    """What nvidia-smi shows for this process; None where the driver does not tell (in some containers)."""
    from oomph.runs.nvml import sampler

    for sample in sampler()():
        for process, size_mib in sample.processes:
            if process == os.getpid():
                return size_mib
    return None


def main() -> None:
    """Answers go to the real standard output; whatever else prints, prints to standard error."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(message: Message) -> None:
        answers.write(msgspec.json.encode(message) + b"\n")
        answers.flush()

    run(job, tell)


if __name__ == "__main__":
    main()
