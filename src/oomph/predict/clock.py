"""Seconds: a roofline over the operations of a step.

The device works through its kernels one after another; the host prepares them one after another, ahead of it. A
micro-step takes as long as the slower of the two. Each figure comes with a best and a worst case.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from oomph.config import TrainConfig
from oomph.devices import Device
from oomph.predict.kernels import BEST, LIKELY, WORST, Assumptions, Program, op_seconds
from oomph.step.ops import Kernel, Op, Phase, Step

PADDING_SINCE = (2, 2)  # inductor pads matrix products whose extents are not aligned (its shape_padding)


class Seconds(msgspec.Struct, frozen=True):
    """What one optimizer step and one evaluation batch take."""

    step_s: float
    eval_batch_s: float


class _Work(NamedTuple):
    """A section's operations, each kind once with how often it occurs."""

    times: int
    evaluates: bool
    ops: list[tuple[Op, int]]


class Times(msgspec.Struct, frozen=True):
    """The likely time, and an honest low and high."""

    low: Seconds
    likely: Seconds
    high: Seconds


def predict_times(step: Step, config: TrainConfig, device: Device) -> Times | None:
    """How long the step takes on the device; None where the device's rates are not known."""
    if not device.bandwidth_gbs or not device.peak_tflops(config.dtype or "float32", config.allow_tf32):
        return None
    program = Program(
        allow_tf32=config.allow_tf32,
        efficient=config.attention == "efficient",
        pads=config.compile and torch_release(config.torch_version) >= PADDING_SINCE,
    )
    works = _works(step)
    return Times(*(_run(works, config.compile, device, program, assume) for assume in (BEST, LIKELY, WORST)))


def torch_release(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13" or "2.13.0"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _works(step: Step) -> list[_Work]:
    """The step's operations by kind: a model's blocks repeat, so that few of them are really different."""
    works = []
    for section in step.sections:
        counts: dict[tuple[object, ...], list[Any]] = {}
        for op in section.ops:
            key = (op.kernel, op.phase, op.shape, op.dtype, op.flops, op.bytes_moved)
            found = counts.get(key)
            if found is None:
                counts[key] = [op, 1]
            else:
                found[1] += 1
        evaluates = bool(section.ops) and section.ops[0].phase is Phase.EVAL
        works.append(_Work(section.times, evaluates, [(op, count) for op, count in counts.values()]))
    return works


def _run(works: list[_Work], compiled: bool, device: Device, program: Program, assume: Assumptions) -> Seconds:
    host_s = 0.0 if device.kind == "cpu" else assume.compiled_host_s if compiled else assume.eager_host_s
    known: dict[tuple[object, ...], float] = {}
    step_s = eval_s = 0.0
    for work in works:
        device_s, kernels = 0.0, 0
        for op, count in work.ops:
            key = (op.kernel, op.phase, op.shape, op.dtype, op.flops, op.bytes_moved)
            seconds = known.get(key)
            if seconds is None:
                seconds = known[key] = op_seconds(op, device, program, assume)
            device_s += count * seconds
            kernels += count * (op.kernel is not Kernel.NONE)
        seconds = max(device_s, host_s * kernels)
        if work.evaluates:
            eval_s = seconds  # the last of them: a later batch, not the first
        else:
            step_s += work.times * seconds
    return Seconds(step_s, eval_s)
