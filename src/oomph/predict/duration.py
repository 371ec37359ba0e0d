"""How long the whole run takes, and how well it uses the device: the step's time, and what comes beside the steps."""

from __future__ import annotations

import msgspec

from oomph.config import TrainConfig
from oomph.devices import Device
from oomph.predict import clock, extras
from oomph.step.ops import Step
from oomph.units import MIB

NANOGPT_PEAK_FLOPS = 312e12  # nanoGPT's estimate_mfu divides by an A100's bfloat16 peak, whatever the card


class Time(msgspec.Struct, frozen=True):
    """How long, and how well the device is used."""

    step_ms: float
    micro_step_ms: float
    tokens_per_s: float
    tflops: float  # nanoGPT's count of useful arithmetic, a second and device
    mfu: float | None  # of this device's own peak
    mfu_nanogpt: float  # of 312 TFLOPS: what nanoGPT prints, as a fraction
    hours: float  # the whole run: its steps, evaluations, checkpoints, and compiling
    low_hours: float
    high_hours: float
    train_hours: float
    eval_hours: float
    evaluations: int
    checkpoint_hours: float
    checkpoints: int
    checkpoint_mib: float  # the size of one
    compile_s: float  # in the first step, once; 0 where nothing is compiled
    low_ms: float
    high_ms: float
    basis: str  # "predicted", or "given" where the user gave the step time


def tokens_per_step(config: TrainConfig) -> int:
    """Tokens to one optimizer step, over all devices."""
    return config.batch_size * config.block_size * config.gradient_accumulation_steps


def predict_time(
    config: TrainConfig,
    device: Device,
    flops_per_step: float,  # useful ones, over all devices
    times: clock.Times | None,
    later: Step,  # one after the first: what it finds in memory is what a checkpoint holds
    step_ms: float | None = None,
) -> Time | None:
    """The run at the predicted step times, or at the one given. None where neither is there."""
    if times is not None:
        low_ms, likely_ms, high_ms = (each.step_s * 1e3 for each in (times.low, times.likely, times.high))
        eval_batch_s = times.likely.eval_batch_s * (step_ms / likely_ms if step_ms is not None else 1.0)
    elif step_ms is None:
        return None
    else:
        eval_batch_s = 0.0
    if step_ms is not None:
        low_ms = likely_ms = high_ms = step_ms
    flops_per_s = flops_per_step / config.world_size / (likely_ms / 1e3)
    peak = device.peak_tflops(config.dtype or "float32", config.allow_tf32)
    train_hours = 0.0 if config.eval_only else likely_ms * config.max_iters / 3.6e6
    beside = extras.extras(config, later, eval_batch_s, train_hours, device.kind == "cpu")
    return Time(
        step_ms=likely_ms,
        micro_step_ms=likely_ms * config.world_size / config.gradient_accumulation_steps,
        tokens_per_s=tokens_per_step(config) / (likely_ms / 1e3),
        tflops=flops_per_s / 1e12,
        mfu=flops_per_s / (peak * 1e12) if peak else None,
        mfu_nanogpt=flops_per_s / NANOGPT_PEAK_FLOPS,
        hours=beside.hours(train_hours),
        low_hours=beside.hours(train_hours, low_ms / likely_ms, extras.COMPILE_LOW),
        high_hours=beside.hours(train_hours, high_ms / likely_ms, extras.COMPILE_HIGH),
        train_hours=train_hours,
        eval_hours=beside.eval_s / 3600,
        evaluations=beside.evaluations,
        checkpoint_hours=beside.checkpoint_s / 3600,
        checkpoints=beside.checkpoints,
        checkpoint_mib=beside.checkpoint_bytes / MIB,
        compile_s=beside.compile_s,
        low_ms=low_ms,
        high_ms=high_ms,
        basis="given" if step_ms is not None else "predicted",
    )
