"""litgpt's finetune_lora and finetune_full (0.5.13): `fit` and `validate`."""

from __future__ import annotations

from oomph.step.models import litgpt
from oomph.step.ops import Buffer, Kind, Op, Phase
from oomph.step.programs.nanogpt import Loop
from oomph.step.tensor.elementwise import scale
from oomph.step.tensor.tape import Module
from oomph.step.tensor.tensor import Storage


class LitgptLoop(Loop):
    """The variable `logits` holds all logits, in float32, until the next forward has returned.

    `batch` holds its tensors until the next batch's are on the device. The logits keep their graph alive, and with it
    what an older bitsandbytes holds.
    """

    def start(self) -> None:
        """Hold what the previous micro-step has left: the batch, the logits, the loss."""
        c, hold = self.config, self.tape.ledger.hold
        size = 8 * c.batch_size * c.block_size
        self.batch = (
            self._tokens(hold("batch.input_ids", size, Kind.INPUTS)),
            self._tokens(hold("batch.labels", size, Kind.INPUTS)),
        )
        chunk = c.loss_chunk if litgpt.chunks_head(c) and c.loss_chunk else c.block_size
        tokens = [min(chunk, c.block_size - low) for low in range(0, c.block_size, chunk)]
        row_bytes = 4 * c.batch_size * c.vocab_size
        self.chunks: list[Storage | None] = [hold("logits", row_bytes * count, Kind.LOGITS) for count in tokens]
        self.loss = hold("loss", 4, Kind.LOGITS)

    def carried(self) -> tuple[Buffer, ...]:
        """The buffers that the variables hold now."""
        held = [*(tensor.storage for tensor in self.batch or ()), *self.chunks, self.loss]
        return tuple([each.buffer for each in held if each is not None])

    def _module(self) -> Module:
        """The model as Fabric calls it."""
        tape = self.tape
        tape.autocast, tape.casts, tape.kind, tape.scope = self.precision.autocast, {}, Kind.ACTIVATIONS, ""
        return Module(tape, self.config)

    def micro_step(self) -> None:
        """One iteration of `fit`, without the optimizer."""
        tape = self.tape
        tape.ledger.phase = Phase.FORWARD
        self.batch = self.fetch()
        module = self._module()
        logits = litgpt.outputs(module, self.batch[0])
        self.chunks = [chunk.storage for chunk in logits]
        loss = litgpt.chunked_cross_entropy(module, logits, self.batch[1])
        self.loss = loss.storage
        del logits
        tape.ledger.phase, tape.scope, tape.kind = Phase.BACKWARD, "loss", Kind.LOGITS
        self._run_backward(scale(loss, "div"))
        self.cache, tape.kept_inputs = tape.kept_inputs, []

    def evaluate(self) -> tuple[tuple[Op, ...], ...]:
        """`validate`: all logits at once, held until the next batch's exist."""
        tape = self.tape
        tape.training, tape.grad_enabled, tape.ledger.phase = False, False, Phase.EVAL
        batches: list[tuple[Op, ...]] = []
        logits: list[Storage | None] = []
        while len(batches) < 2:
            tape.scope = ""
            batch = self.fetch()
            module = self._module()
            found = litgpt.outputs(module, batch[0])
            logits = [chunk.storage for chunk in found]
            loss = litgpt.chunked_cross_entropy(module, found, batch[1])
            del found, loss
            if batches:
                logits.clear()
                del batch
            batches.append(tape.ledger.ops())
        return tuple(batches)
