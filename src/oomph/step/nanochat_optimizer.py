"""nanochat's MuonAdamW on one device (github.com/karpathy/nanochat at 92d63d4: nanochat/optim.py).

Muon for the blocks' matrices, stacked by shape; AdamW for the rest, each tensor in one compiled pass. The gradients of
all stacks are stacked before the first update, and the stacks of updated weights are held until all are copied back.
The compiled Muon step's own temporaries are read from its source, not measured: two copies of the stack in the
activations' dtype, and two square matrices per matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.config.schema import TrainConfig
from oomph.step import models
from oomph.step.models.nanochat import is_table
from oomph.step.ops import Kernel, Kind, Phase
from oomph.step.optimizer import Optimizer
from oomph.step.parameters import Parameter
from oomph.step.tensor.layout import ITEM_BYTES
from oomph.step.tensor.tensor import Storage

_ITERATIONS = 5  # of Polar Express
_BEFORE = ("lm_head.", "wte.", "value_embeds.", "resid_lambdas", "x0_lambdas", "smear", "backout")  # AdamW's order


class NanochatOptimizer(Optimizer):
    """MuonAdamW: its state and its step."""

    def __init__(
        self, config: TrainConfig, cuda: bool, everything: Sequence[Parameter], weight_bytes: int | None = None
    ) -> None:
        super().__init__(config, cuda, everything, weight_bytes)
        self.dtypes = {name: weight.dtype for name, weight in models.weights(config, self.precision).items()}

    def _split(self) -> None:
        """Put Muon's matrices into stacks, and the rest into AdamW's order: nanochat has no other optimizer."""
        self.matrices = [p for p in self.everything if p.block is not None and not is_table(p.name)]
        rest = [p for p in self.everything if p.block is None or is_table(p.name)]
        self.alone = sorted(rest, key=lambda p: next(i for i, part in enumerate(_BEFORE) if part in p.name))
        shapes = sorted({p.shape for p in self.matrices})
        self.stacks = [[p for p in self.matrices if p.shape == shape] for shape in shapes]

    def create_state(self) -> list[Storage]:
        """All state tensors, as they are after the first step."""
        moments = [held for parameter in self.alone for held in self._moments(parameter)]
        return [*moments, *(held for stack in self.stacks for held in self._momenta(stack))]

    def _moments(self, parameter: Parameter) -> list[Storage]:
        size = parameter.numel * ITEM_BYTES[self.dtypes[parameter.name]]
        return [self._hold(parameter, part, size) for part in ("exp_avg", "exp_avg_sq")]

    def _momenta(self, stack: list[Parameter]) -> list[Storage]:
        """A momentum of the stack's shape, and a variance per row, or per column of wide matrices."""
        size, longer = stack[0].numel * self.weight_bytes, max(stack[0].shape) * self.weight_bytes
        parts = (("momentum", len(stack) * size), ("second_momentum", len(stack) * longer))
        return [self._hold(stack[0], part, each) for part, each in parts]

    def step(self, first: bool) -> None:
        """Update, and free the gradients. Nothing is clipped."""
        ledger = self.ledger
        ledger.phase = Phase.OPTIMIZER
        if self._scaled:
            self._unscale()
        grads = [self._stacked(stack, "grads") for stack in self.stacks]
        for parameter in self.alone:
            if first:
                self._make(self._moments(parameter))
            moved = 7 * parameter.numel * ITEM_BYTES[self.dtypes[parameter.name]]
            ledger.note(f"{parameter.name}.adamw", (), Kernel.OPTIMIZER, moved)
        updated = [self._muon_step(stack, first) for stack in self.stacks]
        moved = sum(2 * held.bytes for held in updated)
        ledger.note("muon.copy", (), Kernel.OPTIMIZER, moved)
        del grads, updated
        self.verdicts.clear()
        self.grads.clear()

    def _make(self, made: list[Storage]) -> None:
        for held in made:
            self.ledger.note(held.buffer.name, (held.buffer,), Kernel.POINTWISE, held.bytes)
        self.state += made

    def _stacked(self, stack: list[Parameter], what: str) -> Storage:
        size = sum(parameter.numel for parameter in stack) * self.weight_bytes
        return self.ledger.make(f"{stack[0].name}.stacked_{what}", size, Kind.TEMPORARY, moved=2 * size)

    def _muon_step(self, stack: list[Parameter], first: bool) -> Storage:
        """The updated weights, stacked."""
        ledger = self.ledger
        if first:
            self._make(self._momenta(stack))
        updated = self._stacked(stack, "params")
        dtype = "bfloat16" if self.precision.compute == "bfloat16" else "float32"
        count, (short, long), item = len(stack), sorted(stack[0].shape), ITEM_BYTES[dtype]
        name = f"{stack[0].name}.muon"
        x = ledger.make(name, count * short * long * item, Kind.TEMPORARY, Kernel.OPTIMIZER, 5 * updated.bytes)
        for _ in range(_ITERATIONS):
            gram = self._batched(name, count, short, short, long, dtype)
            step = self._batched(name, count, short, short, short, dtype)
            x = self._batched(name, count, short, long, short, dtype)
            del gram, step
        ledger.note(name, (), Kernel.OPTIMIZER, 3 * updated.bytes)
        del x
        return updated

    def _batched(self, name: str, count: int, m: int, n: int, k: int, dtype: str) -> Storage:
        item = ITEM_BYTES[dtype]
        held = self.ledger.hold(name, count * m * n * item, Kind.TEMPORARY)
        moved = count * (m * n + n * k + m * k) * item
        self.ledger.note(name, (held.buffer,), Kernel.GEMM, moved, 2 * count * m * n * k, (count, m, n, k), dtype)
        return held
