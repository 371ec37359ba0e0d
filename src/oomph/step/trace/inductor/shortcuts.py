"""Skips or caches work of inductor's that a buffer plan does not need: a third of a compiled trace's time.

No shortcut changes the wrapper's lines. Fusion, order, reuse and workspaces are decided by inductor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]
from sympy.core import relational  # type: ignore[import-untyped]
from torch._inductor import config as inductor_config
from torch._inductor import lowering, pattern_matcher
from torch._inductor.codegen.simd import SIMDScheduling
from torch._inductor.codegen.simd_kernel_features import NodeScheduleMarker
from torch._inductor.loop_body import LoopBody, MemoryUsageType
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.utils import get_fused_kernel_name
from torch._inductor.virtualized import V
from torch.fx._lazy_graph_module import _use_lazy_graph_module

_READS = (MemoryUsageType.LOAD, MemoryUsageType.LOAD_SEED, MemoryUsageType.BUCKETIZE)


@contextlib.contextmanager
def leaving_out_text() -> Iterator[None]:
    """While active, no Python text is generated for graphs that are never run, as in torch.compile itself."""
    with _use_lazy_graph_module(True), mock.patch.object(pattern_matcher, "_should_debug_node", lambda _: False):
        yield


@contextlib.contextmanager
def doing_once() -> Iterator[None]:
    """While a graph is lowered and scheduled: nothing is computed twice."""
    with _comparing_integers(), _asking_once_by_kind(), _reindexing_once():
        yield


@contextlib.contextmanager
def _comparing_integers() -> Iterator[None]:
    """Compare sizes as plain integers, not by sympy's rules for any expression."""
    least, equal, simplified = relational.is_ge, relational.is_eq, SizeVarAllocator.simplify

    def is_ge(lhs: Any, rhs: Any, assumptions: Any = None) -> Any:
        known = isinstance(lhs, sympy.Integer) and isinstance(rhs, sympy.Integer)
        return lhs.p >= rhs.p if known else least(lhs, rhs, assumptions)

    def is_eq(lhs: Any, rhs: Any, assumptions: Any = None) -> Any:
        known = isinstance(lhs, sympy.Integer) and isinstance(rhs, sympy.Integer)
        return lhs.p == rhs.p if known else equal(lhs, rhs, assumptions)

    def simplify(self: Any, expression: Any) -> Any:
        return expression if isinstance(expression, sympy.Integer) else simplified(self, expression)

    with (
        mock.patch.object(relational, "is_ge", is_ge),
        mock.patch.object(relational, "is_eq", is_eq),
        mock.patch.object(SizeVarAllocator, "simplify", simplify),
    ):
        yield


@contextlib.contextmanager
def _asking_once_by_kind() -> Iterator[None]:
    """Check whether inductor supports a tensor only once for each dtype, device and layout."""
    asked, known = lowering.unsupported_input_tensor, set[tuple[Any, ...]]()

    def unsupported(tensor: Any, node: Any = None) -> bool:
        kind = (tensor.dtype, tensor.device, tensor.layout)
        if kind in known:
            return False
        if asked(tensor):
            return bool(asked(tensor, node))  # some are unsupported for some operations only
        known.add(kind)
        return False

    with mock.patch.object(lowering, "unsupported_input_tensor", unsupported):
        yield


@contextlib.contextmanager
def _reindexing_once() -> Iterator[None]:
    """Cache loops that were rewritten for a fusion, for when it is tried again with other partners."""
    rewritten: Any = LoopBody.reindex_iter_loops
    known: dict[tuple[LoopBody, tuple[Any, ...]], LoopBody] = {}

    def remembered(self: LoopBody, sizes: Any) -> LoopBody:
        key = (self, tuple(sizes))  # loop bodies are compared by identity
        if key not in known:
            known[key] = rewritten(self, sizes)
        return known[key]

    with mock.patch.object(LoopBody, "reindex_iter_loops", remembered):
        yield


@contextlib.contextmanager
def describing_kernels() -> Iterator[None]:
    """Describe Triton kernels by what they read and write, without generating the text of their loops.

    A long scan would request a workspace during code generation, 8 bytes for each block of at least 256 elements. That
    is not counted: it would take Triton itself.
    """

    def described(self: Any, features: Any) -> None:
        tiling = self.create_tiling([features.numel], [features.reduction_numel])  # the same writes under any tiling
        (kernel,) = self.create_kernel_choices(features, [tiling], {"features": features, "tiling_scores": None})
        self.codegen_node_schedule_with_kernel(features.node_schedule, kernel)
        kernel.kernel_name = _kernel_name(kernel, features.node_schedule)
        kernel.triton_meta, kernel.inductor_meta = {}, {}  # for Triton, which is not run
        with V.set_kernel_handler(kernel):
            for node in features.scheduler_nodes():
                node.mark_run()
        kernel.call_kernel(kernel.kernel_name)
        V.graph.removed_buffers |= kernel.removed_buffers
        V.graph.inplaced_to_remove |= kernel.inplaced_to_remove
        self.free_buffers_in_scheduler()

    def arguments(_: Any, node_schedule: Any, kernel: Any) -> None:
        nodes = list(NodeScheduleMarker.only_nodes(node_schedule))
        with kernel:
            for node in nodes:
                node.decide_inplace_update()
            for node in nodes:
                _describe(kernel, node)

    def untiled(self: Any, node: Any) -> None:
        self._codegen_nodes(node.get_nodes())  # without analysing accesses, which only the choice of tiles needs

    with (
        mock.patch.object(SIMDScheduling, "codegen_node", untiled),
        mock.patch.object(SIMDScheduling, "codegen_node_schedule", described),
        mock.patch.object(SIMDScheduling, "codegen_node_schedule_with_kernel", arguments),
    ):
        yield


def _describe(kernel: Any, node: Any) -> None:
    """Add the kernel's arguments that one of its loops needs."""
    body, stored = node._body, kernel.store_buffer_names
    for kind in _READS:
        for entry in body.memory_usage[kind]:
            if entry.buffer_name is not None and entry.buffer_name not in stored:
                kernel.args.input(entry.buffer_name)
    if body.has_partial_accumulate:  # one half of a mixed-order reduction: its sums go to the kernel's workspace
        for call in body.root_block.graph.find_nodes(op="call_method", target="partial_accumulate"):
            kernel.partial_accumulate(call.args[1], call.args[2], None, {})
        return
    for write in node.read_writes.writes:
        stored.add(write.name)
        if write.name not in V.graph.removed_buffers:
            kernel.args.output(write.name)


def _kernel_name(kernel: Any, node_schedule: Any) -> str:
    """Inductor's name for the kernel: its category (poi, red, per) and the operations it fuses."""
    fused = get_fused_kernel_name(node_schedule, inductor_config.triton.descriptive_names)
    return f"triton_{kernel._get_heuristic()[:3]}_{fused}_{V.graph.wrapper_code.next_kernel_suffix()}"
