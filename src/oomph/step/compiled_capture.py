"""The graphs torch.compile would hand to inductor, taken on fake CPU tensors on any machine.

AOTAutograd traces forward and backward together and splits them with inductor's own min-cut partitioner. What
differs on a card is told to the tracer: CUDA's autocast rules instead of the CPU's, and CUDA's attention ops.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import partition_fn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx import traceback as fx_traceback

HALVES = (torch.bfloat16, torch.float16)

OnGraph = Callable[[str, GraphModule, Sequence[Any]], None]


class _Flat(nn.Module):
    """A module without parameters: they come in as arguments, as dynamo hands them over."""

    def __init__(self, model: nn.Module, names: list[str], outputs: Callable[[Any], tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.__dict__["call"] = (model, names, outputs)  # not a submodule: AOT would lift its parameters itself

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        model, names, outputs = self.__dict__["call"]
        state = dict(zip(names, args, strict=False))
        result = torch.func.functional_call(model, state, args[len(names) :], tie_weights=True)
        returned: tuple[torch.Tensor, ...] = outputs(result)
        return returned


def capture(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    outputs: Callable[[Any], tuple[torch.Tensor, ...]],
    on_graph: OnGraph,
    *,
    half: torch.dtype | None,
    cuda: bool,
    fake_mode: FakeTensorMode,
) -> None:
    """Calls `on_graph` with "forward" and "backward", or with "inference" where nothing wants a gradient.

    It runs inside AOTAutograd's own compile callbacks, so that inductor finds there what it expects to know,
    such as which saved tensors it may overwrite. `half` is autocast's dtype, None for no autocast.
    """
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    flat = [*state.values(), *inputs]
    context = TracingContext(fake_mode)

    def compiler(name: str) -> Any:
        def run(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
            on_graph(name, gm, example_inputs)
            return gm.forward

        return run

    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(context))
        stack.enter_context(V.set_fake_mode(fake_mode))
        stack.enter_context(fx_traceback.preserve_node_meta())
        stack.enter_context(_named_modules(model))
        stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
        if cuda:
            stack.enter_context(cuda_rules())
        if half is not None:
            stack.enter_context(torch.autocast("cpu", half))
        aot_module_simplified(
            _Flat(model, list(state), outputs),  # type: ignore[arg-type]
            flat,
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            partition_fn=partition_fn,
            decompositions=select_decomp_table(),
        )


@contextlib.contextmanager
def _named_modules(model: nn.Module) -> Iterator[None]:
    """Marks every traced operation with the module it comes from; backward operations inherit the mark."""
    open_marks: list[Any] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            mark = fx_traceback.annotate({"module": name})
            mark.__enter__()
            open_marks.append(mark)

        return hook

    def leave(*_: Any) -> None:
        open_marks.pop().__exit__(None, None, None)

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def cuda_rules() -> Iterator[None]:
    """CUDA's autocast lists and attention ops, on the CPU's dispatch keys. Global while it lasts; then undone."""
    library: Any = torch.library.Library
    autocast = library("aten", "IMPL", "AutocastCPU")
    attention = [library("aten", "IMPL", key) for key in ("AutogradCPU", "CPU")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden is the purpose
        for name, rule in _AUTOCAST_RULES.items():
            autocast.impl(name, rule)
        for each in attention:
            each.impl("scaled_dot_product_attention", _cuda_attention)
    try:
        yield
    finally:
        for each in (autocast, *attention):
            each._destroy()


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALVES else value


def _in_float32(op: Callable[..., Any]) -> Callable[..., Any]:
    """An autocast rule: every half argument in float32, autocast itself switched off below."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return op(*map(_wide, args), **{name: _wide(value) for name, value in kwargs.items()})

    return rule


def _to_float32(op: Callable[..., Any]) -> Callable[..., Any]:
    """An autocast rule for ops that read halves and write float32 by themselves."""

    def rule(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return op(tensor, dim, dtype or torch.float32)

    return rule


_AUTOCAST_RULES = {
    "layer_norm": _in_float32(torch.ops.aten.layer_norm),
    "nll_loss": _in_float32(torch.ops.aten.nll_loss),
    "nll_loss_nd": _in_float32(torch.ops.aten.nll_loss_nd),
    "softmax.int": _to_float32(torch.ops.aten.softmax.int),
    "log_softmax.int": _to_float32(torch.ops.aten.log_softmax.int),
}


def _cuda_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The op that CUDA chooses: flash for halves, the memory-efficient kernel for float32 or with a mask."""
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    if q.dtype in HALVES and attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        return flash(q, k, v, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    found = efficient(q, k, v, attn_mask, wants_gradient, dropout_p, is_causal, scale=scale)
    return found[0]  # type: ignore[no-any-return]
