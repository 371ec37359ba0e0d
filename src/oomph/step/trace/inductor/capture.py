"""The graphs torch.compile would pass to inductor, captured on fake CPU tensors on any machine.

AOTAutograd traces forward and backward together and splits them with inductor's own min-cut partitioner. The
differences on a GPU are patched in: CUDA's autocast rules instead of the CPU's, and CUDA's attention operators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import partition_fn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx import traceback as fx_traceback
from torch.nn.attention import SDPBackend, sdpa_kernel

from oomph.step.trace.cuda_rules import ATTENTION, following, layer_norm, rms_norm
from oomph.step.trace.cuda_rules import attention as attention_as_cuda
from oomph.step.trace.fakes import drawing_ones, grouping_floats
from oomph.step.trace.hugging_face import deciding_as_compiled
from oomph.step.trace.inductor.checkpoint import marking_checkpoints
from oomph.step.trace.inductor.shortcuts import leaving_out_text

OnGraph = Callable[[str, GraphModule, Sequence[Any]], None]


class _Flat(nn.Module):
    """A module without parameters: they are passed as arguments, as from dynamo."""

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
    attention: str,
    fake_mode: FakeTensorMode,
) -> None:
    """Calls `on_graph` with "forward" and "backward", or with "inference" if nothing needs a gradient.

    It runs inside AOTAutograd's own compile callbacks, so that inductor finds the context it expects,
    such as which saved tensors it may overwrite. `half` is autocast's dtype, None for no autocast.
    """
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    flat = [*state.values(), *inputs]
    context = TracingContext(fake_mode)
    decompositions = select_decomp_table()
    if cuda:
        decompositions = {**decompositions, torch.ops.aten.native_layer_norm.default: layer_norm}

    def compiler(name: str) -> Any:
        def run(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
            on_graph(name, gm, example_inputs)
            return gm.forward

        return run

    with contextlib.ExitStack() as stack:
        stack.enter_context(leaving_out_text())
        stack.enter_context(tracing(context))
        stack.enter_context(V.set_fake_mode(fake_mode))
        stack.enter_context(fx_traceback.preserve_node_meta())
        stack.enter_context(_named_modules(model))
        stack.enter_context(marking_checkpoints())
        stack.enter_context(deciding_as_compiled())
        stack.enter_context(drawing_ones())
        stack.enter_context(grouping_floats())
        stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
        if cuda:
            kernels = {ATTENTION: attention_as_cuda(attention), "rms_norm": rms_norm}
            stack.enter_context(following(casts=True, kernels=kernels, keys=("AutogradCPU", "CPU")))
            # A recomputed attention would get a real card's random generator, which allocates nothing.
            stack.enter_context(mock.patch.object(partitioners, "has_recomputable_rng_ops", lambda _: False))
        if attention == "math":
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if half is not None:
            stack.enter_context(torch.autocast("cpu", half))
        aot_module_simplified(
            _Flat(model, list(state), outputs),  # type: ignore[arg-type]
            flat,
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            partition_fn=partition_fn,
            decompositions=decompositions,
            keep_inference_input_mutations=True,  # as in compile_fx: a buffer is updated in place, not returned
        )


@contextlib.contextmanager
def _named_modules(model: nn.Module) -> Iterator[None]:
    """Mark every traced operation with its module; backward operations inherit the mark."""
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
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        while open_marks:  # marks of modules left by something other than an Exception
            leave()
