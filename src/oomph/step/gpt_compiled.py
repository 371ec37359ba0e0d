"""The compiled training step of a nanoGPT-shaped model, by arithmetic: no torch, milliseconds."""

from __future__ import annotations

from functools import lru_cache

from msgspec.structs import replace

from oomph.config.schema import TrainConfig
from oomph.step.compiled_gpt import Sizes
from oomph.step.compiled_gpt_backward import Backward
from oomph.step.compiled_gpt_forward import Forward
from oomph.step.compiled_loop import Loop, Programs
from oomph.step.compiled_reuse import Generated
from oomph.step.gpt_eager_optimizer import Optimizer
from oomph.step.gpt_eager_run import Run
from oomph.step.gpt_eager_run import Sizes as EagerSizes
from oomph.step.ops import Buffer, Kind, Phase, Step


def build(config: TrainConfig, cuda: bool = True, first: bool = False, workspace_bytes: tuple[int, ...] = ()) -> Step:
    """One optimizer step of a settled config under torch.compile, and one evaluation.

    `first` is the run's first step: evaluation comes before it, and the optimizer's state is made in it.
    `workspace_bytes` are what the matrix library holds from its first call on.
    """
    optimizer = Optimizer(config, Run(EagerSizes(config, cuda, threads=1)))  # no optimizer's memory depends on threads
    sizes = Sizes(config, cuda)
    parameters = [Buffer(p.name, p.numel * sizes.weight, Kind.PARAMETERS, p.block) for p in optimizer.everything]
    micro_steps = max(1, config.gradient_accumulation_steps // config.world_size)
    pattern = programs(replace(config, gradient_accumulation_steps=1, world_size=1), cuda)
    loop = Loop(pattern, micro_steps, 2 * config.eval_iters)
    return loop.step(optimizer, parameters, first, workspace_bytes)


@lru_cache(maxsize=16)  # a plan asks twice, for the first step and a later one; a search, for many accumulations
def programs(config: TrainConfig, cuda: bool) -> Programs:
    """What inductor generates for the model."""
    sizes = Sizes(config, cuda)
    batch = tuple([Buffer(f"batch.{part}", 8 * sizes.rows, Kind.INPUTS) for part in "xy"])
    forward = Generated(Phase.FORWARD, sizes.dtype)
    returns_logits = bool(config.return_logits)
    saved = Forward(forward, sizes, training=True, returns_logits=returns_logits).write()
    zeros: tuple[Buffer, ...] = ()
    logits = (saved.logits,) if returns_logits and saved.logits is not None else ()
    if logits:
        zeros = (Buffer("logits.zeros", logits[0].bytes, Kind.LOGITS),)
    backward = Generated(Phase.BACKWARD, sizes.dtype, limit=0)  # its peak comes early
    version = tuple([int(part) for part in config.torch_version.split(".")[:2]])
    grads = Backward(backward, sizes, saved, batch).write(zeros, version)
    evaluation = Generated(Phase.EVAL, sizes.dtype, limit=0)
    Forward(evaluation, sizes, training=False, returns_logits=returns_logits).write()
    evaluation = Generated(Phase.EVAL, sizes.dtype, limit=evaluation.highest)
    evaluated = Forward(evaluation, sizes, training=False, returns_logits=returns_logits).write()
    return Programs(
        batch=batch,
        forward=forward.ops(),
        loss=saved.loss,
        outputs=logits,
        zeros=zeros,
        backward=backward.ops(),
        grads=grads,
        evaluation=evaluation.ops(),
        evaluation_outputs=(evaluated.logits, evaluated.loss) if logits and evaluated.logits else (evaluated.loss,),
    )
