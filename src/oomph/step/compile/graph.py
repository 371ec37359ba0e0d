"""A model's forward and backward as one graph of small operations, as AOTAutograd records them.

The model's own functions run on a `GraphRecorder` instead of a `Tape`: every operation becomes a `Value` of the graph,
equal expressions become one, and what PyTorch decomposes is decomposed (`decompose`). The autograd engine is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import IntEnum, auto
from typing import Any, TypeVar

from oomph.step.depth import block_of
from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.layout import HALVES, ITEM_BYTES, Shape, contiguous_strides, dense_strides_like, numel
from oomph.step.tensor.tape import Tape, Weight
from oomph.step.tensor.tensor import Tensor

T = TypeVar("T")


class How(IntEnum):
    """The kind of operation that a value results from."""

    INPUT = auto()  # parameters, buffers and the batch
    TANGENT = auto()  # the gradient that backward begins with
    VIEW = auto()
    POINTWISE = auto()
    REDUCTION = auto()
    CONSTANT = auto()  # made without inputs: full, arange
    RANDOM = auto()
    GATHER = auto()  # rows of a table
    SCATTER = auto()  # rows written into a table of zeros
    CAT = auto()
    PRODUCT = auto()  # a matrix product
    CALL = auto()  # a kernel with several results; not a tensor itself
    ITEM = auto()  # one of those results


FUSIBLE = {How.POINTWISE, How.REDUCTION, How.VIEW, How.CONSTANT, How.ITEM, How.RANDOM}


class Value:
    """One operation and its result."""

    __slots__ = (
        "block", "bytes", "checkpoint", "dtype", "facts", "how", "index", "inputs", "kind", "name", "offset", "op",
        "shape", "strides", "users",
    )  # fmt: skip

    def __init__(
        self, op: str, how: How, inputs: tuple[Value, ...], shape: Shape, dtype: str, strides: Shape, offset: int = 0
    ) -> None:
        self.op, self.how, self.inputs = op, how, inputs
        self.shape, self.dtype, self.strides, self.offset = shape, dtype, strides, offset
        self.bytes = numel(shape) * ITEM_BYTES[dtype] if how is not How.CALL else 0
        self.users: list[Value] = []
        self.index = 0
        self.name, self.kind = op, Kind.ACTIVATIONS
        self.block: int | None = None
        self.checkpoint: int | None = None  # the checkpointed region that computes it
        self.facts: dict[str, Any] = {}  # of products and kernels: shape, flops, temporaries, arithmetic dtype

    def copied(self, name: str, block: int, index: int) -> Value:
        """The same operation in another block; its inputs are set later."""
        copy = Value.__new__(Value)
        copy.op, copy.how, copy.inputs = self.op, self.how, ()
        copy.shape, copy.dtype, copy.strides, copy.offset = self.shape, self.dtype, self.strides, self.offset
        copy.bytes, copy.users, copy.index = self.bytes, [], index
        copy.name, copy.kind, copy.block, copy.checkpoint = name, self.kind, block, self.checkpoint
        copy.facts = self.facts
        return copy

    def __lt__(self, other: Value) -> bool:
        return self.index < other.index

    def __repr__(self) -> str:
        return f"{self.op}_{self.index}{self.dtype}{list(self.shape)}"


class GraphTensor(Tensor):
    """A tensor of the graph, whose storage is a value."""

    __slots__ = ()

    @property
    def value(self) -> Value:
        found = self.storage
        assert isinstance(found, Value)
        return found

    def detach(self) -> Tensor:
        """The same value, without autograd history."""
        return GraphTensor(self.tape, self.storage, self.shape, self.strides, self.dtype, None, True)

    def as_strided(self, shape: Shape, strides: Shape, offset: int = 0, op: str = "view") -> Tensor:
        """A view, recorded as an operation."""
        if shape == self.shape and strides == self.strides and not offset:
            return self.detach()
        recorder = self.tape
        assert isinstance(recorder, GraphRecorder)
        return recorder.record(op, How.VIEW, (self,), shape, self.dtype, strides, offset=offset, key=(strides, offset))


class GraphRecorder(Tape):
    """Records a program as a graph."""

    compiles = True

    def __init__(self, weights: Mapping[str, Weight], rules: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        """`rules` replace operations of `step.tensor`: `decompose.RULES`."""
        super().__init__(weights, **options)
        self.rules = rules
        self.values: list[Value] = []
        self.inputs: dict[str, Value] = {}
        self.region: int | None = None  # the checkpointed region being recorded
        self.regions = 0
        self.by_op = False  # selective checkpointing: expensive results are saved, except every second product
        self.products = 0  # products recorded in this region
        self.writes_one_hot = False  # backward of the loss writes the targets as one-hot: torch before 2.5
        self._known: dict[Hashable, Value] = {}

    def record(
        self,
        op: str,
        how: How,
        reads: Sequence[Tensor],
        shape: Shape,
        dtype: str,
        strides: Shape | None = None,
        *,
        kind: Kind | None = None,
        offset: int = 0,
        key: Hashable = (),
        **facts: Any,
    ) -> GraphTensor:
        """The result of an operation; of equal operations, the first one's."""
        inputs = tuple([each.storage for each in reads])
        strides = contiguous_strides(shape) if strides is None else strides
        known = (op, how, shape, dtype, key, *map(id, inputs))
        value = self._known.get(known) if how is not How.RANDOM else None
        if value is None:
            value = Value(op, how, inputs, shape, dtype, strides, offset)  # type: ignore[arg-type]
            value.index, value.block, value.kind = len(self.values), self.block, kind or self.kind
            value.name, value.facts, value.checkpoint = self._name(op), facts, self.region
            for each in dict.fromkeys(value.inputs):
                each.users.append(value)
            self.values.append(value)
            self._known[known] = value
        return GraphTensor(self, value, shape, value.strides, dtype, None, True)  # type: ignore[arg-type]

    def kept(self, make: Callable[[], T], product: bool = False) -> T:
        """The result of a product or attention, recorded outside the current region if that saves it (`by_op`)."""
        self.products += product
        if not self.by_op or (product and self.products % 2 == 0):
            return make()
        outer, self.region = self.region, None
        try:
            return make()
        finally:
            self.region = outer

    def input(
        self, name: str, shape: Shape, dtype: str, how: How = How.INPUT, kind: Kind = Kind.PARAMETERS
    ) -> GraphTensor:
        """An input of the graph."""
        found = self.record(name, how, (), shape, dtype, key=name, kind=kind)
        self.inputs.setdefault(name, found.value)
        found.value.name, found.value.block, found.value.checkpoint = name, block_of(name), None
        return found

    def clear(self) -> None:
        """Drop every value."""
        for each in (self.values, self.inputs, self.casts, self.grads, self._known):
            each.clear()

    # --- overrides of `Tape`, which records on a ledger ---------------------------------------------------------

    def made(
        self,
        name: str,
        shape: Shape,
        dtype: str,
        reads: Sequence[Tensor] = (),
        kind: Kind | None = None,
        *,
        strides: Shape | None = None,
        kernel: Kernel = Kernel.POINTWISE,
        **_: Any,
    ) -> Tensor:
        how = How.REDUCTION if kernel is Kernel.REDUCTION else How.POINTWISE if reads else How.CONSTANT
        if name == "clone" and reads[0].shape != shape:  # a copy, then a view of the copy
            return self.record(name, how, reads, reads[0].shape, dtype, kind=kind).as_strided(
                shape, contiguous_strides(shape)
            )
        if how is How.REDUCTION and dtype in HALVES:  # accumulated in float32
            return self.cast(self.record(name, how, reads, shape, "float32", strides, kind=kind), dtype, kind)
        return self.record(name, how, reads, shape, dtype, strides, kind=kind)

    def cast(self, x: Tensor, dtype: str, kind: Kind | None = None) -> Tensor:
        strides = dense_strides_like(x.shape, x.strides)
        return self.record("convert", How.POINTWISE, (x,), x.shape, dtype, strides, kind=kind)

    def note(self, *_: Any, **__: Any) -> None:
        """Does nothing: writes into existing tensors are not recorded."""

    def buffer(self, name: str, shape: Shape, dtype: str) -> Tensor:
        return self.input(name, shape, dtype)

    def parameter(self, name: str) -> Tensor:
        leaf = super().parameter(name)
        found = self.input(name, leaf.shape, leaf.dtype)
        found.edge = leaf.edge
        return found
