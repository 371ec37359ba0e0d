"""Reads inductor's wrapper lines as operations on buffers.

A storage is known by the names that refer to it. Reuse gives it a new name; it is freed when the last name goes,
unless something outside the graph holds it too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch._inductor import ir
from torch._inductor.codegen import wrapper as lines
from torch._inductor.codegen.common import WorkspaceArg
from torch.utils import _pytree as pytree

from oomph.step import kernels as kernels
from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase
from oomph.step.trace import flops as trace_flops
from oomph.step.trace.inductor.plan import Planned, storage_bytes, view_numel

_BLOCK = re.compile(r"(?:^|\.)(?:h|layers?|blocks?)\.(\d+)(?:\.|$)")
_ASSIGNMENT = re.compile(r"^(\w+) = (workspace_\w+)\[")
_PRODUCT = re.compile(r"\b(mm|bmm|addmm|baddbmm)\b")
_VIEWS = ("permute", "view", "reshape", "expand", "squeeze", "getitem", "split", "full", "iota")
_LOSS_OPS = ("log_softmax", "nll_loss", "cross_entropy", "prepare_softmax_online")


class GraphOps(msgspec.Struct, frozen=True):
    """One compiled graph: its operations, and the storage behind each input and output (None: not a tensor)."""

    ops: tuple[Op, ...]
    inputs: tuple[Buffer | None, ...]
    outputs: tuple[Buffer | None, ...]


class _NamedBuffer:
    """A buffer, and its names in the generated program."""

    __slots__ = ("buffer", "held", "names")

    def __init__(self, buffer: Buffer, held: bool) -> None:
        self.buffer, self.held, self.names = buffer, held, set[str]()


class WrapperReader:
    """Reads one graph's lines into operations."""

    def __init__(
        self,
        planned: Planned,
        phase: Phase,
        inputs: Sequence[Buffer | None],
        held: Collection[Buffer],
        vocabulary_numel: int,
        gradients: bool,
    ) -> None:
        self.planned, self.phase, self.held = planned, phase, set(held)
        self.vocabulary_numel, self.gradients = vocabulary_numel, gradients
        self.inputs = tuple(inputs)
        self.storages: dict[str, _NamedBuffer] = {}
        self.by_buffer: dict[Buffer, _NamedBuffer] = {}
        self.results: dict[str, _NamedBuffer] = {}  # of kernels that return several buffers, until each has its name
        self.tuples: dict[str, list[_NamedBuffer]] = {}  # all results of such a kernel, while its tuple is alive
        self.order = {node.name: index for index, node in enumerate(planned.traced.graph.nodes)}
        self.ops: list[Op] = []
        self.fresh: list[Buffer] = []  # allocated since the last operation
        self.written: list[str] = []  # names written by the next operation
        self.output_names = [self._output_name(output) for output in planned.graph.graph_outputs]
        for name, buffer in zip(planned.graph.graph_inputs, inputs, strict=True):
            if buffer is not None:
                self._bind(name, buffer)

    def read(self) -> GraphOps:
        """Read every line, then free what is freed when the program returns."""
        for line in self.planned.lines:
            self._line(line)
        self._return()
        outputs = tuple(self.storages[name].buffer if name in self.storages else None for name in self.output_names)
        return GraphOps(tuple(self.ops), self.inputs, outputs)

    def _line(self, line: Any) -> None:
        match line:
            case lines.AllocateLine():
                self._allocate(line.node)
            case lines.ReuseLine():
                self._rename(line.node.get_name(), line.reused_as.get_name(), line.delete_old)
            case lines.ReinterpretLine():
                self._rename(line.node.get_name(), line.reused_as.get_name(), False)
            case lines.FreeIfNotReusedLine():
                if not line.is_reused:
                    self._drop(line.node.get_name())
            case lines.FreeLine():
                self._drop(line.node.get_name())
            case lines.MultiOutputLine():
                self._multi_output(line)
            case lines.KernelCallLine():
                self._kernel(line)
            case lines.ExternKernelOutLine():
                self._extern(line.node)
            case lines.ExternKernelAllocLine():  # the kernel itself allocates its result
                if not isinstance(line.node.layout, ir.MultiOutputLayout | ir.NoneLayout):
                    self._allocate(line.node)
                self._extern(line.node)
            case str():
                self._text(line)

    # --- storages -------------------------------------------------------------------------------
    def _bind(self, name: str, buffer: Buffer) -> None:
        storage = self.by_buffer.get(buffer)
        if storage is None:
            storage = self.by_buffer[buffer] = _NamedBuffer(buffer, buffer in self.held)
        storage.names.add(name)
        self.storages[name] = storage

    def _allocate(self, node: Any) -> None:
        name = node.get_name()
        buffer = Buffer(self._name(node), storage_bytes(self.planned, node), self._kind(node), self._block(node))
        self._bind(name, buffer)
        self.fresh.append(buffer)
        self.written.append(name)

    def _rename(self, old: str, new: str, delete_old: bool) -> None:
        storage = self.storages.get(old)
        if storage is None:
            return
        storage.names.add(new)
        self.storages[new] = storage
        if delete_old and old not in self.output_names:
            storage.names.discard(old)
            del self.storages[old]
        self.written.append(new)

    def _drop(self, name: str) -> None:
        for each in self.tuples.pop(name, ()):
            self._forget(each, name)
        storage = self.storages.get(name)
        if storage is None or name in self.output_names:
            return
        del self.storages[name]
        self._forget(storage, name)

    def _forget(self, storage: _NamedBuffer, name: str) -> None:
        """Drop one name of a storage; without any it is freed."""
        storage.names.discard(name)
        if not storage.names and not storage.held and self.ops:
            self.ops[-1] = msgspec.structs.replace(self.ops[-1], frees=(*self.ops[-1].frees, storage.buffer))

    def _return(self) -> None:
        kept = {self.storages[name] for name in self.output_names if name in self.storages}
        alive = [*self.storages.values(), *(storage for each in self.tuples.values() for storage in each)]
        left = {id(s): s for s in alive if s not in kept and not s.held}
        if left or self.fresh:
            frees = tuple(storage.buffer for storage in left.values())
            self.ops.append(Op("return", self.phase, tuple(self.fresh), frees))

    # --- operations -----------------------------------------------------------------------------
    def _add(self, name: str, kernel: Kernel, temporaries: tuple[Buffer, ...] = (), **facts: Any) -> None:
        allocates = (*self.fresh, *temporaries)
        self.ops.append(Op(name, self.phase, allocates, temporaries, kernel, **facts))
        self.fresh.clear()
        self.written.clear()

    def _kernel(self, line: Any) -> None:
        arguments = [name for argument in line.call_args if (name := str(argument)) in self.storages]
        # A buffer that is both read and written is two arguments, or one whose name is new since the last kernel.
        over = [name for name in dict.fromkeys(arguments) if name in self.written and name in self.planned.in_place]
        touched = Counter(self.storages[name].buffer for name in (*arguments, *over))
        named = (self._node(name) for name in (*reversed(self.written), *reversed(arguments)))
        node = next((each for each in named if each is not None), None)  # a workspace has no node
        kernel = Kernel.REDUCTION if "_red_" in line.kernel_name or "_per_" in line.kernel_name else Kernel.POINTWISE
        if "embedding" in line.kernel_name:
            kernel = Kernel.INDEX
        dtype = str(node.get_dtype()).removeprefix("torch.") if node is not None else "float32"
        name = self._name(node) if node is not None else line.kernel_name
        self._add(name, kernel, dtype=dtype, bytes_moved=_moved(touched, kernel))

    def _extern(self, node: Any) -> None:
        sizes = [tuple(int(s) for s in i.get_size()) for i in node.inputs if hasattr(i, "get_size")]
        moved = sum(view_numel(i) * i.get_dtype().itemsize for i in node.inputs if hasattr(i, "get_size"))
        single = not isinstance(node.layout, ir.MultiOutputLayout | ir.NoneLayout)
        if single:
            moved += view_numel(node) * node.get_dtype().itemsize
        elif isinstance(node.layout, ir.MultiOutputLayout):
            moved += self._several(node)
        name = self._name(node)
        label = str(getattr(node, "op_overload", None) or getattr(node, "python_kernel_name", ""))
        if "convolution" in label:
            self._convolution(node, name, sizes, moved)
            return
        if "attention" in label:
            self._attention(node, name, label, sizes, moved)
            return
        dtype = str(node.get_dtype()).removeprefix("torch.") if single else "float32"
        if "grouped_mm" in label:
            shape = trace_flops.grouped(*sizes[:2])
            self._add(name, Kernel.GEMM, shape=shape, flops=trace_flops.flops_of(shape), bytes_moved=moved, dtype=dtype)
        elif _PRODUCT.search(label) and len(sizes) >= 2:
            left, right = sizes[-2:]
            batch = left[0] if len(left) == 3 else 1
            shape = (batch, left[-2], right[-1], left[-1])
            flops = 2 * batch * left[-2] * right[-1] * left[-1]
            self._add(name, Kernel.GEMM, shape=shape, flops=flops, bytes_moved=moved, dtype=dtype)
        else:
            self._add(name, Kernel.POINTWISE, bytes_moved=moved, dtype=dtype)

    def _convolution(self, node: Any, name: str, sizes: list[tuple[int, ...]], moved: int) -> None:
        traced = _traced(node, "convolution")
        backward = "backward" in str(traced.target)
        out, inputs, weight = sizes[:3] if backward else (tuple(map(int, node.get_size())), *sizes[:2])
        wanted = sum(_argument(traced, "output_mask")[:2]) if backward else 1
        moves_over = inputs if _argument(traced, "transposed") else out
        shape = trace_flops.convolution(weight, moves_over, _argument(traced, "groups"), wanted)
        dtype = str(node.inputs[0].get_dtype()).removeprefix("torch.")
        self._add(name, Kernel.GEMM, shape=shape, flops=trace_flops.flops_of(shape), bytes_moved=moved, dtype=dtype)

    def _attention(self, node: Any, name: str, label: str, sizes: list[tuple[int, ...]], moved: int) -> None:
        backward = "backward" in label
        (batch, heads, tokens, size), key, value = sizes[1:4] if backward else sizes[:3]
        shape = (batch, heads, tokens, size)
        block = self._block(node)
        dtype = str(node.inputs[0].get_dtype()).removeprefix("torch.")
        needed = _attention_bytes(label, backward, shape, key[1], value[3], dtype != "float32")
        temporaries = tuple(Buffer(f"{name}.temporary", each, Kind.ATTENTION, block) for each in needed)
        traced = _traced(node, "attention")
        scores = tokens * tokens if _argument(traced, "is_causal") else 2 * tokens * key[2]  # twice: causal is half
        flops = batch * heads * trace_flops.attention(scores, size, value[3], backward) // 2
        self._add(name, Kernel.ATTENTION, temporaries, shape=shape, flops=flops, bytes_moved=moved, dtype=dtype)

    def _several(self, node: Any) -> int:
        """The bytes allocated by a kernel that returns a tuple, which keeps all of them alive while it exists."""
        name = node.get_name()
        self.tuples[name] = []
        for each in pytree.tree_leaves(node.outputs):
            if not isinstance(each, ir.MultiOutput):
                continue
            buffer = Buffer(self._name(each), storage_bytes(self.planned, each), self._kind(each), self._block(each))
            storage = self.by_buffer[buffer] = self.results[each.get_name()] = _NamedBuffer(buffer, held=False)
            storage.names.add(name)
            self.tuples[name].append(storage)
            self.fresh.append(buffer)
        return sum(storage.buffer.bytes for storage in self.tuples[name])

    def _multi_output(self, line: Any) -> None:
        storage = self.results.pop(line.result_name, None)
        if storage is not None:
            storage.names.add(line.result_name)
            self.storages[line.result_name] = storage

    def _text(self, line: str) -> None:
        """Read the one computation that inductor writes as text: the last round of a split reduction."""
        if (found := _ASSIGNMENT.match(line.strip())) is None:
            return
        node = self.planned.graph.get_buffer(found[1])
        if node is not None:
            self._allocate(node)
            self._add(self._name(node), Kernel.REDUCTION, bytes_moved=self.storages[found[2]].buffer.bytes)

    # --- names and kinds of buffers -------------------------------------------------------------
    def _node(self, name: str) -> Any:
        return self.planned.graph.try_get_buffer(name) if name else None

    def _output_name(self, output: Any) -> str:
        return "" if isinstance(output, ir.NoneAsConstantBuffer | ir.ShapeAsConstantBuffer) else str(output.get_name())

    def _origin(self, node: Any) -> Any:
        """The traced operation that a buffer is named after: the last computation whose module is known."""
        origins = list(node.get_origins()) if hasattr(node, "get_origins") else []
        if not origins:
            return None
        computing = [o for o in origins if not any(part in str(o.target) for part in _VIEWS)] or origins
        named = [o for o in computing if (o.meta.get("custom") or {}).get("module")] or computing
        return max(named, key=lambda origin: self.order.get(origin.name, -1))

    def _module(self, node: Any) -> str:
        origin = self._origin(node)
        return str((origin.meta.get("custom") or {}).get("module") or "") if origin is not None else ""

    def _name(self, node: Any) -> str:
        origin = self._origin(node)
        if origin is None:
            return str(node.get_name())
        what = str(origin.target).removeprefix("aten.").removeprefix("prims.").partition(".")[0].strip("_")
        module = (origin.meta.get("custom") or {}).get("module") or ""
        return f"{module}.{what}".lstrip(".")

    def _block(self, node: Any) -> int | None:
        found = _BLOCK.search(self._module(node))
        return int(found[1]) if found else None

    def _kind(self, node: Any) -> Kind:
        origins = list(node.get_origins()) if hasattr(node, "get_origins") else []
        targets = " ".join(str(origin.target) for origin in origins)
        if isinstance(node, WorkspaceArg):
            return Kind.TEMPORARY
        if view_numel(node) >= self.vocabulary_numel > 0 or any(part in targets for part in _LOSS_OPS):
            return Kind.LOGITS
        if node.get_name() in self.output_names and self.gradients:
            return Kind.GRADIENTS
        if origins and _only_casts(origins):
            return Kind.HALF_WEIGHTS
        if "attention" in targets:
            return Kind.ATTENTION
        return Kind.ACTIVATIONS if self.phase is not Phase.BACKWARD else Kind.TEMPORARY


def _traced(node: Any, name: str) -> Any:
    """The traced call behind a kernel whose name contains this."""
    return next(origin for origin in node.get_origins() if name in str(origin.target))


def _argument(traced: Any, name: str) -> Any:
    """An argument of a traced call, or its default."""
    arguments = traced.target._schema.arguments
    position = next(index for index, argument in enumerate(arguments) if argument.name == name)
    given = traced.args[position] if position < len(traced.args) else arguments[position].default_value
    return traced.kwargs.get(name, given)


def _attention_bytes(
    label: str, backward: bool, shape: tuple[int, int, int, int], key_heads: int, value_size: int, half: bool
) -> tuple[int, ...]:
    """The bytes of an attention kernel's temporaries."""
    _, _, tokens, size = shape
    if "for_cpu" in label:
        threads = torch.get_num_threads()
        if backward:
            return kernels.cpu_flash_backward_bytes(threads, tokens, half)
        return (kernels.cpu_flash_bytes(threads, tokens, size, half),)
    if not backward:
        return ()
    if "efficient" in label:
        return kernels.efficient_backward_bytes(*shape, half, value_size)
    return kernels.flash_backward_bytes(*shape, key_heads)


def _only_casts(origins: Sequence[Any]) -> bool:
    """Whether a buffer is a parameter in another dtype: only casts and transposes of a graph input."""
    for origin in origins:
        if origin.op == "placeholder":
            continue
        name = str(origin.target)
        if not ("convert_element_type" in name or "permute" in name or "_to_copy" in name):
            return False
        if "convert_element_type" in name and origin.args[0].op != "placeholder":
            return False
    return True


def _moved(touched: Mapping[Buffer, int], kernel: Kernel) -> int:
    """Bytes that a kernel reads and writes; of a table it gathers from or scatters to, only the rows it uses."""
    sizes = {buffer: buffer.bytes for buffer in touched}
    if kernel is Kernel.INDEX and len(sizes) > 1:
        second, largest = sorted(sizes, key=lambda buffer: buffer.bytes)[-2:]
        sizes[largest] = second.bytes
    return sum(times * sizes[buffer] for buffer, times in touched.items())
