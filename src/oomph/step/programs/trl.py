"""TRL's SFTTrainer: transformers' Trainer with the entropy and the accuracy of every token."""

from __future__ import annotations

from oomph.step.ops import Kernel, Kind
from oomph.step.programs.hugging_face import TrainerLoop
from oomph.step.tensor.casts import to
from oomph.step.tensor.elementwise import pointwise, scale
from oomph.step.tensor.loss import chunks
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import contiguous, part

_ENTROPY_ROWS = 128  # tokens whose entropy is computed at once


class SftLoop(TrainerLoop):
    """SFTTrainer.compute_loss (1.16). Its fused head returns the metrics with the loss.

    Before 1.7 they are computed from all logits, which are held meanwhile.
    """

    def _compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits, loss = self._forward(batch)
        self._leave_autocast()
        if logits is None:
            return loss
        tape = self.tape
        tape.scope, tape.kind = "outputs", Kind.LOGITS
        logits = to(logits, "float32") if self.precision.autocast else logits
        with tape.no_grad():
            _token_metrics(logits.detach())
        del logits
        tape.scope = "loss"
        return scale(loss, "div")  # by the number of tokens in all of the step's batches


def _token_metrics(logits: Tensor) -> None:
    """entropy_from_logits, some rows at a time, and the accuracy, on a copy without each sequence's last row."""
    tape, (batch, tokens, words) = logits.tape, logits.shape
    entropies = []
    for rows, tape.ledger.times in chunks(batch * tokens, _ENTROPY_ROWS):
        logs = tape.made("entropy", (rows, words), logits.dtype, kernel=Kernel.REDUCTION)
        exponents = pointwise("exp", logs)
        product = pointwise("mul", exponents, logs)
        del exponents
        entropies.append(tape.made("entropy", (rows,), logits.dtype, (product,), kernel=Kernel.REDUCTION))
        del logs, product
    tape.ledger.times = 1
    tape.made("entropy", (batch, tokens), "float32")
    entropies.clear()
    shifted = contiguous(part(logits, 0, tokens - 1, dim=1))
    tape.made("argmax", shifted.shape[:2], "int64", (shifted,), kernel=Kernel.REDUCTION)
