"""The op list of one training step of a nanoGPT-shaped model, by arithmetic: no torch, milliseconds."""

from __future__ import annotations

from oomph.config.schema import TrainConfig
from oomph.step.ops import Kernel, Kind, Phase, Section, Step

__all__ = ["Kernel", "Kind", "Phase", "Section", "Step", "build", "workspaces"]

_CUBLAS_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024  # CUBLAS_WORKSPACE_CONFIG's default, ":4096:2:16:8"
_CUBLAS_LARGE_BYTES = 32 << 20  # on compute capability 9, 10 and 12


def workspaces(capability: tuple[int, int] | None = None) -> tuple[int, ...]:
    """Bytes that cuBLAS holds from its first call on: one handle for the main thread, one for autograd's."""
    size = _CUBLAS_LARGE_BYTES if capability is not None and capability[0] in (9, 10, 12) else _CUBLAS_BYTES
    return size, size


def build(
    config: TrainConfig, cuda: bool = True, first: bool = False, capability: tuple[int, int] | None = None
) -> Step:
    """One optimizer step and one evaluation of a settled config (no value None).

    `cuda` chooses the GPU's kernels or the CPU's; `first` the run's first step, before which nanoGPT evaluates and in
    which the optimizer's state is made; `capability` is the card's, for cuBLAS's workspaces.
    """
    workspace_bytes = workspaces(capability) if cuda else ()
    if config.compile:
        from oomph.step import gpt_compiled

        return gpt_compiled.build(config, cuda=cuda, first=first, workspace_bytes=workspace_bytes)
    from oomph.step import gpt_eager

    return gpt_eager.build(config, cuda=cuda, first=first, workspace_bytes=workspace_bytes)
