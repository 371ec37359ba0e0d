"""The op list of one training step of a nanoGPT-shaped model, by arithmetic: no torch, milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.config.schema import TrainConfig
from oomph.step.ops import Buffer, Kernel, Kind, Phase, Section, Step
from oomph.step.params import Parameter, parameters

__all__ = ["Kernel", "Kind", "Phase", "Section", "Step", "build", "gradient_buckets", "workspaces"]

_CUBLAS_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024  # CUBLAS_WORKSPACE_CONFIG's default, ":4096:2:16:8"
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20  # torch/nn/parallel/distributed.py
_CUBLAS_LARGE_BYTES = 32 << 20  # on compute capability 9, 10 and 12


def workspaces(capability: tuple[int, int] | None = None) -> tuple[int, ...]:
    """Bytes that cuBLAS holds from its first call on: one handle for the main thread, one for autograd's."""
    size = _CUBLAS_LARGE_BYTES if capability is not None and capability[0] in (9, 10, 12) else _CUBLAS_BYTES
    return size, size


def gradient_buckets(config: TrainConfig, found: Sequence[Parameter]) -> tuple[Buffer, ...]:
    """DistributedDataParallel's second copy of the gradients, from the last layer: a bucket of 1 MiB, then of 25."""
    if config.world_size == 1:
        return ()
    weight_bytes = 2 if config.dtype != "float32" and not config.autocast else 4
    buckets: list[Buffer] = []
    filled, limit = 0, _FIRST_BUCKET_BYTES
    for parameter in reversed(found):
        filled += parameter.numel * weight_bytes
        if filled >= limit:
            buckets.append(Buffer("ddp.bucket", filled, Kind.GRADIENTS))
            filled, limit = 0, _BUCKET_BYTES
    if filled:
        buckets.append(Buffer("ddp.bucket", filled, Kind.GRADIENTS))
    return tuple(buckets)


def build(
    config: TrainConfig,
    cuda: bool = True,
    first: bool = False,
    capability: tuple[int, int] | None = None,
    evaluates: bool = True,
) -> Step:
    """One optimizer step and, unless it is not asked for, one evaluation of a settled config (no value None).

    `cuda` chooses the GPU's kernels or the CPU's; `first` the run's first step, before which nanoGPT evaluates and in
    which the optimizer's state is made; `capability` is the card's, for cuBLAS's workspaces.
    """
    workspace_bytes = workspaces(capability) if cuda else ()
    if config.compile:
        from oomph.step import gpt_compiled

        step = gpt_compiled.build(config, cuda, first, workspace_bytes, evaluates=evaluates)
    else:
        from oomph.step import gpt_eager

        step = gpt_eager.build(config, cuda, first, workspace_bytes, evaluates=evaluates)
    buckets = gradient_buckets(config, parameters(config) if config.world_size > 1 else ())
    return Step((*step.resident, *buckets), step.sections) if buckets else step
