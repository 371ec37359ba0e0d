"""Records what a PyTorch program allocates and frees, operation by operation.

A dispatch mode sees every operator call. A new storage among its results is an allocation; a weak reference to the
storage reports when it is freed. Both work on fake tensors, which have storages of the right size and no memory.
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oomph.errors import InputError, Problem
from oomph.step.depth import block_of
from oomph.step.ops import Buffer, Kind, Op, Phase, Section
from oomph.step.trace.eager.cost import cost
from oomph.step.trace.eager.temporaries import temporary_bytes, workspace_bytes

aten = torch.ops.aten
_EFFICIENT = aten._scaled_dot_product_efficient_attention.default
_LAYER_NORM = aten.native_layer_norm.default
_INTO_ZEROS = (aten.index_put.default, aten.scatter.src)
_HALVES = (torch.bfloat16, torch.float16)
_DEVICE = torch.ops.prim.device.default
MOST_CALLS_ALONE = 512  # consecutive calls by one module, above which it is taken for a loop over tokens
MOST_CALLS = 100_000  # a hundred blocks make fewer; a recurrence over tokens, as in Mamba without its kernels, more
_SHORT = "a smaller block_size, or one operator in place of the loop"


class LoopError(Exception):
    """A module makes so many calls in a row that it seems to loop over its tokens."""


class Live:
    """One live allocation. Its kind may be determined later."""

    __slots__ = ("block", "buffer", "kind", "name", "numel", "size_bytes")

    def __init__(self, name: str, size_bytes: int, numel: int, kind: Kind, block: int | None) -> None:
        self.name, self.size_bytes, self.numel, self.kind, self.block = name, size_bytes, numel, kind, block
        self.buffer: Buffer | None = None

    def settle(self) -> Buffer:
        """The final buffer, the same one on every call."""
        if self.buffer is None:
            self.buffer = Buffer(self.name, self.size_bytes, self.kind, self.block)
        return self.buffer


class Noted:
    """One operator call, and what was freed after it."""

    __slots__ = ("allocated", "arguments", "freed", "name", "phase")

    def __init__(self, name: str, phase: Phase, arguments: tuple[Any, ...], allocated: list[Live]) -> None:
        self.name, self.phase, self.arguments, self.allocated = name, phase, arguments, allocated
        self.freed: list[Live] = []


class Recorder(TorchDispatchMode):
    """Records allocations and frees while it is active."""

    def __init__(self, cuda: bool, attention: str, most_alone: int = MOST_CALLS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cuda = cuda
        self.attention = attention  # which of CUDA's kernels is requested
        self.most_alone = most_alone  # allowed consecutive calls by one module
        self.alone_from = 0  # index of the first of those
        self.phase = Phase.FORWARD
        self.modules: list[str] = []  # the stack of modules whose forward is running
        self.backward_modules: list[tuple[int, str]] = []  # autograd's sequence numbers and their modules
        self.noted: list[Noted] = []
        self.live: dict[int, tuple[weakref.ref[Any], Live]] = {}
        self.parameters: set[int] = set()
        self.names: dict[int, str] = {}  # the parameters' names, by tensor
        self.logits_numel = 0
        self.composes = False  # whether attention is being composed of plain products
        self.sole_uses = (0, 0)  # reference counts of a gradient that only the engine holds, as seen here
        self.calibrating = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False skips a wrapper around every call that keeps dynamo out: it is never active here."""
        return False

    def enter(self, module: str) -> None:
        """A module's forward begins: autograd nodes from here on are attributed to it."""
        self.modules.append(module)
        self.alone_from = len(self.noted)
        self.backward_modules.append((torch._C._autograd._get_sequence_nr(), module))

    def leave(self) -> None:
        """The module's forward ends: what follows is attributed to its parent."""
        self.modules.pop()
        self.alone_from = len(self.noted)
        self.backward_modules.append((torch._C._autograd._get_sequence_nr(), self.modules[-1] if self.modules else ""))

    @contextlib.contextmanager
    def composing(self) -> Iterator[None]:
        """While active, attention is composed of plain products: without a mode its mask is added in place."""
        self.composes = True
        try:
            yield
        finally:
            self.composes = False

    def calibrate(self) -> None:
        """Measure the reference counts of a gradient held only by autograd's engine when two gradients are added."""
        self.calibrating, self.phase = True, Phase.BACKWARD
        leaf = torch.ones(2, requires_grad=True)
        both = leaf.exp()
        (both + both.sin()).exp().sum().backward()  # type: ignore[no-untyped-call]
        del leaf, both
        self.calibrating = False
        self.noted = []

    # --- live allocations -----------------------------------------------------------------------

    def adopt(self, tensor: torch.Tensor, kind: Kind, name: str) -> None:
        """Count a tensor that exists before the recording."""
        self._see(tensor, name, kind, [])
        if kind is Kind.PARAMETERS:
            self.parameters.add(id(tensor.untyped_storage()))
            self.names[id(tensor)] = name

    def know_logits(self, output: Any) -> None:
        """From here on, tensors with as many elements as the output's largest count as logits."""
        sizes = [leaf.numel() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.dim() > 1]
        self.logits_numel = max(sizes, default=0)
        for _, made in self.live.values():
            if made.numel == self.logits_numel and made.kind in (Kind.ACTIVATIONS, Kind.TEMPORARY):
                made.kind = Kind.LOGITS

    def find(self, tensor: torch.Tensor) -> Live | None:
        """The allocation behind a tensor."""
        entry = self.live.get(id(tensor.untyped_storage()))
        return entry[1] if entry else None

    def _see(self, tensor: torch.Tensor, name: str, kind: Kind, allocated: list[Live]) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self.live:
            return
        if tensor.numel() == self.logits_numel and kind in (Kind.ACTIVATIONS, Kind.TEMPORARY):
            kind = Kind.LOGITS
        made = Live(name, storage.nbytes(), tensor.numel(), kind, block_of(name))
        self._watch(storage, made)
        allocated.append(made)

    def _watch(self, storage: Any, made: Live) -> None:
        key = id(storage)
        self.live[key] = (weakref.ref(storage, lambda _: self._gone(key, made)), made)

    def _gone(self, key: int, made: Live) -> None:
        entry = self.live.get(key)
        if entry is None or entry[1] is not made:
            return  # handed over to the tensor computed in its place
        del self.live[key]
        if self.noted:
            self.noted[-1].freed.append(made)

    # --- operator calls -------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:  # two calls in three are this query from autograd
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args, **kwargs)
        joins = (func is aten.add.Tensor and self._joins_in_place(args)) or (func in _INTO_ZEROS and self._backs())
        result = func(*args, **kwargs)
        if joins:
            self._hand_on(args[0], result)
        if func is aten.lift_fresh.default and self.cuda:
            self._watch(result.untyped_storage(), Live("host", 0, 0, Kind.TEMPORARY, None))
            return result  # torch.tensor(…) without a device is on the host
        name = self._name(func)
        allocated: list[Live] = []
        kind = self._kind(func, args)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, name, kind, allocated)
        self._adjust(func, args, allocated)
        sizes = temporary_bytes(func, args, result, self.cuda)
        temporary = [Live(name, size, 0, kind, block_of(name)) for size in sizes]
        noted = Noted(name, self.phase, cost(func, args, result, self.phase), allocated + temporary)
        self.noted.append(noted)
        if self.modules and len(self.noted) - self.alone_from > self.most_alone:
            raise LoopError
        if len(self.noted) > MOST_CALLS:
            found = f"more than {MOST_CALLS:,} operator calls in a micro-step"
            raise InputError(
                Problem("model", "has a loop over its tokens, which takes too long to trace", found, _SHORT)
            )
        noted.freed += temporary
        self._mark_gradients(func, args)
        return result

    def _name(self, func: Any) -> str:
        node: Any = torch._C._current_autograd_node()
        if node is not None and node.name().endswith("AccumulateGrad"):
            return f"{self.names.get(id(node.variable), 'unknown')}.grad"
        module = self.modules[-1] if self.modules else self._module_of(node)
        return f"{module}.{func._opname}" if module else func._opname

    def _module_of(self, node: Any) -> str:
        """The module in whose forward an autograd node was created."""
        if node is None:
            return ""
        place = bisect_right(self.backward_modules, node._sequence_nr(), key=lambda entry: entry[0])
        return self.backward_modules[place - 1][1] if place else ""

    def _kind(self, func: Any, args: Any) -> Kind:
        if "scaled_dot_product" in func._opname:
            return Kind.ATTENTION
        if func is aten._to_copy.default and id(args[0].untyped_storage()) in self.parameters:
            return Kind.HALF_WEIGHTS
        if self.phase in (Phase.FORWARD, Phase.EVAL):
            return Kind.ACTIVATIONS
        return Kind.LOGITS if self.phase is Phase.LOSS else Kind.TEMPORARY

    def _mark_gradients(self, func: Any, args: Any) -> None:
        """Mark gradients in AccumulateGrad, which detaches the first and adds later ones."""
        node = torch._C._current_autograd_node() if self.phase is Phase.BACKWARD else None
        if node is None or not node.name().endswith("AccumulateGrad"):
            return
        made = self.find(args[1] if func is aten.add_.Tensor else args[0])
        if made is not None:
            made.kind = Kind.GRADIENTS

    def allocate(self, tensor: torch.Tensor, name: str) -> None:
        """Count a tensor allocated just now, unseen by dispatch modes."""
        allocated: list[Live] = []
        self._see(tensor, name, Kind.TEMPORARY, allocated)
        self.noted.append(Noted(name, self.phase, (), allocated))

    # --- what the engine does without a dispatch mode ---------------------------------------------

    def _joins_in_place(self, args: Any) -> bool:
        """Whether the engine, without a mode, would add into the first gradient instead of a new tensor.

        When gradients meet, autograd adds in place if it holds the only reference to the older one. While any
        dispatch mode is active it does not, so the recorder undoes that difference.
        """
        first: Any = args[0]
        if self.composes:
            return True  # attention's mask onto its scores
        both = isinstance(first, torch.Tensor) and isinstance(args[1], torch.Tensor)
        if self.phase is not Phase.BACKWARD or torch.is_grad_enabled() or not both:
            return False
        count: Any = first._use_count
        uses = (count(), torch._C._storage_Use_Count(first.untyped_storage()._cdata))
        if self.calibrating:
            self.sole_uses = uses
        alone = all(seen <= sole for seen, sole in zip(uses, self.sole_uses, strict=True))
        return alone and is_non_overlapping_and_dense_or_false(first) and not first._is_view()

    def _backs(self) -> bool:
        """Whether autograd calls: without a dispatch mode, the backwards of indexing write into their zeros."""
        return self.phase is Phase.BACKWARD and not torch.is_grad_enabled()

    def _hand_on(self, old: torch.Tensor, new: torch.Tensor) -> None:
        entry = self.live.pop(id(old.untyped_storage()), None)
        if entry is not None:
            self._watch(new.untyped_storage(), entry[1])

    def _adjust(self, func: Any, args: Any, allocated: list[Live]) -> None:
        """Correct results whose size on fake CPU tensors differs from what the kernel allocates."""
        if func is _LAYER_NORM and args[0].dtype in _HALVES:
            weight = args[2]
            if self.cuda or (weight is not None and weight.dtype is torch.float32):
                for made in allocated[1:]:
                    made.size_bytes = 4 * made.numel  # CUDA keeps a row's mean and deviation in float32, a CPU at times
        elif self.cuda and func is _EFFICIENT:
            for made in allocated[2:]:
                made.size_bytes = 0  # its random state is on the host
        elif not self.cuda and (kept_bytes := workspace_bytes(func, args)):
            allocated[-1].size_bytes = kept_bytes

    # --- the result -----------------------------------------------------------------------------

    def resident(self) -> tuple[Buffer, ...]:
        """Everything alive now."""
        return tuple(made.settle() for _, made in self.live.values() if made.size_bytes)

    def section(self, name: str, times: int = 1) -> Section:
        """Everything recorded since the last section."""
        ops = tuple(
            Op(
                each.name,
                each.phase,
                tuple(made.settle() for made in each.allocated if made.size_bytes),
                tuple(made.settle() for made in each.freed if made.size_bytes),
                *each.arguments,
            )
            for each in self.noted
        )
        self.noted = []
        return Section(name, ops, times)
