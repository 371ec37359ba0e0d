"""Walks over a micro-step's operations and finds where FSDP's hooks run: around each block, and around the model.

What the hooks do differs between FSDP2 (`fully_shard`) and FSDP1 (`flat_units`); where they run does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase


class HookedMicroSteps(ABC):
    """Micro-steps of one rank, in order, with the hooks' operations between those of a single device."""

    def __init__(self, order: Sequence[int], cuda: bool, loss_outside: bool) -> None:
        """`order`: of the blocks in forward; `loss_outside`: the loss is computed outside the sharded model."""
        self.order, self.cuda, self.loss_outside = list(order), cuda, loss_outside
        self.made: dict[str, Buffer] = {}  # the micro-step's gradients, neither reduced nor kept yet
        self.ops: list[Op] = []
        self.phase = Phase.FORWARD

    def run(self, ops: Sequence[Op], grads: Mapping[str, Buffer], reduces: bool) -> tuple[Op, ...]:
        """One device's micro-step as this rank runs it; `grads` are those it makes without adding them itself."""
        self.ops, self.made, self.reduces = [], dict(grads), reduces
        self.phase = ops[0].phase
        self.through: set[int | None] = set()  # groups whose backward is done
        self.seen: set[Buffer] = set()
        self._pre_forward(None)
        current: int | None = None
        inside, backward = True, False
        for op in ops:
            if op.phase is Phase.BACKWARD and not backward:
                backward, self.phase = True, Phase.BACKWARD
                self._leave_forward(current, inside)
                inside, current = False, None
            if inside and not backward and op.block != current and self._is_next(op.block, current):
                self._post_forward(current)
                current = op.block
                self._pre_forward(current)
            if inside and self.loss_outside and op.phase is Phase.LOSS:
                self._leave_forward(current, inside)
                inside, current = False, None
            if backward:
                current = self._in_backward(op, current)
            self._run(op)
            self.seen.update(op.allocates)
        if backward:
            self._finish(current)
        else:
            self._leave_forward(current, inside)
            self._free(None)
        return tuple(self.ops)

    def _is_next(self, block: int | None, current: int | None) -> bool:
        """Whether a block's forward begins, or the last one's ends. A compiled graph may return to an earlier block."""
        if block is None:
            return bool(self.order) and current == self.order[-1]
        return current is None or block > current

    def _in_backward(self, op: Op, current: int | None) -> int | None:
        """Run the hooks before an operation of backward. Returns the group that runs; -1: the root."""
        if self.loss_outside and current is None and op.name.startswith("loss"):
            return None
        if current is None:
            self._pre_backward(None, self.order[-1] if self.order else None)
            current = -1
        if op.block is not None and (op.block < current or current < 0) and op.block not in self.through:
            if current >= 0:
                self._post_backward(current)
            at = self.order.index(op.block)
            self._pre_backward(op.block, self.order[at - 1] if at else None)
            return op.block
        if op.block is None and current >= 0 and op.kernel is not Kernel.NONE:
            self._post_backward(current)
            return -1
        return current

    def _run(self, op: Op) -> None:
        """Run one of the program's own operations."""
        self.ops.append(op)

    # --- the hooks: block None is the root --------------------------------------------------------

    @abstractmethod
    def _pre_forward(self, block: int | None) -> None:
        """Before a block's forward; for the root, before everything and again after the last block."""

    @abstractmethod
    def _post_forward(self, block: int | None) -> None:
        """After a block's forward."""

    @abstractmethod
    def _leave_forward(self, block: int | None, inside: bool) -> None:
        """The last block's post-forward hook and the root's, unless they ran already."""

    @abstractmethod
    def _pre_backward(self, block: int | None, following: int | None) -> None:
        """Before a block's backward; `following` is the block whose backward comes next."""

    @abstractmethod
    def _post_backward(self, block: int | None) -> None:
        """After a block's backward."""

    @abstractmethod
    def _finish(self, current: int | None) -> None:
        """At the end of backward."""

    @abstractmethod
    def _free(self, block: int | None) -> None:
        """Free a block's gathered tensors."""

    # --- writing ----------------------------------------------------------------------------------

    def _note(
        self,
        name: str,
        allocates: tuple[Buffer, ...] = (),
        frees: tuple[Buffer, ...] = (),
        kernel: Kernel = Kernel.NONE,
        moved: int = 0,
    ) -> None:
        self.ops.append(Op(name, self.phase, allocates, frees, kernel, bytes_moved=moved))

    def _collective(
        self,
        name: str,
        kernel: Kernel,
        ranks: int,
        size_bytes: int,
        allocates: tuple[Buffer, ...] = (),
        frees: tuple[Buffer, ...] = (),
    ) -> None:
        if not self.cuda:  # gloo gathers and reduces in a buffer of its own
            own = Buffer(f"{name}.gloo", size_bytes, Kind.COMMUNICATION)
            allocates, frees = (*allocates, own), (*frees, own)
        self.ops.append(Op(name, self.phase, allocates, frees, kernel, (ranks, size_bytes)))
