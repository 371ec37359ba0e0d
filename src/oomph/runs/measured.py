"""`Measured`: the figures of one run that a comparison or an explanation rests on."""

from __future__ import annotations

import msgspec

from oomph.runs.infer import Inference, infer
from oomph.runs.model import Run
from oomph.runs.pace import NANOGPT_PEAK_FLOPS, Pace, nanogpt_flops_per_step, pace


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run's figures; None where the log does not tell."""

    run: Run
    inference: Inference
    pace: Pace | None
    params: int | None  # as nanoGPT counts them
    tokens_per_step: int | None
    flops_per_token: float | None
    workers: int
    tokens_per_s: float | None
    tflops: float | None  # useful arithmetic a second and device, by nanoGPT's formula
    mfu_nanogpt: float | None  # of an A100's 312 TFLOPS, as nanoGPT prints it
    mfu: float | None  # of the card's own peak
    peak_tflops: float | None

    @property
    def name(self) -> str:
        return self.run.name

    def value(self, key: str) -> object:
        """A setting's value; None where it is not known."""
        setting = self.inference.settings.get(key)
        return None if setting is None else setting.value

    def memory_mib(self) -> tuple[float, str] | None:
        """The most memory that was seen for the run, and whose figure it is."""
        run = self.run
        process, logged = run.process, run.steps.totals["memory_mib"]
        if process is not None:
            return process.most_mib, "nvidia-smi, the process"
        if run.printed.peak_allocated_mib is not None:
            return run.printed.peak_allocated_mib, "torch's peak, allocated"
        if logged.count:
            return logged.high, "as logged"
        failed = [oom.process_mib for oom in run.ooms if oom.process_mib is not None]
        if failed:
            return max(failed), "the process, when it ran out"
        gpu = run.gpu
        return (gpu.used_mib, "nvidia-smi, the whole card") if gpu is not None and gpu.used_mib is not None else None


def measure(run: Run, gpu: str | None = None) -> Measured:
    """The run's figures. `gpu` names the card where the log does not."""
    inference = infer(run, gpu)
    speed = pace(run)
    tokens, flops = inference.tokens_per_step, inference.flops_per_token
    world = inference.settings.get("world_size")
    workers = world.value if world is not None and type(world.value) is int else 1
    rate = _rate(run, speed, tokens)
    tflops = _tflops(run, speed, tokens, flops, workers)
    peak = _peak(inference)
    return Measured(
        run=run,
        inference=inference,
        pace=speed,
        params=_params(inference, run),
        tokens_per_step=tokens,
        flops_per_token=flops,
        workers=workers,
        tokens_per_s=rate,
        tflops=tflops,
        mfu_nanogpt=tflops * 1e12 / NANOGPT_PEAK_FLOPS if tflops else None,
        mfu=tflops / peak if tflops and peak else None,
        peak_tflops=peak,
    )


def _rate(run: Run, speed: Pace | None, tokens: int | None) -> float | None:
    if speed is not None and tokens:
        return tokens / speed.step_ms * 1e3
    return run.steps.totals["tokens_per_s"].mean


def _tflops(run: Run, speed: Pace | None, tokens: int | None, flops: float | None, workers: int) -> float | None:
    if speed is None:
        return None
    if tokens and flops:
        return flops * tokens / workers / speed.step_ms * 1e-9
    step = nanogpt_flops_per_step(run)
    return step / speed.step_ms * 1e-9 if step else None


def _peak(inference: Inference) -> float | None:
    device = inference.card.device
    if device is None:
        return None
    setting = inference.settings.get("dtype")
    dtype = setting.value if setting is not None and isinstance(setting.value, str) else None
    return device.peak_tflops(dtype or ("bfloat16" if device.has_bf16 else "float16"))


def _params(inference: Inference, run: Run) -> int | None:
    from oomph.step.params import count_nanogpt

    if inference.config is not None and run.program != "nanochat":
        return count_nanogpt(inference.config.config)
    return run.printed.params or run.printed.params_total
