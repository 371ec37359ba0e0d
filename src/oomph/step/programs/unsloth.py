"""SFTTrainer as Unsloth patches it (2026.8.19): transformers' own `compute_loss`, without TRL's metrics."""

from __future__ import annotations

from oomph.step.programs.hugging_face import TrainerLoop
from oomph.step.tensor.tensor import Tensor


class UnslothLoop(TrainerLoop):
    """The Trainer. Batches without padding, its default, are one row."""

    def _compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        _, loss = self._forward(batch)  # divided by the number of tokens in all of the step's batches
        self._leave_autocast()
        return loss
