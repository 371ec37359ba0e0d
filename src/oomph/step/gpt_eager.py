"""The eager training step of a nanoGPT-shaped model, by arithmetic: every allocation and every free, in order.

It simulates the program, not an ideal: nanoGPT's loop keeps the logits of one micro-step until the next has made
its own, fetches the next batch before backward, and lets gradients go after the optimizer's step. The model is in
`gpt_eager_model`, clipping and optimizers in `gpt_eager_optimizer`.

Two micro-steps are simulated: the one that makes the gradients, and one that adds to them. All others are one of these
on other batches, logits and losses.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from oomph.config.schema import TrainConfig
from oomph.step.gpt_eager_ledger import Held
from oomph.step.gpt_eager_model import forward
from oomph.step.gpt_eager_optimizer import Optimizer
from oomph.step.gpt_eager_run import Run, Sizes
from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase, Section, Step
from oomph.step.renewal import copied, exchanged

_SCALER = ("scaler.scale", "scaler.growth_tracker")


class Program:
    """nanoGPT's training script with what its variables hold: the batch, the logits, the loss."""

    def __init__(self, config: TrainConfig, cuda: bool, threads: int) -> None:
        self.config = config
        self.run = Run(Sizes(config, cuda, threads))
        self.batch: tuple[Held, Held] | None = None
        self.logits: Held | None = None
        self.loss: Held | None = None

    def start(self) -> None:
        """What the variables hold as a step begins: what the one before it has left."""
        sizes, hold = self.run.sizes, self.run.ledger.hold
        self.batch = hold("batch.x", 8 * sizes.rows, Kind.INPUTS), hold("batch.y", 8 * sizes.rows, Kind.INPUTS)
        if self.config.return_logits and not self.config.loss_chunk:
            self.logits = hold("lm_head.out", sizes.rows * sizes.vocab * sizes.compute_bytes, Kind.LOGITS)
        self.loss = hold("loss.scaled", sizes.loss_bytes, Kind.LOGITS)

    def carried(self) -> tuple[Buffer, ...]:
        """What they hold now: the batch, the logits where they are kept, the loss."""
        held = (*(self.batch or ()), self.logits, self.loss)
        return tuple([each.buffer for each in held if each is not None])

    def fetch(self) -> tuple[Held, Held]:
        """The next batch on the device: int64 tokens and targets."""
        rows = self.run.sizes.rows
        return (
            self.run.ledger.make("batch.x", 8 * rows, Kind.INPUTS, moved=8 * rows),
            self.run.ledger.make("batch.y", 8 * rows, Kind.INPUTS, moved=8 * rows),
        )

    def micro_step(self) -> None:
        """One forward and backward of the training loop."""
        run = self.run
        assert self.batch is not None
        run.ledger.phase = Phase.FORWARD
        run.nodes = []
        run.half_weights = {}
        logits, self.loss = forward(run, self.config, *self.batch)
        self.logits = logits if self.config.return_logits else None
        del logits
        run.ledger.phase = Phase.LOSS
        self.loss = run.ledger.make("loss.scaled", self.loss.bytes, Kind.LOGITS)
        run.half_weights = None
        self.batch = self.fetch()
        run.ledger.phase = Phase.BACKWARD
        scaled = _is_scaled(run.sizes)
        amplified = run.ledger.make("loss.amplified", 4, Kind.LOGITS) if scaled else None
        root = run.ledger.make("loss.grad", self.loss.bytes, Kind.LOGITS)
        if scaled:
            run.grad = run.ledger.make("loss.amplified.dx", 4, Kind.LOGITS)
        run.grad = run.ledger.make("loss.scaled.dx", self.loss.bytes, Kind.LOGITS)
        run.backward()
        run.grad = None
        run.nodes = None
        del root, amplified

    def evaluate(self) -> tuple[tuple[Op, ...], ...]:
        """estimate_loss: a first batch, then another while the first one's tensors are still held."""
        run = self.run
        run.training, run.nodes, run.ledger.phase = False, None, Phase.EVAL
        logits: Held | None = None
        batches: list[tuple[Op, ...]] = []
        while len(batches) < 2:
            batch = self.fetch()
            run.half_weights = {}
            logits, loss = forward(run, self.config, *batch)
            if not self.config.return_logits:
                logits = None
            run.half_weights = None
            if batches:
                del batch, logits, loss
            batches.append(run.ledger.ops())
        return tuple(batches)


def _is_scaled(sizes: Sizes) -> bool:
    """Whether a GradScaler multiplies the loss."""
    return sizes.dtype == "float16" and sizes.autocast


class MicroSteps(msgspec.Struct, frozen=True, eq=False):
    """The micro-step that makes the gradients, and after it one that adds to them."""

    ops: tuple[tuple[Op, ...], ...]
    carried: tuple[tuple[Buffer, ...], ...]  # what the program's variables hold before each of them, and at the end
    grads: dict[str, Buffer]

    def repeated(self, micro_steps: int) -> list[tuple[Op, ...]]:
        """So many of them, one after another."""
        result = list(self.ops[:micro_steps])
        held = self.carried[-1]
        while len(result) < micro_steps:
            following = tuple(map(copied, held))
            before, after = self.carried[-2:]
            new = dict(zip((*before, *after), (*held, *following), strict=True))
            result.append(tuple(exchanged(self.ops[-1], new)))
            held = following
        return result


@lru_cache(maxsize=8)  # a plan asks twice, for the first step and a later one
def simulated(config: TrainConfig, cuda: bool, threads: int, count: int) -> MicroSteps:
    """The first `count` micro-steps of a step."""
    program = Program(config, cuda, threads)
    program.start()
    ops, carried = [], [program.carried()]
    for _ in range(count):
        program.micro_step()
        ops.append(program.run.ledger.ops())
        carried.append(program.carried())
    grads = {name: held.buffer for name, held in program.run.grads.items()}
    return MicroSteps(tuple(ops), tuple(carried), grads)


@lru_cache(maxsize=8)
def simulated_evaluation(config: TrainConfig, cuda: bool, threads: int) -> tuple[tuple[Op, ...], ...]:
    """A first batch of an evaluation, and a later one."""
    return Program(config, cuda, threads).evaluate()


def build(
    config: TrainConfig,
    cuda: bool = True,
    first: bool = False,
    workspace_bytes: tuple[int, ...] = (),
    threads: int | None = None,
    evaluates: bool = True,
) -> Step:
    """One optimizer step of a settled config, run eagerly, and, unless it is not asked for, one evaluation.

    `first` is the run's first step: evaluation comes before it, and the optimizer's state is made in it.
    `workspace_bytes` are what the matrix library holds from its first call on; `threads` the CPU's, by default one a
    core, as PyTorch has it.
    """
    threads = threads or os.cpu_count() or 1
    alike = msgspec.structs.replace(config, gradient_accumulation_steps=1, world_size=1, eval_iters=1)
    count = max(1, config.gradient_accumulation_steps // config.world_size)
    micro_steps = simulated(alike, cuda, threads, min(count, 2))
    evaluation: list[Section] = []
    if evaluates:
        batches = simulated_evaluation(alike, cuda, threads)
        later = Section("evaluation, later batches", batches[1], 2 * config.eval_iters - 1)
        evaluation = [Section("evaluation, first batch", batches[0]), later]
    optimizer = Optimizer(config, Run(Sizes(config, cuda, threads)))
    resident, training = _training(optimizer, micro_steps, count, first)
    everything = [*_parameters(optimizer), *(Buffer("workspace", size, Kind.WORKSPACE) for size in workspace_bytes)]
    sections = [*evaluation, *training] if first else [*training, *evaluation]
    return Step((*everything, *resident), tuple(sections))


def _parameters(optimizer: Optimizer) -> list[Buffer]:
    """The model's parameters and buffers."""
    config, sizes = optimizer.config, optimizer.run.sizes
    found = [Buffer(p.name, p.numel * sizes.weight_bytes, Kind.PARAMETERS, p.block) for p in optimizer.everything]
    if sizes.by_hand:
        triangle_bytes = config.block_size**2 * sizes.weight_bytes
        names = [(f"transformer.h.{index}.attn.bias", index) for index in range(config.n_layer)]
        found += [Buffer(name, triangle_bytes, Kind.ATTENTION, index) for name, index in names]
    return found


def _training(
    optimizer: Optimizer, micro_steps: MicroSteps, count: int, first: bool
) -> tuple[list[Buffer], list[Section]]:
    """What the program holds before a step beside the parameters, and the step."""
    scaler = [Buffer(name, 4, Kind.OPTIMIZER) for name in _SCALER] if _is_scaled(optimizer.run.sizes) else []
    ops = micro_steps.repeated(min(count, 3))
    batch, left = micro_steps.carried[0][:2], micro_steps.carried[0][2:]
    resident = [*batch]
    if first:
        ops[0] = _beginning(ops[0], left, scaler)
    else:
        optimizer.state = optimizer.create_state()
        resident += [*scaler, *(held.buffer for held in optimizer.state), *left]
    sections = [Section(f"micro-step {index}", each) for index, each in enumerate(ops, 1)]
    if count > 3:
        sections[-1] = Section(f"micro-steps 3 to {count}", ops[-1], count - 2)
    for name, buffer in micro_steps.grads.items():
        optimizer.run.grads[name] = Held(optimizer.run.ledger, buffer)
    optimizer.step(first)
    return resident, [*sections, Section("optimizer", optimizer.run.ledger.ops())]


def _beginning(ops: Sequence[Op], left: Sequence[Buffer], scaler: Sequence[Buffer]) -> tuple[Op, ...]:
    """A run's first micro-step: no earlier one has left anything, and the gradient scaler is made before backward."""
    gone = exchanged(ops, dict.fromkeys(left))
    at = next(index for index, op in enumerate(gone) if op.phase is Phase.BACKWARD)
    made = [Op(buffer.name, Phase.BACKWARD, (buffer,), (), Kernel.POINTWISE) for buffer in scaler]
    return (*gone[:at], *made, *gone[at:])
