"""CUDA's rules on a build without CUDA: which operators autocast takes to float32, and which kernels run.

PyTorch keeps autocast's lists per device. On the CPU, layer_norm, softmax and losses have other rules than on a GPU,
and attention is another operator. While `following` is active the CPU obeys the rules it is given:
`ATen/autocast_mode.h` of torch 2.13 is the source of the lists. The eager and the compiled trace share them; each
brings its own operators for what CUDA's kernels do.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from oomph.config.settle import FLASH_HEAD_SIZE

ATTENTION = "scaled_dot_product_attention"
HALVES = (torch.bfloat16, torch.float16)

_FLOAT32 = (
    "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "nll_loss", "nll_loss2d", "exp", "log", "log10",
    "log2", "log1p", "rsqrt", "reciprocal", "softplus", "cosine_similarity", "kl_div", "l1_loss", "smooth_l1_loss",
    "huber_loss", "mse_loss", "binary_cross_entropy_with_logits", "logsumexp", "pow.Tensor_Scalar", "pow.Tensor_Tensor",
)  # fmt: skip
_FLOAT32_RESULT = ("softmax.int", "log_softmax.int", "cumsum", "cumprod", "sum", "sum.dim_IntList")
_COMPOSED = ("cross_entropy_loss",)  # the CPU casts its input whole; a GPU lets autocast see what it is composed of


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _below_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU))


def _to_float(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALVES else value


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
            if asked is not None or args[0].dtype not in HALVES:
                return overload(*args, **kwargs)
            if kernel is not None and args[0].dtype is torch.float16:
                return kernel(args[0], args[1], True)
            return overload(*args[:position], **{**kwargs, "dtype": torch.float32})

    return call


def _composed(overload: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return overload._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    return call


def chosen_kernel(query: torch.Tensor, masked: bool, asked: str) -> str:
    """What CUDA runs where `asked` is wanted: its flash kernel takes halves, no mask, and heads up to a size."""
    if asked == "math":
        return "math"
    fits = query.dtype in HALVES and not masked and query.shape[-1] <= FLASH_HEAD_SIZE
    return asked if fits else "efficient"


def attention(asked: str, fused: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """scaled_dot_product_attention as CUDA chooses its kernel.

    `fused(kernel, query, key, value, mask, dropout, causal, scale)` stands for its flash and memory-efficient ones.
    """

    def attend(
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
        kernel = chosen_kernel(query, attn_mask is not None, asked)
        return fused(kernel, query, key, value, attn_mask, dropout_p, is_causal, scale)

    return attend


def composed_attention(*args: Any, **kwargs: Any) -> Any:
    """scaled_dot_product_attention as PyTorch composes it of other operators."""
    return _overload(ATTENTION)._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@contextlib.contextmanager
def following(*, casts: bool, kernels: Mapping[str, Callable[..., Any]], keys: Sequence[str]) -> Iterator[None]:
    """CUDA's autocast rules, if `casts`, and these operators under the dispatch `keys`: global until it ends."""
    rules: list[tuple[str, str, Callable[..., Any]]] = [(key, *each) for key in keys for each in kernels.items()]
    if casts:
        for names, make in ((_FLOAT32, _casts), (_FLOAT32_RESULT, _asks_float), (_COMPOSED, _composed)):
            rules += [("AutocastCPU", name, make(_overload(name))) for name in names]
    library: Any = torch.library.Library  # untyped in PyTorch itself
    libraries = {key: library("aten", "IMPL", key) for key in {key for key, _, _ in rules}}
    changed = [_overload(name) for _, name, _ in rules]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is overridden is the purpose
            for key, name, rule in rules:
                libraries[key].impl(name, rule)
        _forget_dispatch(changed)
        yield
    finally:
        for each in libraries.values():
            each._destroy()
        _forget_dispatch(changed)


def _forget_dispatch(overloads: Sequence[Any]) -> None:
    """The Python dispatcher remembers which kernel a key leads to, and does not notice that one came or went."""
    for overload in overloads:
        overload._dispatch_cache.clear()
