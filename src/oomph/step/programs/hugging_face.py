"""Loops around transformers' models: its Trainer, and the simplest loop."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.config.schema import TrainConfig
from oomph.step.ops import Buffer, Kind, Phase
from oomph.step.programs.nanogpt import Loop
from oomph.step.tensor.casts import to
from oomph.step.tensor.elementwise import scale
from oomph.step.tensor.tensor import Storage, Tensor


class TrainerLoop(Loop):
    """transformers' Trainer (5.22, accelerate 1.15).

    The batches of a whole optimizer step are fetched at once and held. `compute_loss` drops the model's outputs
    before backward; under autocast, accelerate has cast them to float32 before that.
    """

    def start(self) -> None:
        """Hold the batch alone: the Trainer has fetched it already."""
        size = 8 * self.config.batch_size * self.config.block_size
        hold = self.tape.ledger.hold
        self.batch = (
            self._tokens(hold("batch.input_ids", size, Kind.INPUTS)),
            self._tokens(hold("batch.labels", size, Kind.INPUTS)),
        )

    def carried(self) -> tuple[Buffer, ...]:
        """The buffers that one micro-step leaves to the next."""
        return super().carried()[:2]

    def micro_step(self) -> None:
        """training_step."""
        tape = self.tape
        assert self.batch is not None
        tape.ledger.phase = Phase.FORWARD
        loss = self._compute_loss(self.batch)
        tape.ledger.phase, tape.scope, tape.kind = Phase.BACKWARD, "loss", Kind.LOGITS
        self._run_backward(loss)
        del loss
        tape.kept_inputs = []

    def _compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits, loss = self._forward(batch)
        self._leave_autocast()
        self.tape.cache = []
        if self.precision.autocast and logits is not None:
            self.tape.scope = "outputs"
            to(logits, "float32")
        return scale(loss, "div")  # by the number of tokens in all of the step's batches


class PlainLoop(Loop):
    """The simplest loop around a transformers model (5.22): `outputs = model(**batch)`, backward, a step, zero_grad.

    The variable `outputs` holds the logits and the key-value cache until the next forward has returned;
    `batch` holds its tensors until all of the next batch's are on the device.
    """

    def __init__(self, config: TrainConfig, cuda: bool, threads: int, layers: Sequence[int]) -> None:
        super().__init__(config, cuda, threads, layers)
        self.cache: list[Storage | None] = []

    def micro_step(self) -> None:
        """One iteration of the loop, without the optimizer."""
        tape = self.tape
        tape.ledger.phase = Phase.FORWARD
        self.batch = self.fetch()
        logits, loss = self._forward(self.batch)
        if self.config.return_logits:
            self.logits, self.cache = logits.storage if logits is not None else None, tape.cache
        tape.cache = []
        self.loss = loss.storage
        del logits
        self._leave_autocast()
        tape.ledger.phase, tape.scope, tape.kind = Phase.BACKWARD, "loss", Kind.LOGITS
        self._run_backward(loss)
        self.cache = [*self.cache, *tape.kept_inputs]
        tape.kept_inputs = []
