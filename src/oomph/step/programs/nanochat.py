"""nanochat's training loop."""

from __future__ import annotations

from oomph.step.ops import Kernel, Kind, Phase
from oomph.step.programs.nanogpt import Loop
from oomph.step.tensor.elementwise import scale


class NanochatLoop(Loop):
    """nanochat's scripts/base_train.py (github.com/karpathy/nanochat at 92d63d4).

    Every batch is copied into the same buffer, after backward. A micro-step's loss is held until the next one's exists,
    and divided by the number of micro-steps into another tensor.
    """

    returns_logits = in_chunks = False  # regardless of the config

    def micro_step(self) -> None:
        """One forward and backward of the training loop."""
        tape = self.tape
        assert self.batch is not None
        tape.ledger.phase = Phase.FORWARD
        _, loss = self._forward(self.batch)
        self.loss = loss.storage
        tape.ledger.phase, tape.scope, tape.kind = Phase.BACKWARD, "loss", Kind.LOGITS
        loss = scale(loss, "div")
        self._run_backward(loss)
        size = 8 * self.config.batch_size * self.config.block_size
        del loss
        tape.note("batch", Kernel.POINTWISE, moved=2 * size)
