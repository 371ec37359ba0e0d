"""torchtune's single-device recipes (0.6.1), full_finetune_single_device and lora_finetune_single_device."""

from __future__ import annotations

from oomph.step.models.torchtune import counted
from oomph.step.ops import Buffer, Kind, Phase
from oomph.step.programs.nanogpt import Loop
from oomph.step.tensor.elementwise import mul, shift
from oomph.step.tensor.tensor import Storage


class TorchtuneLoop(Loop):
    """`train`: a batch is freed before the next is on the device, its labels with the loss. No logits are held.

    The mean loss times the number of tokens is a sum, which is added to a running one for the log.
    """

    inputs = 1

    def start(self) -> None:
        """Hold the previous batch's tokens, and the losses."""
        hold = self.tape.ledger.hold
        size = 8 * self.config.batch_size * self.config.block_size
        self.tokens: Storage | None = hold("batch.tokens", size, Kind.INPUTS)
        self.losses: list[Storage | None] = [hold(name, 4, Kind.LOGITS) for name in ("loss", "running_loss")]

    def carried(self) -> tuple[Buffer, ...]:
        """The buffers that one micro-step leaves to the next."""
        return tuple([each.buffer for each in (self.tokens, *self.losses) if each is not None])

    def micro_step(self) -> None:
        """One iteration of the loop, without the optimizer."""
        tape = self.tape
        tape.ledger.phase = Phase.FORWARD
        self.tokens = None
        tokens, labels = self.fetch()
        self.tokens = tokens.storage
        current_num_tokens = counted(labels)
        _, loss = self._forward((tokens, labels))
        del labels
        tape.ledger.phase, tape.scope, tape.kind = Phase.LOSS, "loss", Kind.LOGITS
        current_loss = mul(loss, current_num_tokens)
        running_loss = shift(current_loss)
        self.losses = [current_loss.storage, running_loss.storage]
        del loss, running_loss
        tape.ledger.phase = Phase.BACKWARD
        self._run_backward(current_loss)
