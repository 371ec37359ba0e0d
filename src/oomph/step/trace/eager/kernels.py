"""CUDA's attention, dropout and norms in an eager trace, represented by the CPU's operators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from oomph.step.trace.cuda_rules import ATTENTION, attention, composed, following
from oomph.step.trace.eager.record import Recorder


@contextlib.contextmanager
def random_states(recorder: Recorder) -> Iterator[None]:
    """While active, the random states that torch.utils.checkpoint keeps are recorded, if they are the CPU's.

    They are allocated below every dispatch mode. For a GPU they are on the host.
    """

    def get() -> torch.Tensor:
        state = original()
        recorder.allocate(state, "random_state")
        return state

    original = torch.get_rng_state
    if recorder.cuda:
        yield
        return
    torch.get_rng_state = get
    try:
        yield
    finally:
        torch.get_rng_state = original


def rules(recorder: Recorder) -> contextlib.AbstractContextManager[None]:
    """The rules of the recorder's device, while active. They apply to the whole process."""
    if recorder.cuda:
        attend = attention(recorder.attention, recorder.composing)
        kernels: dict[str, Callable[..., Any]] = {ATTENTION: attend, "dropout": _dropout, "rms_norm": _rms_norm}
        return following(casts=True, kernels=kernels, keys=("AutogradCPU",))

    def compose(*args: Any, **kwargs: Any) -> Any:
        with recorder.composing():
            return composed(ATTENTION, *args, **kwargs)  # PyTorch's own choice on the CPU

    return following(casts=False, kernels={ATTENTION: compose}, keys=("AutogradCPU",))


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """A GPU's dropout: one kernel, which saves a mask of one byte per element."""
    if not train or p == 0:
        return x
    dropped: torch.Tensor = torch.native_dropout(x, p, True)[0]
    return dropped


def _rms_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, eps: float | None = None) -> Any:
    """A GPU's rms_norm: one kernel, unless its weight has another dtype."""
    if weight is not None and weight.dtype is not x.dtype:
        return composed("rms_norm", x, shape, weight, eps)
    return _FusedRmsNorm.apply(x, len(shape), weight)  # type: ignore[no-untyped-call]


class _FusedRmsNorm(torch.autograd.Function):
    """What `_fused_rms_norm` allocates and saves: its input, each row's deviation in float32, the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dims: int, weight: torch.Tensor | None) -> torch.Tensor:
        rstd = x.new_empty((*x.shape[:-dims], *[1] * dims), dtype=torch.float32)
        ctx.save_for_backward(x, rstd, weight)
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        x, _rstd, weight = ctx.saved_tensors
        return torch.clone(x, memory_format=torch.contiguous_format), None, None if weight is None else weight.clone()
