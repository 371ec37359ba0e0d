"""Seconds of a step: a roofline over its operations.

The device runs its kernels one after another; the host launches them one after another, ahead of the device. A
micro-step takes as long as the slower of the two. Each figure comes with a best and a worst case.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from oomph.config import TrainConfig
from oomph.config.programs import release
from oomph.config.sharing import untimed_keys
from oomph.devices import Device
from oomph.predict.cpu_kernels import KEPT_BYTES, OOMPH_KEPT_BYTES
from oomph.predict.gpu_kernels import (
    BEST,
    EARLY_COMPILED,
    EFFICIENT_SLOWDOWN,
    FLASH_1_SLOWDOWN,
    LIKELY,
    WORST,
    Assumptions,
    KernelOptions,
    op_seconds,
)
from oomph.predict.links import Communication, overlapped, wires
from oomph.step.ops import COLLECTIVES, Kernel, Op, Phase, Section, Step

# Since this version of torch ...
PADDING_SINCE = (2, 2)  # inductor pads matrix products whose extents are not aligned (its shape_padding)
QUICK_LAUNCH_SINCE = (2, 2)  # compiled kernels launch quickly; the figures for slow launches are from 2.0 and 2.1
FLASH_2_SINCE = (2, 2)  # scaled_dot_product_attention runs FlashAttention-2
NO_LAUNCH = (Kernel.NONE, Kernel.WAIT)
READING = {Phase.FORWARD, Phase.EVAL}  # phases that begin with a batch


class Seconds(msgspec.Struct, frozen=True):
    """Seconds of one optimizer step and of one evaluation batch."""

    step_s: float
    eval_batch_s: float
    communication_s: float = 0.0  # for all of the step's collectives
    exposed_s: float = 0.0  # the part of it that the step waits for


class Work(NamedTuple):
    """A section's operations, each kind once with its count."""

    times: int
    evaluates: bool
    reads: bool  # whether the host prepares a batch for it
    ops: list[tuple[object, Op, int]]  # (key of the kind, one operation of it, how many)
    ordered: tuple[Op, ...] = ()  # all of them in order, if there are collectives among them


class Times(msgspec.Struct, frozen=True):
    """The likely time, and the best and the worst case."""

    low: Seconds
    likely: Seconds
    high: Seconds


def is_timed(config: TrainConfig, device: Device) -> bool:
    """Whether the device's rates are known, and everything that the config's step waits for."""
    rates = device.bandwidth_gbs and device.peak_tflops(config.dtype or "float32", config.allow_tf32)
    return bool(rates) and not untimed_keys(config)


def predict_times(step: Step, config: TrainConfig, device: Device) -> Times | None:
    """How long the step takes on the device; None if that is unknown."""
    if not is_timed(config, device):
        return None
    options, works = kernel_options(config), works_of(step.sections, device)
    return Times(*(_run(works, config, device, options, assume) for assume in (BEST, LIKELY, WORST)))


def likely_sections_s(works: list[Work], config: TrainConfig, device: Device) -> list[float] | None:
    """The likely seconds of each section, run once; None if they are unknown. For searches."""
    if not is_timed(config, device):
        return None
    return [seconds for seconds, _ in _seconds(works, config, device, kernel_options(config), LIKELY)]


def kernel_options(config: TrainConfig) -> KernelOptions:
    """The kernel options that follow from the config and the version of torch."""
    torch = release(config.torch_version)
    own_flash = config.model_type == "qwen"  # it calls flash-attn 2 itself
    flash = 1.0 if own_flash or torch >= FLASH_2_SINCE else FLASH_1_SLOWDOWN
    return KernelOptions(
        allow_tf32=config.allow_tf32,
        attention_slowdown=EFFICIENT_SLOWDOWN if config.attention == "efficient" else flash,
        pads=config.compile and torch >= PADDING_SINCE,
        kept_bytes=OOMPH_KEPT_BYTES if config.trainer == "oomph" else KEPT_BYTES,
        rows=config.batch_size * config.block_size,
    )


def reads_batch(section: Section) -> bool:
    """Whether the host prepares a batch for the section."""
    return any(op.phase in READING for op in section.ops)


def host_seconds(kernels: int, reads: bool, config: TrainConfig, device: Device, assume: Assumptions) -> float:
    """The host's seconds for a section: it launches kernels and, in nanoGPT, prepares the next batch between them."""
    if device.kind == "cpu":
        return 0.0
    kernel_s = assume.compiled_host_s if config.compile else assume.eager_host_s
    if config.compile and release(config.torch_version) < QUICK_LAUNCH_SINCE:
        kernel_s *= EARLY_COMPILED
    reading_s = 2 * config.batch_size * assume.sample_host_s if reads and config.trainer == "nanogpt" else 0.0
    return kernels * kernel_s + reading_s  # oomph's trainer reads in a separate thread


def works_of(sections: Sequence[Section], device: Device) -> list[Work]:
    """The sections' operations counted by kind: a model's blocks repeat, so there are few kinds."""
    kind_of = _cpu_kind if device.cpu_rates is not None else _kind
    works = []
    for section in sections:
        counts: dict[object, list[Any]] = {}
        shared = any(op.kernel in COLLECTIVES for op in section.ops)
        for op in section.ops:
            kind = kind_of(op)
            found = counts.get(kind)
            if found is None:
                counts[kind] = [op, op.times]
            else:
                found[1] += op.times
        evaluates = bool(section.ops) and section.ops[0].phase is Phase.EVAL
        ops = [(kind, op, count) for kind, (op, count) in counts.items()]
        works.append(Work(section.times, evaluates, reads_batch(section), ops, section.ops if shared else ()))
    return works


def _kind(op: Op) -> object:
    """A key of which equal operations take equal time on a GPU."""
    return (op.kernel, op.phase, op.shape, op.dtype, op.flops, op.bytes_moved)


def _cpu_kind(op: Op) -> object:
    """The same for a CPU, where the time also depends on the function computed and on new buffers."""
    return (_kind(op), *op.name.split(".")[-2:], *(buffer.bytes for buffer in op.allocates))


def _run(
    works: list[Work], config: TrainConfig, device: Device, options: KernelOptions, assume: Assumptions
) -> Seconds:
    step_s = eval_s = total_s = exposed_s = 0.0
    for work, (seconds, shared) in zip(works, _seconds(works, config, device, options, assume), strict=True):
        if work.evaluates:
            eval_s = seconds  # of the last section, not the run's first batch
        else:
            step_s += work.times * seconds
            total_s += work.times * shared.total_s
            exposed_s += work.times * shared.exposed_s
    return Seconds(step_s, eval_s, total_s, exposed_s)


def _seconds(
    works: list[Work], config: TrainConfig, device: Device, options: KernelOptions, assume: Assumptions
) -> Iterator[tuple[float, Communication]]:
    """Each section's seconds, run once: the device's or the host's, whichever is slower; and its collectives."""
    ratio = device.compiled_ratio if config.compile else device.eager_ratio
    joined = wires(config, device)
    known: dict[object, float] = {}
    for work in works:
        device_s, kernels = 0.0, 0
        for kind, op, count in work.ops:
            seconds = known.get(kind)
            if seconds is None:
                seconds = known[kind] = op_seconds(op, device, options, assume)
            device_s += count * seconds
            kernels += count * (op.kernel not in NO_LAUNCH)
        host_s = host_seconds(kernels, work.reads, config, device, assume)
        shared = Communication(0.0, 0.0)
        if work.ordered:
            shared = overlapped(work.ordered, joined, assume, known, _kind)
            if joined is not None:
                shared = shared.slowing(joined.slowdown(device.sm_count))
        alone_s = ratio * max(device_s, host_s)
        whole_s = max(ratio * device_s + shared.exposed_s, ratio * host_s)
        yield whole_s, Communication(shared.total_s, whole_s - alone_s)
