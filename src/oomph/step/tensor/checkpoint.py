"""torch.utils.checkpoint(use_reentrant=False): saved tensors are computed again when backward first asks for one.

Forward builds the graph as ever, but instead of each saved tensor a holder is kept. The first node of the region that
asks makes the region run once more, up to its last saved tensor; what is saved then is handed out, once each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import ref

from oomph.step.kernels import RANDOM_STATE_BYTES
from oomph.step.ops import Kind
from oomph.step.tensor.autograd import Saved
from oomph.step.tensor.tape import Tape, decomposable
from oomph.step.tensor.tensor import Storage, Tensor


class _StopError(Exception):
    """Everything that backward needs has been computed again."""


class Holder:
    """Stands for a saved tensor that is yet to be computed."""

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

    def __init__(self, tape: Tape, function: Callable[..., Tensor], args: Sequence[Tensor], random: bool) -> None:
        self.tape = tape
        self.function = function
        self.args = [arg.detach() for arg in args]
        self.requires_grad = [arg.requires_grad for arg in args]
        self.autocast = tape.autocast
        self.random = random  # random numbers are drawn: their state is kept
        self.state = self._random_state()
        self.holders: list[ref[Holder]] = []  # those of nodes that are gone are empty
        self.recomputing = 0
        self.is_recomputed = False
        self.place = tape.scope, tape.block, tape.kind

    def _random_state(self) -> Storage | None:
        """On a GPU the host keeps it."""
        if self.tape.cuda or not self.random:
            return None
        return self.tape.allocate("random_state", RANDOM_STATE_BYTES, Kind.TEMPORARY)

    def pack(self, saved: Saved) -> Saved | Holder:
        """In forward, a holder in its place; when computed again, the tensor for its holder."""
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

    def recompute(self) -> None:
        """Run the region again until its last saved tensor is there."""
        tape = self.tape
        before = (tape.frame, tape.grad_enabled, tape.autocast, tape.casts, tape.scope, tape.block, tape.kind)
        tape.frame, tape.grad_enabled, tape.autocast, tape.casts = self, True, self.autocast, {}
        tape.scope, tape.block, tape.kind = self.place
        self.recomputing = 1
        state = self._random_state()
        try:
            self._run()
        except _StopError as stop:
            stop.__traceback__ = None  # its frames hold tensors
        del state
        self.recomputing = 0
        self.is_recomputed = True
        self.holders = []
        tape.frame, tape.grad_enabled, tape.autocast, tape.casts, tape.scope, tape.block, tape.kind = before

    def _run(self) -> None:
        args = [tensor.detach() for tensor in self.args]
        for arg, needed in zip(args, self.requires_grad, strict=True):
            arg.edge = (self.tape.sink, 0) if needed else None
        self.function(*args)


@decomposable
def checkpoint(tape: Tape, function: Callable[..., Tensor], *args: Tensor, random: bool = False) -> Tensor:
    """What `function` returns, with nothing saved but its arguments. `random`: it draws random numbers."""
    if not tape.grad_enabled:
        return function(*args)
    outer, tape.frame = tape.frame, Frame(tape, function, args, random)
    try:
        return function(*args)
    finally:
        tape.frame = outer
