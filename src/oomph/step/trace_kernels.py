"""CUDA's attention and dropout in an eager trace: the CPU's operators standing for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from oomph.step.trace_record import Recorder
from oomph.step.trace_rules import ATTENTION, HALVES, attention, composed_attention, following


@contextlib.contextmanager
def random_states(recorder: Recorder) -> Iterator[None]:
    """While active, the states of random numbers that torch.utils.checkpoint keeps are seen, where they are the CPU's.

    They are made below every dispatch mode. For a GPU they are the host's.
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
    """The recorder's device's rules, while active. They are global to the process until they end."""
    cuda = recorder.cuda
    fused = cuda and recorder.attention != "math"
    attends = attention(recorder.attention, _fused(recorder)) if fused else _composed(recorder)
    kernels: dict[str, Callable[..., Any]] = {ATTENTION: attends}
    if cuda:
        kernels["dropout"] = _dropout
    return following(casts=cuda, kernels=kernels, keys=("AutogradCPU",))


class _HeadByHead(torch.autograd.Function):
    """Padded gradients come back from CUDA's kernel head by head, and are copied to lie token by token."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].clone()


def _head_by_head(x: torch.Tensor) -> torch.Tensor:
    apply: Any = _HeadByHead.apply
    laid: torch.Tensor = apply(x)
    return laid


def _composed(recorder: Recorder) -> Callable[..., Any]:
    """PyTorch's own choice on the CPU."""

    def compose(*args: Any, **kwargs: Any) -> Any:
        recorder.composing = True  # its mask is added in place where no mode watches
        try:
            return composed_attention(*args, **kwargs)
        finally:
            recorder.composing = False

    return compose


def _fused(recorder: Recorder) -> Callable[..., torch.Tensor]:
    """The CPU's fused kernel standing for CUDA's."""

    def fuse(
        kernel: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        size = query.shape[-1]
        pads = kernel == "flash" and query.dtype in HALVES and size % 8 != 0
        if pads:
            if query.shape[1] > 1:
                key, query, value = map(_head_by_head, (key, query, value))
            query, key, value = (torch.nn.functional.pad(each, (0, -size % 8)) for each in (query, key, value))
        recorder.attending = (kernel, dropout > 0, pads)
        stand_in = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out: torch.Tensor = stand_in(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)[0]
        return out[..., :size] if pads else out

    return fuse


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """A GPU's dropout is one kernel, which keeps a mask of a byte per number."""
    if not train or p == 0:
        return x
    dropped: torch.Tensor = torch.native_dropout(x, p, True)[0]
    return dropped
