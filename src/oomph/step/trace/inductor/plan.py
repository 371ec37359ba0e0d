"""What inductor would allocate for a graph: its own lowering, fusion and buffer planning, without a compiler.

Inductor plans memory before any kernel is compiled: it fuses, orders, decides which buffers are written at all,
which are overwritten in place and which are reused. It runs here unmodified, on a graph whose tensors claim to be
on a GPU, and its finished list of wrapper lines is read. That needs no GPU and no Triton.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from functools import reduce
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch
from torch import fx
from torch._dynamo.device_interface import CudaInterface
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor import scheduler as inductor_scheduler
from torch._inductor.codecache import CacheBase
from torch._inductor.codegen import wrapper as lines
from torch._inductor.compile_fx import _recursive_post_grad_passes, _recursive_record_original_output_strides
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.utils import get_gpu_type, is_big_gpu
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, init_gpu_context
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils import _triton as torch_triton
from torch.utils._python_dispatch import _disable_current_modes

from oomph.step.trace.inductor.shortcuts import describing_kernels, doing_once

CARD = torch.device("cuda:0")
_REMEMBER_A_CARD: tuple[Any, ...] = (
    get_gpu_type,
    is_big_gpu,
    DeviceProperties.create,
    CacheBase.get_system,
    init_gpu_context,
)
_SETTINGS: dict[str, Any] = {
    "graph_partition": False,
    "cpp_wrapper": False,
    "compile_threads": 1,
}  # nothing is compiled: no workers

# The card that inductor sees. Only its number of multiprocessors affects memory: it decides how small
# reductions are split, a matter of a few kilobytes.
_CARD_PROPERTIES = SimpleNamespace(
    name="NVIDIA A100-SXM4-80GB",
    major=8,
    minor=0,
    multi_processor_count=108,
    total_memory=80 << 30,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=166912,
    L2_cache_size=40 << 20,
    gcnArchName="",
    is_integrated=False,
)


class Planned(msgspec.Struct, frozen=True):
    """Inductor's plan for one graph: its wrapper lines in order, and the lowered graph they refer to."""

    lines: list[Any]
    graph: GraphLowering
    traced: fx.GraphModule  # the graph that was lowered
    in_place: frozenset[str]  # buffers that a kernel writes over one of its operands


def plan(
    graph: fx.GraphModule, inputs: Sequence[Any], *, cuda: bool, backward: bool, inference: bool, visible: int
) -> Planned:
    """Inductor's plan. `visible`: how many of the first outputs the user sees (their strides are kept)."""
    found: list[Any] = []
    in_place: set[str] = set()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_reading_lines(found, in_place))
        stack.enter_context(doing_once())
        stack.enter_context(torch.no_grad())
        stack.enter_context(inductor_config.patch(comprehensive_padding=cuda, **_SETTINGS))
        if cuda:
            stack.enter_context(_pretending_a_card())
            stack.enter_context(describing_kernels())
        rewritten, fake_mode = _rewritten(graph, inputs, cuda, inference, visible)
        stack.enter_context(V.set_fake_mode(fake_mode))
        if cuda:
            inputs = [node.meta["val"] for node in rewritten.graph.nodes if node.op == "placeholder"]
        lowered = GraphLowering(
            rewritten,
            example_inputs=inputs,
            shape_env=ShapeEnv(),
            graph_id=0,
            is_inference=inference,
            is_backward=backward,
        )
        lowered.freeze_runtime_asserts()
        with V.set_graph_handler(lowered), V.set_extern_kernel_nodes([]), DebugContext():
            lowered.run(*inputs)
            lowered.codegen()
    return Planned(found, lowered, rewritten, frozenset(in_place))


def report_strides(planned: Planned) -> None:
    """Tell AOTAutograd how inductor laid out the saved tensors, so that backward expects that."""
    context = TracingContext.try_get()
    if context is None or context.output_strides is None:
        return
    for output in planned.graph.graph_outputs:
        known = isinstance(output, ir.IRNode) and output.has_tensor_output()
        context.output_strides.append(tuple(int(stride) for stride in output.get_stride()) if known else None)


def _rewritten(
    graph: fx.GraphModule, inputs: Sequence[Any], cuda: bool, inference: bool, visible: int
) -> tuple[fx.GraphModule, FakeTensorMode]:
    """The graph after inductor's rewriting passes, on the GPU if planned for one, and its tensors' fake mode.

    A few passes compute on tensors in ways that fake CUDA tensors refuse on a build without CUDA. Those
    graphs are rewritten on the CPU and moved afterwards; the passes differ little.
    """
    copy = _copied(graph, inputs)
    if cuda:
        fake_mode = _moved_to_card(copy)
        try:
            _rewrite(copy, fake_mode, inference, visible)
            return copy, fake_mode
        except RuntimeError:
            copy = _copied(graph, inputs)
    _rewrite(copy, V.fake_mode, inference, visible)
    return copy, _moved_to_card(copy) if cuda else V.fake_mode


def _rewrite(graph: fx.GraphModule, fake_mode: FakeTensorMode, inference: bool, visible: int) -> None:
    with V.set_fake_mode(fake_mode):
        view_to_reshape(graph)  # type: ignore[no-untyped-call]
        _recursive_record_original_output_strides(graph)
        output = next(iter(reversed(graph.graph.nodes)))
        output.meta["user_visible_output_idxs"] = list(range(visible))
        _recursive_post_grad_passes(graph, is_inference=inference)


def _copied(graph: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """A copy of the graph on these inputs, to be rewritten: AOTAutograd still reads the original."""
    copy = fx.Graph()
    result = copy.graph_copy(graph.graph, {})
    copy.output(result).meta.update(next(iter(reversed(graph.graph.nodes))).meta)
    for node, value in zip(copy.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["val"] = value
    return _make_graph_module(graph, copy)


def _moved_to_card(graph: fx.GraphModule) -> FakeTensorMode:
    """Move every tensor of the graph to a GPU that does not exist. Sizes and strides stay as traced."""
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return FakeTensor(fake_mode, there, CARD)  # what the mode itself would make, in half the time

    with _disable_current_modes(), torch.no_grad():
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": CARD}
            node.meta.pop("tensor_meta", None)
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map(moved, node.meta["val"])
    return fake_mode


@contextlib.contextmanager
def _reading_lines(found: list[Any], in_place: set[str]) -> Iterator[None]:
    """Keep the wrapper's lines once inductor has planned reuse; the text it would generate from them is skipped.

    What is overwritten in place is recorded before: afterwards it looks like reuse of a dead buffer.
    """
    planned: Any = lines.PythonWrapperCodegen.memory_plan_reuse

    def keep(self: Any) -> None:
        in_place.update(line.reused_as.get_name() for line in self.lines if isinstance(line, lines.ReuseLine))
        planned(self)
        found[:] = self.lines

    with mock.patch.object(lines.PythonWrapperCodegen, "memory_plan_reuse", keep):
        yield


@contextlib.contextmanager
def _pretending_a_card() -> Iterator[None]:
    """Answer inductor's queries before it plans for CUDA. Nothing is launched, so consistent answers suffice."""
    properties = staticmethod(lambda *_: _CARD_PROPERTIES)
    answers: tuple[tuple[Any, str, Any], ...] = (
        (inductor_scheduler, "has_triton", lambda *_: True),
        (torch_triton, "has_triton", lambda *_: True),
        (torch_triton, "triton_hash_with_backend", lambda *_: ""),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_properties", lambda *_: _CARD_PROPERTIES),
        (torch.cuda, "get_device_capability", lambda *_: (8, 0)),
        (torch.cuda, "_lazy_init", lambda: None),
        (CudaInterface, "is_available", staticmethod(lambda: True)),
        (CudaInterface, "current_device", staticmethod(lambda: 0)),
        (CudaInterface, "get_device_properties", properties),
        (CudaInterface, "get_compute_capability", staticmethod(lambda *_: 80)),
        (CudaInterface.Worker, "current_device", staticmethod(lambda: 0)),
        (CudaInterface.Worker, "get_device_properties", properties),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, answer))
        stack.callback(_forget_card)
        _forget_card()
        yield


def _forget_card() -> None:
    """Clear inductor's caches about the card: real facts must not leak in, nor pretended ones out."""
    for remembering in _REMEMBER_A_CARD:
        remembering.cache_clear()


def register_patterns() -> None:
    """Build inductor's graph patterns, once per process: before anything is overridden or pretended."""
    joint_graph.lazy_init(torch.device("cpu"))
    post_grad.lazy_init()


def storage_bytes(planned: Planned, node: Any) -> int:
    """Bytes that inductor requests from the allocator for this buffer."""
    graph = planned.graph
    with V.set_graph_handler(graph):
        numel = int(graph.get_allocation_storage_size(node))
    return numel * int(node.get_dtype().itemsize)


def view_numel(node: Any) -> int:
    """Elements of a buffer or view."""
    return reduce(operator.mul, (int(size) for size in node.get_size()), 1)
