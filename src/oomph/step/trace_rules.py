"""CUDA's rules on a build without CUDA: which operators autocast takes to float32, and which kernels run.

PyTorch keeps autocast's lists per device. On the CPU, layer_norm, softmax and losses have other rules than on a GPU,
and dropout and attention with dropout are composed of other operators. While `rules` is active for a GPU the CPU
follows it: `ATen/autocast_mode.h` of torch 2.13 is the source of the lists.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from oomph.step.trace_record import Recorder

_FLOAT32 = (
    "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "nll_loss", "nll_loss2d", "exp", "log", "log10",
    "log2", "log1p", "rsqrt", "reciprocal", "softplus", "cosine_similarity", "kl_div", "l1_loss", "smooth_l1_loss",
    "huber_loss", "mse_loss", "binary_cross_entropy_with_logits", "logsumexp", "pow.Tensor_Scalar", "pow.Tensor_Tensor",
)  # fmt: skip
_FLOAT32_RESULT = ("softmax.int", "log_softmax.int", "cumsum", "cumprod", "sum", "sum.dim_IntList")
_COMPOSED = ("cross_entropy_loss",)  # the CPU casts its input whole; a GPU lets autocast see what it is composed of
_HALVES = (torch.bfloat16, torch.float16)


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _below_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU))


def _to_float(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALVES else value


def _casts(overload: Any) -> Callable[..., Any]:
    """The operator with its half arguments cast to float32."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            return overload(*map(_to_float, args), **{key: _to_float(value) for key, value in kwargs.items()})

    return call


def _asks_float(overload: Any) -> Callable[..., Any]:
    """The operator asked for a float32 result, which CUDA's softmaxes compute from float16 without a copy."""
    position = [argument.name for argument in overload._schema.arguments].index("dtype")
    straight = {"softmax": torch.ops.aten._softmax.default, "log_softmax": torch.ops.aten._log_softmax.default}
    kernel = straight.get(overload._opname)

    def call(*args: Any, **kwargs: Any) -> Any:
        asked = args[position] if len(args) > position else kwargs.get("dtype")
        with _below_autocast():
            if asked is not None or args[0].dtype not in _HALVES:
                return overload(*args, **kwargs)
            if kernel is not None and args[0].dtype is torch.float16:
                return kernel(args[0], args[1], True)
            return overload(*args[:position], **{**kwargs, "dtype": torch.float32})

    return call


def _composed(overload: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return overload._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    return call


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


def _attends(recorder: Recorder) -> Callable[..., Any]:
    """scaled_dot_product_attention: PyTorch's own choice, or the CPU's fused kernel standing for CUDA's."""
    overload = torch.ops.aten.scaled_dot_product_attention.default

    def choose(*args: Any, **kwargs: Any) -> Any:
        recorder.composing = True  # its mask is added in place where no mode watches
        try:
            return overload._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        finally:
            recorder.composing = False

    def fuse(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if enable_gqa:
            key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
        size, masked = query.shape[-1], attn_mask is not None  # CUDA's flash kernel takes no mask
        pads = recorder.attention == "flash" and not masked and query.dtype in _HALVES and size % 8 != 0
        if pads:
            if query.shape[1] > 1:
                key, query, value = map(_head_by_head, (key, query, value))
            query, key, value = (torch.nn.functional.pad(each, (0, -size % 8)) for each in (query, key, value))
        recorder.attending = (masked, dropout_p > 0, pads)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out: torch.Tensor = kernel(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
        return out[..., :size] if pads else out

    return fuse if recorder.cuda and recorder.attention != "math" else choose


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """A GPU's dropout is one kernel, which keeps a mask of a byte per number."""
    if not train or p == 0:
        return x
    dropped: torch.Tensor = torch.native_dropout(x, p, True)[0]
    return dropped


def _library(key: str) -> Any:
    """Overrides of PyTorch's operators for one dispatch key. Untyped in PyTorch itself."""
    make: Any = torch.library.Library
    return make("aten", "IMPL", key)


@contextlib.contextmanager
def rules(recorder: Recorder) -> Iterator[None]:
    """The recorder's device's rules, while active. They are global to the process until they end."""
    casts, kernels = (_library(key) for key in ("AutocastCPU", "AutogradCPU"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overriding a kernel is the purpose
            kernels.impl("scaled_dot_product_attention", _attends(recorder))
            if recorder.cuda:
                kernels.impl("dropout", _dropout)
                for names, make in ((_FLOAT32, _casts), (_FLOAT32_RESULT, _asks_float), (_COMPOSED, _composed)):
                    for name in names:
                        casts.impl(name, make(_overload(name)))
        yield
    finally:
        casts._destroy()
        kernels._destroy()
