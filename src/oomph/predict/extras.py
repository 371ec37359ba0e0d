"""What a run takes beside its steps: the first step's compiling, evaluations, checkpoints."""

from __future__ import annotations

import msgspec

from oomph.config import TrainConfig
from oomph.step.ops import Kind, Step

# Seconds that torch.compile takes for one transformer block, forward and backward, and nanoGPT's evaluation graph
# beside them: inductor works through the unrolled graph node by node, so the time grows with the layers. Published:
# nanoGPT, 4 layers, 6.8 s (nanoGPT pull request 392: a first iteration of 7.96 s compiled against 1.17 s eager);
# 12 layers on an RTX 4070, a first iteration of 32 s with a step of 3.9 s in it. A compile cache that is warm from
# an earlier run of the same model takes the least, a slow or busy host the most.
COMPILE_S_PER_LAYER = 2.0
# On a CPU a C++ compiler does the work: 28 s for 2 layers and 54 s for 6 of processor time, measured on one core of an
# AMD EPYC with torch 2.13.
CPU_COMPILE_S, CPU_COMPILE_S_PER_LAYER = 15.0, 6.5
COMPILE_LOW, COMPILE_HIGH = 0.25, 2.5  # of that
CHECKPOINT_BYTES_PER_S = 500e6  # an assumption: a SATA solid-state drive, and torch.save in one thread
OOMPH_SAVE_HOURS = 0.25  # oomph train saves at least this often (its --save_minutes)


class Extras(msgspec.Struct, frozen=True):
    """Beside the steps, over the whole run."""

    compile_s: float  # once
    evaluations: int
    eval_s: float  # all of them
    checkpoints: int
    checkpoint_bytes: int  # each
    checkpoint_s: float  # all of them

    def hours(self, train_hours: float, pace: float = 1.0, compiling: float = 1.0) -> float:
        """The whole run, where steps and evaluations take `pace` times as long as expected."""
        fixed_s = self.compile_s * compiling + self.checkpoint_s
        return (train_hours + self.eval_s / 3600) * pace + fixed_s / 3600


def extras(config: TrainConfig, later: Step, eval_batch_s: float, train_hours: float, on_cpu: bool) -> Extras:
    """How often, how large, how long. `eval_batch_s` is one batch's; both programs evaluate two splits at a time."""
    evaluations = 1 if config.eval_only else config.max_iters // config.eval_interval + 1  # both begin with one
    size = checkpoint_bytes(later)
    saved = _checkpoints(config, evaluations, train_hours)
    return Extras(
        compile_s=compile_s(config, on_cpu),
        evaluations=evaluations,
        eval_s=2 * config.eval_iters * evaluations * eval_batch_s,
        checkpoints=saved,
        checkpoint_bytes=size,
        checkpoint_s=saved * size / CHECKPOINT_BYTES_PER_S,
    )


def compile_s(config: TrainConfig, on_cpu: bool) -> float:
    """Seconds that the first step spends compiling."""
    if not config.compile:
        return 0.0
    if on_cpu:
        return CPU_COMPILE_S + CPU_COMPILE_S_PER_LAYER * config.n_layer
    return COMPILE_S_PER_LAYER * config.n_layer


def checkpoint_bytes(step: Step) -> int:
    """Weights and the optimizer's state, as they lie in memory."""
    kept = (Kind.PARAMETERS, Kind.OPTIMIZER)
    return sum(buffer.bytes for buffer in step.resident if buffer.kind in kept)


def _checkpoints(config: TrainConfig, evaluations: int, train_hours: float) -> int:
    """nanoGPT saves after an evaluation, but not the first; oomph train by the clock too, and at the end."""
    if config.eval_only:
        return 0
    if config.trainer == "oomph":
        return max(evaluations - 1, int(train_hours / OOMPH_SAVE_HOURS)) + 1
    return evaluations - 1
