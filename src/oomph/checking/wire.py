"""What the checking process and its children tell each other: one JSON object a line, no torch."""

from __future__ import annotations

import msgspec

from oomph.config import TrainConfig


class Job(msgspec.Struct, frozen=True):
    """What a child is to run."""

    config: TrainConfig  # settled
    device: str  # torch's name: "cpu", "cuda", "cuda:1"
    steps: int  # optimizer steps after the first
    micro_steps: int  # of each step, at most what the config has
    allocations: bool  # watch torch's CPU allocator, which takes time, instead of the clock
    data: str | None  # the folder with train.bin; None: random tokens


class Stepped(msgspec.Struct, frozen=True, tag="step"):
    """A step is done."""

    step: int  # from 0, the one that compiles
    first_s: float  # its first micro-step
    rest_s: float  # the other micro-steps that ran
    end_s: float  # clipping and optimizer
    loss: float
    waited_s: float = 0.0  # of all that, while another program had this one's CPU


class Done(msgspec.Struct, frozen=True, tag="done"):
    """All steps are done, and this is what they took."""

    allocated_mib: float | None
    reserved_mib: float | None  # CUDA
    process_mib: float | None  # on a CPU the process's largest resident set; on a GPU what NVML tells
    imports_mib: float | None = None  # of that, what was there before the model


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The program did not get through its steps."""

    reason: str
    out_of_memory: bool


Message = Stepped | Done | Failed
