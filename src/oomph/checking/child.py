"""`python -m oomph.checking.child`: reads a job from standard input, runs its steps, writes what they took.

A separate process, so that the memory is only the run's and a crash does not take `oomph check` down.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from oomph.checking.assemble import make_program
from oomph.checking.launch import Job, JobDone, JobFailed, JobRefused, Message, StepDone
from oomph.checking.programs import OutOfMemoryInStepError
from oomph.errors import InputError
from oomph.training.errors import TrainingError, is_out_of_memory
from oomph.training.memory import MemoryMeter, return_freed_memory
from oomph.units import MIB


def peak_allocated_bytes(work: Callable[[], object]) -> int:
    """The peak of torch's CPU allocations during `work`, in bytes, by torch's profiler.

    Build the model inside `work`: the profiler counts only memory whose allocation it saw.
    """
    gc.collect()  # what an earlier profile saw allocated would be freed in this one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    if results is None:
        return 0
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    held = highest = 0
    for _, change in sorted(changes, key=lambda moment: moment[0]):
        held += change
        highest = max(highest, held)
    return highest


def run(job: Job, tell: Callable[[Message], None]) -> None:
    """Run the job's steps; report each when it is done, and at the end what they took."""
    if torch.device(job.device).type == "cuda" and job.config.allow_tf32:
        torch.set_float32_matmul_precision("high")
    try:
        tell(_allocations(job, tell) if job.allocations else _measured(job, tell))
    except InputError as error:
        tell(JobRefused(error.problems))
    except Exception as error:
        words = str(error).strip().splitlines() or [""]
        starved = isinstance(error, OutOfMemoryInStepError) or is_out_of_memory(error)
        starved = starved or (isinstance(error, TrainingError) and "out of memory" in words[0])
        tell(JobFailed(f"{type(error).__name__}: {words[0]}", starved))


def do_steps(job: Job, tell: Callable[[Message], None]) -> None:
    """Build the job's program and run its steps, and one before them that compiles and warms up."""

    def done(step: StepDone) -> None:
        tell(step)
        if step.step == 0:
            gc.collect()  # compiling leaves the first logits in a reference cycle: when they go would be chance

    make_program(job).run(job.steps + 1, done)


def _allocations(job: Job, tell: Callable[[Message], None]) -> JobDone:
    """torch's peak allocation on a CPU."""
    return JobDone(peak_allocated_bytes(lambda: do_steps(job, tell)) / MIB, None, None)


def _measured(job: Job, tell: Callable[[Message], None]) -> JobDone:
    """Time, and the memory of the device's allocator or the process."""
    device = torch.device(job.device)
    if device.type == "cpu" and job.config.trainer == "oomph":
        return_freed_memory()  # as oomph train does
    meter = MemoryMeter(device)
    do_steps(job, tell)
    if device.type == "cpu":
        return JobDone(None, None, meter.peak_mib(), meter.began_mib)
    return JobDone(meter.peak_mib(), meter.reserved_mib(), _on_the_card())


def _on_the_card() -> float | None:
    """MiB that nvidia-smi shows for this process; None if the driver does not report it, as in some containers."""
    from oomph.devices.nvml import sampler

    for sample in sampler()():
        for process, size_mib in sample.processes:
            if process == os.getpid():
                return size_mib
    return None


def main() -> None:
    """Run the job. Messages go to the real standard output; anything else printed goes to standard error."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(message: Message) -> None:
        answers.write(msgspec.json.encode(message) + b"\n")
        answers.flush()

    run(job, tell)


if __name__ == "__main__":
    main()
