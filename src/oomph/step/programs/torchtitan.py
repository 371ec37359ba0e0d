"""torchtitan's training loop (github.com/pytorch/torchtitan at 5940ddeb5, train.py)."""

from __future__ import annotations

from oomph.step.ops import Kind, Phase
from oomph.step.programs.nanogpt import Loop


class TitanLoop(Loop):
    """A batch is fetched before forward; logits are freed before backward; the loss stays until the next one exists.

    With fully_shard's mixed precision there is no autocast. Gradients are freed as a step begins, while memory is low.
    """

    returns_logits = in_chunks = False  # regardless of the config

    def micro_step(self) -> None:
        """One forward and backward of the training loop."""
        tape = self.tape
        tape.ledger.phase = Phase.FORWARD
        self.batch = self.fetch()
        logits, loss = self._forward(self.batch)
        self.loss = loss.storage
        del logits
        self._leave_autocast()
        tape.ledger.phase, tape.scope, tape.kind = Phase.BACKWARD, "loss", Kind.LOGITS
        self._run_backward(loss)
