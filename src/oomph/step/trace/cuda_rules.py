"""CUDA's rules on a build without CUDA: which operators autocast runs in float32, and which kernels run.

PyTorch keeps autocast's lists per device. On the CPU, layer_norm, softmax and losses have other rules than on a GPU,
and attention is a different operator. While `following` is active the CPU follows the given rules; the lists are
those of `ATen/autocast_mode.h` in torch 2.13. The eager and the compiled trace share them; each
brings its own operators for CUDA's kernels.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import _decomp
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
_COMPOSED = ("cross_entropy_loss",)  # the CPU casts its whole input; on a GPU autocast applies to its parts


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _below_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU))


def _to_float(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALVES else value


def _casts(overload: Any) -> Callable[..., Any]:
    """The operator with its half-precision arguments cast to float32."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            return overload(*map(_to_float, args), **{key: _to_float(value) for key, value in kwargs.items()})

    return call


def _asks_float(overload: Any) -> Callable[..., Any]:
    """The operator with a float32 result, which CUDA's softmaxes compute from float16 without a copy."""
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


def chosen_kernel(
    asked: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masked: bool, causal: bool
) -> str:
    """The kernel CUDA runs if `asked` is enabled, by `sdp_utils.cpp` of torch 2.13: flash, efficient or math.

    Flash takes half precision without a mask, and grouped queries directly. The memory-efficient kernel takes any mask,
    but grouped queries only since torch 2.14: before, they are composed of plain products in float32.
    """
    if asked == "math" or query.dim() != 4:
        return "math"
    half, size, value_size = query.dtype in HALVES, query.shape[-1], value.shape[-1]
    square = query.shape[2] == key.shape[2] or not causal
    if asked == "flash" and half and not masked and square and size == value_size <= FLASH_HEAD_SIZE:
        return "flash"
    aligned = not (size % (8 if half else 4) or value_size % (8 if half else 4))
    takes = aligned and query.shape[1] == key.shape[1] and (half or query.dtype is torch.float32)
    return "efficient" if takes else "math"


def attention(
    asked: str, composing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
) -> Callable[..., torch.Tensor]:
    """scaled_dot_product_attention as it runs on CUDA: `attention.cpp` of torch 2.13, with CUDA's own operators.

    While attention is composed of plain products, `composing()` is active.
    """
    aten = torch.ops.aten

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
    ) -> Any:
        kernel = chosen_kernel(asked, query, key, value, attn_mask is not None, is_causal)
        mask = _additive(attn_mask, query.dtype)
        if kernel == "math":
            compose = aten._scaled_dot_product_attention_math.default
            with composing():
                more = {"scale": scale, "enable_gqa": enable_gqa}
                return compose(query, key, value, mask, dropout_p, is_causal, None, **more)[0]
        if kernel == "flash":
            size = query.shape[-1]
            scale = 1 / math.sqrt(size) if scale is None else scale
            query, key, value = (_padded(each) for each in (query, key, value))
            flash = aten._scaled_dot_product_flash_attention.default
            out = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
            return out[..., :size] if size % 8 else out
        if mask is not None:
            mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
        wants_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        efficient = aten._scaled_dot_product_efficient_attention.default
        return efficient(query, key, value, mask, wants_gradient, dropout_p, is_causal, scale=scale)[0]

    return attend


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask as an additive bias."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    hidden = torch.scalar_tensor(-math.inf, dtype=dtype)
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=dtype), hidden)


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Heads padded to a multiple of 8, as the flash kernel requires."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """A mask whose rows begin at a multiple of 8 elements, as the memory-efficient kernel requires."""
    if all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    columns = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, 8 - columns % 8))[..., :columns]


def composed(name: str, *args: Any, **kwargs: Any) -> Any:
    """The result of an operator as PyTorch composes it of others."""
    return _overload(name)._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def rms_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, eps: float | None = None) -> Any:
    """rms_norm in a compiled graph on CUDA: `_fused_rms_norm` and its own backward, each decomposed.

    The CPU composes it of operators that are differentiated one by one; so does CUDA if the weight's dtype differs.
    """
    if weight is not None and weight.dtype is not x.dtype:
        return composed("rms_norm", x, shape, weight, eps)
    return _CompiledRmsNorm.apply(x, shape, weight, eps)  # type: ignore[no-untyped-call]


def layer_norm(x: torch.Tensor, shape: Any, *affine: Any) -> tuple[torch.Tensor, ...]:
    """CUDA's decomposition of native_layer_norm: mean and deviation stay float32, which the CPU casts to x's dtype."""
    out, mean, rstd = torch._refs.native_layer_norm(x.float(), shape, *affine)
    return out.to(x.dtype), mean, rstd


class _CompiledRmsNorm(torch.autograd.Function):
    """`_fused_rms_norm` and its backward by derivatives.yaml."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: Any, weight: torch.Tensor | None, eps: float | None) -> torch.Tensor:
        out, rstd = _decomp.decompositions._fused_rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None, None]:
        x, rstd, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        back = _decomp.decompositions._fused_rms_norm_backward
        dx, dw = back(grads[0], x, ctx.shape, rstd, weight, wanted)
        return dx, None, dw, None


@contextlib.contextmanager
def following(*, casts: bool, kernels: Mapping[str, Callable[..., Any]], keys: Sequence[str]) -> Iterator[None]:
    """CUDA's autocast rules, if `casts`, and these operators under the dispatch `keys`: process-wide while active."""
    rules: list[tuple[str, str, Callable[..., Any]]] = [(key, *each) for key in keys for each in kernels.items()]
    if casts:
        for names, make in ((_FLOAT32, _casts), (_FLOAT32_RESULT, _asks_float), (_COMPOSED, _composed)):
            rules += [("AutocastCPU", name, make(_overload(name))) for name in names]
    library: Any = torch.library.Library  # untyped in PyTorch itself
    libraries = {key: library("aten", "IMPL", key) for key in {key for key, _, _ in rules}}
    changed = [_overload(name) for _, name, _ in rules]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overriding kernels is the purpose
            for key, name, rule in rules:
                libraries[key].impl(name, rule)
        _forget_dispatch(changed)
        yield
    finally:
        for each in libraries.values():
            each._destroy()
        _forget_dispatch(changed)


def _forget_dispatch(overloads: Sequence[Any]) -> None:
    """Clear the Python dispatcher's cache of which kernel a key leads to: it does not notice changes."""
    for overload in overloads:
        overload._dispatch_cache.clear()
