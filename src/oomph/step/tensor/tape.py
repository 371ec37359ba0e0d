"""The state of a simulated program: its ledger, its precision, its parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from oomph.step.ops import Buffer, Kernel, Kind
from oomph.step.tensor.autograd import Backward, Leaf, Node
from oomph.step.tensor.layout import ITEM_BYTES, Shape, contiguous_strides, dense_strides_like, numel
from oomph.step.tensor.tensor import Ledger, Storage, Tensor

if TYPE_CHECKING:
    from oomph.step.tensor.checkpoint import Frame
    from oomph.step.tensor.quantized import Quantization


TRAINED_COPY = ".modules_to_save."  # in the name of a parameter that peft trains in place of a frozen one
T = TypeVar("T")


class Weight:
    """A parameter of the model: its shape, its dtype, whether it is trained, and how it is quantized, if at all."""

    __slots__ = ("dtype", "quantization", "shape", "trained")

    def __init__(
        self, shape: Shape, dtype: str, trained: bool = True, quantization: Quantization | None = None
    ) -> None:
        self.shape, self.dtype, self.trained, self.quantization = shape, dtype, trained, quantization


class Tape:
    """A program while it runs."""

    compiles = False  # whether it is recorded for torch.compile
    rules: Mapping[str, Callable[..., Any]] = {}  # replacements for operations

    def __init__(
        self,
        weights: Mapping[str, Weight],
        *,
        cuda: bool = True,
        threads: int = 1,  # of the CPU's kernels
        autocast: str | None = None,  # autocast's dtype; None: it is off
        tf32: bool = False,  # float32 products on tensor cores
        layers: Sequence[int] = (),  # the blocks to run
    ) -> None:
        self.ledger = Ledger()
        self.weights = weights
        self.cuda, self.threads, self.tf32 = cuda, threads, tf32
        self.layers = layers
        self.autocast = autocast
        self.casts: dict[str, Tensor] = {}  # autocast's weight cache
        self.grad_enabled = True
        self.training = True  # whether dropout is active
        self.frame: Frame | None = None  # the checkpointed region being run
        self.compiles_loss = False  # whether a chunked loss runs inductor's kernels between its products
        self.grads: dict[str, Storage | None] = {}
        self.cache: list[Storage | None] = []  # keys and values that the model returns besides its logits
        # Inputs made to require a gradient, and those gradients: held until the graph is freed.
        self.kept_inputs: list[Storage | None] = []
        self.scope = ""  # the module whose forward or backward is running
        self.kind = Kind.ACTIVATIONS  # the default kind of new buffers
        self._seq = 0
        self._leaves: dict[str, Leaf] = {}
        self.sink = Node(self, _nothing, ())

    @property
    def block(self) -> int | None:
        """The transformer block being run."""
        return self.ledger.block

    @block.setter
    def block(self, block: int | None) -> None:
        self.ledger.block = block

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    # --- making tensors -------------------------------------------------------------------------

    def allocate(self, name: str, size_bytes: int, kind: Kind) -> Storage:
        """The storage of an operation that only allocates."""
        buffer = Buffer(self._name(name), size_bytes, kind, self.block)
        self.ledger.note(buffer.name, (buffer,), Kernel.POINTWISE, size_bytes)
        return Storage(self.ledger, buffer)

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
        temporaries: Sequence[int] = (),
        moved: int | None = None,
    ) -> Tensor:
        """The result of a memory-bound operation. `temporaries`: bytes of buffers that live while it runs."""
        size = numel(shape) * ITEM_BYTES[dtype]
        name = self._name(name)
        kind = kind or self.kind
        buffer = Buffer(name, size, kind, self.block)
        if moved is None:
            moved = size
            for tensor in reads:
                moved += tensor.bytes
        if temporaries:
            extra = [Buffer(name, each, kind, self.block) for each in temporaries]
            self.ledger.note(name, (buffer, *extra), kernel, moved)
            self.ledger.frees += extra
        else:
            self.ledger.note(name, (buffer,), kernel, moved)
        storage = Storage(self.ledger, buffer)
        return Tensor(self, storage, shape, strides if strides is not None else contiguous_strides(shape), dtype)

    def launch(
        self,
        name: str,
        results: Sequence[tuple[str, int]],
        kind: Kind | Sequence[Kind] | None = None,
        *,
        temporaries: Sequence[int] = (),
        **work: Any,
    ) -> list[Storage]:
        """The storages of an operation with several results, by name and bytes. `work` is passed to `Ledger.note`."""
        base = self._name(name)
        kinds = [kind or self.kind] * len(results) if kind is None or isinstance(kind, Kind) else list(kind)
        made = [
            Buffer(f"{base}.{part}" if part else base, size, each, self.block)
            for (part, size), each in zip(results, kinds, strict=True)
        ]
        extra = [
            Buffer(f"{base}.temporary", size, kinds[0] if kinds else self.kind, self.block) for size in temporaries
        ]
        self.ledger.note(base, (*made, *extra), **work)
        self.ledger.frees += extra
        return [Storage(self.ledger, buffer) for buffer in made]

    def note(
        self, name: str, kernel: Kernel = Kernel.POINTWISE, moved: int = 0, temporaries: Sequence[int] = ()
    ) -> None:
        """Record an operation that writes into existing memory."""
        self.launch(name, (), kernel=kernel, moved=moved, temporaries=temporaries)

    def product(
        self, name: str, batch: int, m: int, n: int, k: int, dtype: str, kind: Kind | None = None, *, into: bool = False
    ) -> Storage | None:
        """A matrix product of (m, k) and (k, n), `batch` times; `into`: it writes into existing memory."""
        item = ITEM_BYTES[dtype]
        moved = batch * (m * n + n * k + m * k) * item
        shape, flops = (batch, m, n, k), 2 * batch * m * n * k
        unit = "tf32" if dtype == "float32" and self.tf32 else dtype
        results = () if into else (("", batch * m * n * item),)
        made = self.launch(name, results, kind, kernel=Kernel.GEMM, moved=moved, flops=flops, shape=shape, dtype=unit)
        return None if into else made[0]

    def tensor(self, storage: Storage | None, shape: Shape, dtype: str, strides: Shape | None = None) -> Tensor:
        """A tensor on an existing storage."""
        return Tensor(self, storage, shape, strides if strides is not None else contiguous_strides(shape), dtype)

    def kept(self, make: Callable[[], T], product: bool = False) -> T:
        """The result of a product or attention: saved for recomputation if checkpointing is selective (`by_op`)."""
        return make() if self.frame is None else self.frame.kept(make, product)

    def cast(self, x: Tensor, dtype: str, kind: Kind | None = None) -> Tensor:
        """A copy in another dtype, without autograd history."""
        return self.made("to", x.shape, dtype, (x,), kind, strides=dense_strides_like(x.shape, x.strides))

    def _name(self, name: str) -> str:
        return f"{self.scope}.{name}" if self.scope and name else self.scope or name

    # --- autograd -------------------------------------------------------------------------------

    def node(self, backward: Backward, *inputs: Tensor | None) -> Node | None:
        """The autograd node of an operation on these inputs; None if none of them needs a gradient."""
        if not self.grad_enabled:
            return None
        for tensor in inputs:
            if tensor is not None and tensor.edge is not None:
                return Node(self, backward, inputs)
        return None

    def grad_kind(self, node: Node, index: int) -> Kind:
        """The kind of a gradient: a parameter's stays, others are temporary."""
        edge = node.edges[index]
        return Kind.GRADIENTS if edge is not None and isinstance(edge[0], Leaf) else self.kind

    def parameter(self, name: str) -> Tensor:
        """A parameter by its full name."""
        weight = self.weights[name]
        edge: tuple[Node, int] | None = None
        if weight.trained:
            leaf = self._leaves.get(name)
            if leaf is None:
                leaf = self._leaves[name] = Leaf(self, name, weight.shape, weight.dtype)
            edge = (leaf, 0)
        return Tensor(self, None, weight.shape, contiguous_strides(weight.shape), weight.dtype, edge)

    def buffer(self, name: str, shape: Shape, dtype: str) -> Tensor:
        """A tensor of the model that is not trained and lives as long as the program."""
        del name  # only a recorded program needs it
        return Tensor(self, None, shape, contiguous_strides(shape), dtype)

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """Nothing inside needs a gradient."""
        before, self.grad_enabled = self.grad_enabled, False
        try:
            yield
        finally:
            self.grad_enabled = before


def _nothing(_node: Node, _grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    return ()


class Module:
    """A module of the model by its name, such as `transformer.h.0.attn`: gives access to its parameters."""

    __slots__ = ("config", "name", "tape")

    def __init__(self, tape: Tape, config: Any, name: str = "") -> None:
        self.tape, self.config, self.name = tape, config, name

    def __truediv__(self, name: str | int) -> Module:
        """A child: `m / "attn"`."""
        return Module(self.tape, self.config, f"{self.name}.{name}" if self.name else str(name))

    def parameter(self, name: str) -> Tensor:
        """A parameter of this module, or its trained copy."""
        copy = f"{self.name}{TRAINED_COPY}{name}"
        return self.tape.parameter(copy if copy in self.tape.weights else f"{self.name}.{name}")

    def maybe(self, name: str) -> Tensor | None:
        """The same, or None if the module has no such parameter."""
        full = f"{self.name}.{name}"
        return self.tape.parameter(full) if full in self.tape.weights else None


P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def decomposable(function: F) -> F:
    """An operation that a tape's rules may replace, as when it is recorded for torch.compile."""
    name = function.__name__

    @wraps(function)
    def call(first: Any, /, *args: Any, **kwargs: Any) -> Any:
        tape = first if isinstance(first, Tape) else first[0].tape if isinstance(first, list) else first.tape
        return tape.rules.get(name, function)(first, *args, **kwargs)

    return call  # type: ignore[return-value]


def forward(function: Callable[Concatenate[Module, P], R]) -> Callable[Concatenate[Module, P], R]:
    """A module's forward: runs under the module's name, and holds its arguments until it returns.

    nn.Module's __call__ keeps them in a tuple, whatever the forward does with its variables.
    """

    @wraps(function)
    def call(module: Module, /, *args: P.args, **kwargs: P.kwargs) -> R:
        tape = module.tape
        outer, tape.scope = tape.scope, module.name
        result = function(module, *args, **kwargs)
        tape.scope = outer
        return result

    return call
