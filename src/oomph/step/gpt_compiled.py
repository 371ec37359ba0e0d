"""The compiled training step of a nanoGPT-shaped model, by arithmetic: no torch, milliseconds."""

from __future__ import annotations

import os
from functools import lru_cache

from msgspec.structs import replace

from oomph.config.schema import TrainConfig
from oomph.step.compile.loop import Loop, Programs
from oomph.step.compiled_gpt import Sizes
from oomph.step.compiled_gpt_backward import Backward
from oomph.step.compiled_gpt_forward import Forward
from oomph.step.compiled_reuse import Generated
from oomph.step.ops import Buffer, Kind, Op, Phase, Step
from oomph.step.optimizer import Optimizer
from oomph.step.parameters import parameters


def build(
    config: TrainConfig,
    cuda: bool = True,
    first: bool = False,
    workspace_bytes: tuple[int, ...] = (),
    threads: int | None = None,
    evaluates: bool = True,
) -> Step:
    """One optimizer step of a settled config under torch.compile, and, unless it is not asked for, one evaluation.

    `first` is the run's first step: evaluation comes before it, and the optimizer's state is made in it.
    `workspace_bytes` are what the matrix library holds from its first call on; `threads` the CPU's, by default one a
    core.
    """
    threads = threads or os.cpu_count() or 1
    optimizer = Optimizer(config, cuda, parameters(config))
    sizes = Sizes(config, cuda)
    weights = [Buffer(p.name, p.numel * sizes.weight, Kind.PARAMETERS, p.block) for p in optimizer.everything]
    if sizes.by_hand:
        triangle_bytes = config.block_size**2 * sizes.weight
        names = [(f"transformer.h.{index}.attn.bias", index) for index in range(config.n_layer)]
        weights += [Buffer(name, triangle_bytes, Kind.ATTENTION, index) for name, index in names]
    micro_steps = max(1, config.gradient_accumulation_steps // config.world_size)
    pattern = programs(replace(config, gradient_accumulation_steps=1, world_size=1), cuda, threads, evaluates)
    loop = Loop(pattern, micro_steps, 2 * config.eval_iters)
    return loop.step(optimizer, weights, first, workspace_bytes)


@lru_cache(maxsize=16)  # a plan asks twice, for the first step and a later one; a search, for many accumulations
def programs(config: TrainConfig, cuda: bool, threads: int, evaluates: bool = True) -> Programs:
    """What inductor generates for the model; without `evaluates` for training alone."""
    sizes = Sizes(config, cuda, threads)
    batch = tuple([Buffer(f"batch.{part}", 8 * sizes.rows, Kind.INPUTS) for part in "xy"])
    returns_logits = bool(config.return_logits)
    limit = None  # the logits are its peak
    if sizes.chunk:
        trial = Forward(Generated(Phase.FORWARD, sizes.dtype, limit=0), sizes, training=True)
        trial.write()
        limit = trial.highest
    forward = Generated(Phase.FORWARD, sizes.dtype, limit=limit)
    saved = Forward(forward, sizes, training=True, returns_logits=returns_logits).write()
    zeros: tuple[Buffer, ...] = ()
    logits = (saved.logits,) if returns_logits and saved.logits is not None else ()
    if logits:
        zeros = (Buffer("logits.zeros", logits[0].bytes, Kind.LOGITS),)
    version = tuple([int(part) for part in config.torch_version.split(".")[:2]])
    backward = Generated(Phase.BACKWARD, sizes.dtype, limit=0)  # its peak comes early
    grads = Backward(backward, sizes, saved, batch).write(zeros, version)
    if sizes.checkpointed:  # or in the blocks that it computes again
        backward = Generated(Phase.BACKWARD, sizes.dtype, limit=backward.highest)
        grads = Backward(backward, sizes, saved, batch).write(zeros, version)
    evaluation, outputs = _evaluation(sizes, returns_logits) if evaluates else ((), ())
    return Programs(
        batch=batch,
        forward=forward.ops(),
        loss=saved.loss,
        outputs=logits,
        zeros=zeros,
        backward=backward.ops(),
        grads=grads,
        evaluation=evaluation,
        evaluation_outputs=outputs,
    )


def _evaluation(sizes: Sizes, returns_logits: bool) -> tuple[tuple[Op, ...], tuple[Buffer, ...]]:
    """The forward program without gradients, and what it returns; written twice, as its peak is known only then."""
    program = Generated(Phase.EVAL, sizes.dtype, limit=0)
    Forward(program, sizes, training=False, returns_logits=returns_logits).write()
    program = Generated(Phase.EVAL, sizes.dtype, limit=program.highest)
    found = Forward(program, sizes, training=False, returns_logits=returns_logits).write()
    logits = (found.logits,) if returns_logits and found.logits is not None else ()
    return program.ops(), (*logits, found.loss)
