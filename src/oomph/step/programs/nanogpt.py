"""The training loop around an eager model: what its variables hold between the model's forwards and backwards.

It models the program as it is: nanoGPT's loop keeps the logits of one micro-step until the next has made its own,
fetches the next batch before backward, and frees gradients after the optimizer's step. Other programs' loops are in
files of their own, as variations of this one.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.config.schema import TrainConfig
from oomph.step import models
from oomph.step.ops import Buffer, Kind, Op, Phase
from oomph.step.precision import precision
from oomph.step.tensor.autograd import run_backward
from oomph.step.tensor.elementwise import scale
from oomph.step.tensor.tape import Module, Tape
from oomph.step.tensor.tensor import Storage, Tensor


class Loop:
    """nanoGPT's training script and the buffers its variables hold: the batch, the logits, the loss."""

    inputs = 2  # how many of the carried buffers are the batch

    def __init__(self, config: TrainConfig, cuda: bool, threads: int, layers: Sequence[int]) -> None:
        self.config = config
        self.precision = precision(config, cuda)
        weights = models.weights(config, self.precision)
        self.tape = Tape(weights, cuda=cuda, threads=threads, tf32=cuda and config.allow_tf32, layers=layers)
        self.model = models.forward(config)
        self.batch: tuple[Tensor, Tensor] | None = None
        self.logits: Storage | None = None
        self.loss: Storage | None = None

    @property
    def returns_logits(self) -> bool:
        """Whether the model returns the logits to the loop."""
        return bool(self.config.return_logits)

    @property
    def in_chunks(self) -> bool:
        """Whether the loss is computed in chunks of tokens."""
        return bool(self.config.loss_chunk)

    def start(self) -> None:
        """Hold what the variables hold as a step begins: what the step before has left."""
        config, hold = self.config, self.tape.ledger.hold
        rows = config.batch_size * config.block_size
        self.batch = (
            self._tokens(hold("batch.x", 8 * rows, Kind.INPUTS)),
            self._tokens(hold("batch.y", 8 * rows, Kind.INPUTS)),
        )
        if self.returns_logits and not self.in_chunks:
            self.logits = hold("lm_head", rows * config.vocab_size * self.precision.compute_bytes, Kind.LOGITS)
        loss_bytes = self.precision.weight_bytes if not self.in_chunks else 4
        self.loss = hold("loss.scaled", loss_bytes, Kind.LOGITS)

    def carried(self) -> tuple[Buffer, ...]:
        """The buffers that the variables hold now: the batch, the logits if they are kept, the loss."""
        batch = [tensor.storage for tensor in self.batch or ()]
        return tuple([each.buffer for each in (*batch, self.logits, self.loss) if each is not None])

    def _tokens(self, storage: Storage) -> Tensor:
        shape = (self.config.batch_size, self.config.block_size)
        return self.tape.tensor(storage, shape if self.config.packing == "off" else (1, shape[0] * shape[1]), "int64")

    def fetch(self) -> tuple[Tensor, Tensor]:
        """The next batch on the device: int64 tokens and targets."""
        size = 8 * self.config.batch_size * self.config.block_size
        make = self.tape.ledger.make
        first = make("batch.x", size, Kind.INPUTS, moved=size)
        return self._tokens(first), self._tokens(make("batch.y", size, Kind.INPUTS, moved=size))

    def _forward(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor | None, Tensor]:
        tape = self.tape
        tape.autocast, tape.casts = self.precision.autocast, {}
        tape.kind, tape.scope = Kind.ACTIVATIONS, ""
        return self.model(Module(tape, self.config), *batch)

    def _leave_autocast(self) -> None:
        self.tape.autocast, self.tape.casts = None, {}

    def micro_step(self) -> None:
        """One forward and backward of the training loop."""
        tape = self.tape
        assert self.batch is not None
        tape.ledger.phase = Phase.FORWARD
        logits, loss = self._forward(self.batch)
        self.logits = logits.storage if self.config.return_logits and logits is not None else None
        self.loss = loss.storage
        del logits
        tape.ledger.phase, tape.scope, tape.kind = Phase.LOSS, "loss", Kind.LOGITS
        loss = scale(loss, "scaled")
        self.loss = loss.storage
        self._leave_autocast()
        self.batch = self.fetch()
        tape.ledger.phase = Phase.BACKWARD
        self._run_backward(loss)

    def _run_backward(self, loss: Tensor) -> None:
        """loss.backward(), with the loss scaled first if there is a GradScaler."""
        tape = self.tape
        root = scale(loss, "amplified") if self.precision.is_scaled else loss
        grad = tape.made("grad", (), root.dtype)
        tape.grad_enabled = False
        run_backward((root, grad.detach()))
        tape.grad_enabled = True

    def evaluate(self) -> tuple[tuple[Op, ...], ...]:
        """estimate_loss: a first batch, then another while the first one's tensors are still alive."""
        tape = self.tape
        tape.training, tape.grad_enabled, tape.ledger.phase = False, False, Phase.EVAL
        logits: Tensor | None = None
        batches: list[tuple[Op, ...]] = []
        while len(batches) < 2:
            tape.scope = ""
            batch = self.fetch()
            logits, loss = self._forward(batch)
            if not self.returns_logits:
                logits = None
            self._leave_autocast()
            if batches:
                del batch, logits, loss
            batches.append(tape.ledger.ops())
        return tuple(batches)
