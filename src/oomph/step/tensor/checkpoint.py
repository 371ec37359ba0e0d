"""torch.utils.checkpoint: a region saves only its arguments, and is recomputed in backward.

With use_reentrant=False forward builds the graph as usual, but keeps a holder in place of each saved tensor. The first
node of the region that unpacks one makes the region run again, up to its last saved tensor; the recomputed tensors are
handed out, once each. The reentrant kind runs forward without a graph; backward reruns the whole region, then its
backward inside, and holds the incoming gradient and the region's result to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, TypeVar
from weakref import ref

from oomph.step.kernels import RANDOM_STATE_BYTES
from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.autograd import Gradients, Node, Saved, run_backward
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.tape import Tape, decomposable
from oomph.step.tensor.tensor import Storage, Tensor

T = TypeVar("T")


class _StopError(Exception):
    """Everything that backward needs has been recomputed."""


class Holder:
    """Stands for a saved tensor that has not been recomputed yet."""

    __slots__ = ("__weakref__", "frame", "saved")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.saved: Saved | None = None

    def unpack(self) -> Saved:
        if not self.frame.is_recomputed:
            self.frame.recompute()
        saved, self.saved = self.saved, None
        assert saved is not None
        return saved


class Frame:
    """One checkpointed region."""

    def __init__(
        self, tape: Tape, function: Callable[..., Tensor], args: Sequence[Tensor], random: bool, by_op: bool = False
    ) -> None:
        self.tape = tape
        self.function = function
        self.args = [arg.detach() for arg in args]
        self.requires_grad = [arg.requires_grad for arg in args]
        self.autocast = tape.autocast
        self.random = random  # whether it draws random numbers, so that their state is kept
        self.by_op = by_op  # results of expensive operations are saved, except every second product
        self.results: list[Any] = []
        self.products = 0
        self.state = self._random_state()
        self.holders: list[ref[Holder]] = []  # dead where the node is gone
        self.recomputing = 0
        self.is_recomputed = False
        self.place = tape.scope, tape.block, tape.kind

    def _random_state(self) -> Storage | None:
        """The saved random state; on a GPU the host keeps it."""
        if self.tape.cuda or not self.random:
            return None
        return self.tape.allocate("random_state", RANDOM_STATE_BYTES, Kind.TEMPORARY)

    def pack(self, saved: Saved) -> Saved | Holder:
        """In forward, a holder in place of the tensor; in recomputation, the tensor for its holder."""
        if not self.recomputing:
            holder = Holder(self)
            self.holders.append(ref(holder))
            return holder
        kept = saved.detach() if isinstance(saved, Tensor) else saved
        if (waiting := self.holders[self.recomputing - 1]()) is not None:
            waiting.saved = kept
        self.recomputing += 1
        if self.recomputing > len(self.holders):
            raise _StopError
        return kept

    def kept(self, make: Callable[[], T], product: bool) -> T:
        """The operation's result, or the one saved in forward."""
        self.products += product
        if not self.by_op or (product and self.products % 2 == 0):
            return make()
        if self.recomputing:
            made: T = self.results.pop(0)
            return made
        self.results.append(make())
        found: T = self.results[-1]
        return found

    def recompute(self) -> None:
        """Run the region again until its last saved tensor exists."""
        self.recomputing, self.products = 1, 0
        with self.again(self):
            try:
                self._run()
            except _StopError as stop:
                stop.__traceback__ = None  # its frames hold tensors
        self.recomputing = 0
        self.is_recomputed = True
        self.holders = []

    @contextmanager
    def again(self, frame: Frame | None) -> Iterator[None]:
        """Restore the tape's state of the region's first run, saving into `frame`."""
        tape = self.tape
        before = (tape.frame, tape.grad_enabled, tape.autocast, tape.casts, tape.scope, tape.block, tape.kind)
        tape.frame, tape.grad_enabled, tape.autocast, tape.casts = frame, True, self.autocast, {}
        tape.scope, tape.block, tape.kind = self.place
        _state = self._random_state()
        yield
        tape.frame, tape.grad_enabled, tape.autocast, tape.casts, tape.scope, tape.block, tape.kind = before

    def _run(self) -> None:
        args = [tensor.detach() for tensor in self.args]
        for arg, needed in zip(args, self.requires_grad, strict=True):
            arg.edge = (self.tape.sink, 0) if needed else None
        self.function(*args)


@decomposable
def checkpoint(
    tape: Tape, function: Callable[..., Tensor], *args: Tensor, random: bool = False, by_op: bool = False
) -> Tensor:
    """The result of `function`, with only its arguments saved. `random`: it draws random numbers.

    `by_op`: results of attention and of every other product are saved too (torchtitan's selective checkpointing).
    """
    if not tape.grad_enabled:
        return function(*args)
    outer, tape.frame = tape.frame, Frame(tape, function, args, random, by_op)
    try:
        return function(*args)
    finally:
        tape.frame = outer


def checkpoint_reentrant(
    tape: Tape, function: Callable[[Tensor], Tensor], x: Tensor, random: bool = False, offloaded: bool = False
) -> Tensor:
    """The same for one argument, by the reentrant kind: if `x` needs no gradient, nothing inside gets one.

    `offloaded`: `x` is kept on the host, and comes back into a permanent buffer.
    """
    if not tape.grad_enabled:
        return function(x)
    frame = Frame(tape, function, (x,), random)
    if offloaded:
        frame.args = [tape.buffer("offloaded", x.shape, x.dtype)]

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad, grads[0] = grads[0], None
        assert grad is not None
        found = _Caught(tape, x_shape, x_dtype)
        with frame.again(None):
            inner = frame.args[0].detach()
            inner.edge = (found, 0)
            out = function(inner)
        del inner
        run_backward((out, grad.detach()))
        frame.args.clear()
        return [found.grads.pop()]

    x_shape, x_dtype = x.shape, x.dtype
    node = tape.node(backward, x)
    with tape.no_grad():
        out = function(x)
    return node.attach(out) if node else out


class _Caught(Node):
    """Receives the gradient of a region's argument."""

    __slots__ = ("grads",)

    def __init__(self, tape: Tape, shape: Shape, dtype: str) -> None:
        super().__init__(tape, _catch, ())
        self.seq, self.shapes, self.dtypes = inf, [shape], [dtype]
        self.grads: Gradients = []


def _catch(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    assert isinstance(node, _Caught)
    node.tape.note("grad", Kernel.NONE)
    node.grads.append(grads[0])
    return ()
