"""nanoGPT's training loop around a compiled model: what happens between the generated programs.

`torch.compile` wraps the model alone. The loop around it holds the model's outputs until the next micro-step has
returned, fetches the next batch before backward, and clips and updates with PyTorch's own optimizers. Outputs besides
the loss cost twice: autograd passes the backward program a gradient of zeros for each, and memory that the caller
holds cannot be overwritten in place. The backward program returns all gradients at its end: from the second
micro-step on they are all alive alongside those they are added to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase, Section, Step, copied, exchanged
from oomph.step.optimizer import Optimizer
from oomph.step.sharding.rank import MOST_SHOWN, Rank
from oomph.step.tensor.tensor import Storage


class Programs(msgspec.Struct, frozen=True, eq=False):
    """A model's generated programs. Their buffers are placeholders: the loop gives each micro-step its own."""

    batch: tuple[Buffer, ...]  # forward's inputs; backward frees those that forward saved
    forward: tuple[Op, ...]
    loss: Buffer
    outputs: tuple[Buffer, ...]  # forward's outputs besides the loss
    zeros: tuple[Buffer, ...]  # the gradients of those outputs
    backward: tuple[Op, ...]
    grads: Mapping[str, Buffer]  # by parameter name
    evaluation: tuple[Op, ...]
    evaluation_outputs: tuple[Buffer, ...]  # the loss among them


class CompiledLoop:
    """The loop, and the buffers its variables hold."""

    def __init__(self, programs: Programs, micro_steps: int, eval_batches: int, keep_outputs: bool = True) -> None:
        self.programs = programs
        self.micro_steps = micro_steps
        self.eval_batches = eval_batches
        self.keep_outputs = keep_outputs
        self.batch = tuple(map(copied, programs.batch))
        self.outputs: tuple[Buffer, ...] = ()
        self.loss: Buffer | None = None

    def step(self, optimizer: Optimizer, parameters: Sequence[Buffer], first: bool, rank: Rank | None = None) -> Step:
        """One optimizer step and one evaluation: before a run's first step, after any later one."""
        rank = rank or Rank(optimizer.config, optimizer.cuda)
        resident = [*parameters]
        if optimizer.precision.is_scaled:
            resident += [Buffer(f"scaler.{part}", 4, Kind.OPTIMIZER) for part in ("scale", "growth")]
        if not first:
            optimizer.state = optimizer.create_state()
            resident += [held.buffer for held in optimizer.state]
        resident += self._start(first)
        sections = self._evaluate() if first else []
        runs, grads = rank.collected([self._micro_step() for _ in range(min(self.micro_steps, MOST_SHOWN))], first)
        sections += rank.sections(runs, self.micro_steps)
        optimizer.grads = [Storage(optimizer.ledger, buffer) for buffer in grads]
        optimizer.step(first)
        sections.append(Section("optimizer", (*optimizer.ledger.ops(), *rank.after_update())))
        if not first:
            sections += self._evaluate()
        return Step((*resident, *rank.resident), tuple(sections))

    def _start(self, first: bool) -> list[Buffer]:
        if first:
            return [*self.batch]
        self.loss = Buffer("loss.scaled", self.programs.loss.bytes, Kind.LOGITS)
        if self.keep_outputs:
            self.outputs = tuple(map(copied, self.programs.outputs))
        return [*self.batch, *self.outputs, self.loss]

    def _micro_step(self) -> tuple[list[Op], dict[str, Buffer]]:
        """The operations of forward, the next batch and backward; and the gradients."""
        programs = self.programs
        outputs = tuple(map(copied, programs.outputs))
        loss = Buffer("loss.scaled", programs.loss.bytes, Kind.LOGITS)
        following = tuple(map(copied, programs.batch))
        grads = {name: copied(buffer) for name, buffer in programs.grads.items()}
        new = dict(zip(programs.batch, self.batch, strict=True)) | dict(zip(programs.outputs, outputs, strict=True))
        new |= {pattern: grads[name] for name, pattern in programs.grads.items()}
        saved = {buffer for op in programs.backward for buffer in op.frees if buffer in new}
        let_go = [*self.outputs, *([self.loss] if self.loss is not None else [])]
        if not self.keep_outputs:  # backward frees those that it saved
            let_go += [own for own, pattern in zip(outputs, programs.outputs, strict=True) if pattern not in saved]
        ops = exchanged(programs.forward, new)
        ops.append(Op("loop.assign", Phase.FORWARD, frees=tuple(let_go)))
        ops.append(Op("loss.scaled", Phase.LOSS, (loss,), (programs.loss,), Kernel.POINTWISE, bytes_moved=8))
        for old, pattern, fetched in zip(self.batch, programs.batch, following, strict=True):
            frees = () if pattern in saved else (old,)
            ops.append(Op("batch", Phase.LOSS, (fetched,), frees, Kernel.POINTWISE, bytes_moved=fetched.bytes))
        for zeros in programs.zeros:
            ops.append(Op(zeros.name, Phase.BACKWARD, (zeros,), (), Kernel.POINTWISE, bytes_moved=zeros.bytes))
        ops += exchanged(programs.backward, new)
        self.batch, self.outputs, self.loss = following, outputs if self.keep_outputs else (), loss
        return ops, grads

    def _evaluate(self) -> list[Section]:
        """estimate_loss: a first batch, then the others, with the outputs of the batch before still alive."""
        programs = self.programs
        sections: list[Section] = []
        if not programs.evaluation:
            return sections
        held: tuple[Buffer, ...] = ()
        for name, times in (("evaluation, first batch", 1), ("evaluation, later batches", self.eval_batches - 1)):
            new = {buffer: copied(buffer) for buffer in (*programs.batch, *programs.evaluation_outputs)}
            batch = [new[buffer] for buffer in programs.batch]
            ops = [Op("batch", Phase.EVAL, (b,), (), Kernel.POINTWISE, bytes_moved=b.bytes) for b in batch]
            ops += exchanged(programs.evaluation, new)
            ops.append(Op("estimate_loss.assign", Phase.EVAL, frees=held))
            held = tuple(new.values())
            if sections:
                ops.append(Op("estimate_loss.return", Phase.EVAL, frees=held))
            sections.append(Section(name, tuple(ops), times))
        return sections


class CompiledNanochatLoop(CompiledLoop):
    """nanochat's scripts/base_train.py, like `step.programs.NanochatLoop`: one batch buffer, and the loss alone.

    Every batch is copied into the same buffer, after backward. A micro-step's loss is held until the next one's exists,
    and divided by the number of micro-steps into another tensor.
    """

    def _micro_step(self) -> tuple[list[Op], dict[str, Buffer]]:
        programs = self.programs
        loss = copied(programs.loss)
        divided = Buffer("loss.div", loss.bytes, Kind.LOGITS)
        grads = {name: copied(buffer) for name, buffer in programs.grads.items()}
        new: dict[Buffer, Buffer | None] = {programs.loss: loss, **dict.fromkeys(programs.batch)}
        new |= {pattern: grads[name] for name, pattern in programs.grads.items()}
        ops = exchanged(programs.forward, new)
        ops.append(Op("loop.assign", Phase.FORWARD, frees=(self.loss,) if self.loss is not None else ()))
        ops.append(Op("loss.div", Phase.LOSS, (divided,), (), Kernel.POINTWISE, bytes_moved=8))
        ops += exchanged(programs.backward, new)
        ops.append(Op("loss.backward", Phase.BACKWARD, frees=(divided,)))
        moved = 2 * sum([buffer.bytes for buffer in self.batch])
        ops.append(Op("batch", Phase.BACKWARD, kernel=Kernel.POINTWISE, bytes_moved=moved))
        self.loss = loss
        return ops, grads
