"""How long the whole run takes: steps, compiling, evaluations, checkpoints; and how well it uses the device."""

from __future__ import annotations

import msgspec

from oomph.config import TrainConfig
from oomph.config.lengths import mean_length
from oomph.config.schema import eval_tokens
from oomph.devices import Device
from oomph.predict import clock
from oomph.step.ops import Kind, Step
from oomph.step.parameters import parameters
from oomph.units import MIB

NANOGPT_PEAK_FLOPS = 312e12  # nanoGPT's estimate_mfu divides by an A100's bfloat16 peak whatever the card
# Seconds that torch.compile takes for one transformer block, forward and backward, including nanoGPT's evaluation
# graph: inductor works through the unrolled graph node by node, so the time grows with the layers. Published:
# nanoGPT, 4 layers, 6.8 s (nanoGPT pull request 392: a first iteration of 7.96 s compiled against 1.17 s eager);
# 12 layers on an RTX 4070, a first iteration of 32 s, a step of 3.9 s included. A compile cache that is warm from
# an earlier run of the same model takes the least, a slow or busy host the most.
COMPILE_S_PER_LAYER = 2.0
# On a CPU a C++ compiler does the work: 28 s of processor time for 2 layers and 54 s for 6, measured on one core of an
# AMD EPYC with torch 2.13.
CPU_COMPILE_S, CPU_COMPILE_S_PER_LAYER = 15.0, 6.5
COMPILE_LOW, COMPILE_HIGH = 0.25, 2.5  # times the likely compile time
CHECKPOINT_BYTES_PER_S = 500e6  # assumed: a SATA solid-state drive, and torch.save in one thread
OOMPH_SAVE_HOURS = 0.25  # oomph train saves at least this often (its --save_minutes)


class Time(msgspec.Struct, frozen=True):
    """The whole run's hours, and how well its steps use the device."""

    step_ms: float
    micro_step_ms: float
    tokens_per_s: float
    tflops: float  # useful arithmetic by nanoGPT's count, per second and device
    mfu: float | None  # relative to this device's own peak
    mfu_nanogpt: float  # relative to 312 TFLOPS: what nanoGPT prints, as a fraction
    hours: float  # the whole run: its steps, evaluations, checkpoints, and compiling
    low_hours: float
    high_hours: float
    train_hours: float
    eval_hours: float
    evaluations: int
    checkpoint_hours: float
    checkpoints: int
    checkpoint_mib: float  # the size of one checkpoint
    compile_s: float  # once, in the first step; 0 without torch.compile
    low_ms: float
    high_ms: float
    tokens_per_s_per_gpu: float  # `tokens_per_s` counts all GPUs
    communication_ms: float  # the step's collectives; 0 on one device
    exposed_ms: float  # the part of it that the step waits for
    basis: str  # "predicted", or "given" where the user gave the step time


def tokens_per_step(config: TrainConfig) -> int:
    """Tokens in one optimizer step, over all devices, without padding."""
    length = config.block_size if config.packing == "packed" else mean_length(config)
    return config.batch_size * length * config.gradient_accumulation_steps


def predict_time(
    config: TrainConfig,
    device: Device,
    flops_per_step: float,  # useful FLOPs, over all devices
    times: clock.Times | None,
    later: Step,  # any step but the first: a checkpoint holds its resident buffers
    step_ms: float | None = None,
) -> Time | None:
    """The run at the predicted step times, or at `step_ms` if given; None if neither is known."""
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
    others = extras(config, later, eval_batch_s, train_hours, device.kind == "cpu")
    return Time(
        step_ms=likely_ms,
        micro_step_ms=likely_ms * config.world_size / config.gradient_accumulation_steps,
        tokens_per_s=tokens_per_step(config) / (likely_ms / 1e3),
        tflops=flops_per_s / 1e12,
        mfu=flops_per_s / (peak * 1e12) if peak else None,
        mfu_nanogpt=flops_per_s / NANOGPT_PEAK_FLOPS,
        hours=others.hours(train_hours),
        low_hours=others.hours(train_hours, low_ms / likely_ms, COMPILE_LOW),
        high_hours=others.hours(train_hours, high_ms / likely_ms, COMPILE_HIGH),
        train_hours=train_hours,
        eval_hours=others.eval_s / 3600,
        evaluations=others.evaluations,
        checkpoint_hours=others.checkpoint_s / 3600,
        checkpoints=others.checkpoints,
        checkpoint_mib=others.checkpoint_bytes / MIB,
        compile_s=others.compile_s,
        low_ms=low_ms,
        high_ms=high_ms,
        tokens_per_s_per_gpu=tokens_per_step(config) / config.world_size / (likely_ms / 1e3),
        communication_ms=times.likely.communication_s * 1e3 if times is not None else 0.0,
        exposed_ms=times.likely.exposed_s * 1e3 if times is not None and step_ms is None else 0.0,
        basis="given" if step_ms is not None else "predicted",
    )


class Extras(msgspec.Struct, frozen=True):
    """What a run does besides its steps: totals over the whole run."""

    compile_s: float  # once per run
    evaluations: int
    eval_s: float  # all evaluations
    checkpoints: int
    checkpoint_bytes: int  # of each checkpoint
    checkpoint_s: float  # all checkpoints

    def hours(self, train_hours: float, pace: float = 1.0, compiling: float = 1.0) -> float:
        """Hours of the whole run if steps and evaluations take `pace` times as long as expected."""
        fixed_s = self.compile_s * compiling + self.checkpoint_s
        return (train_hours + self.eval_s / 3600) * pace + fixed_s / 3600


def extras(config: TrainConfig, later: Step, eval_batch_s: float, train_hours: float, on_cpu: bool) -> Extras:
    """Compiling, evaluations and checkpoints. `eval_batch_s` is one batch's; an evaluation reads two splits."""
    evaluations = 1 if config.eval_only else config.max_iters // config.eval_interval + 1  # one before the first step
    size = checkpoint_bytes(config, later)
    batches = eval_tokens(config) / (config.batch_size * config.block_size)
    saved = _checkpoints(config, evaluations, train_hours)
    return Extras(
        compile_s=compile_s(config, on_cpu),
        evaluations=evaluations,
        eval_s=2 * batches * evaluations * eval_batch_s,
        checkpoints=saved,
        checkpoint_bytes=size,
        checkpoint_s=saved * size / CHECKPOINT_BYTES_PER_S,
    )


def compile_s(config: TrainConfig, on_cpu: bool) -> float:
    """Seconds that the first step spends compiling; 0 without torch.compile."""
    if not config.compile:
        return 0.0
    if on_cpu:
        return CPU_COMPILE_S + CPU_COMPILE_S_PER_LAYER * config.n_layer
    return COMPILE_S_PER_LAYER * config.n_layer


def checkpoint_bytes(config: TrainConfig, step: Step) -> int:
    """Bytes of a checkpoint: the weights (with adapters, only the trained ones) and the optimizer's
    state."""
    weights = [buffer for buffer in step.resident if buffer.kind is Kind.PARAMETERS]
    if config.method != "full":
        trained = {parameter.name for parameter in parameters(config) if parameter.trained}
        weights = [buffer for buffer in weights if buffer.name in trained]
    return sum(buffer.bytes for buffer in (*weights, *(b for b in step.resident if b.kind is Kind.OPTIMIZER)))


def _checkpoints(config: TrainConfig, evaluations: int, train_hours: float) -> int:
    """The number of checkpoints: nanoGPT's after evaluations but the first; oomph's also by the clock, and last."""
    if config.eval_only:
        return 0
    if config.trainer == "oomph":
        return max(evaluations - 1, int(train_hours / OOMPH_SAVE_HOURS)) + 1
    return evaluations - 1
