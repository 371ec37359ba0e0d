"""The training loop around an eager model: what its variables hold between the model's forwards and backwards.

It is the program, not an ideal: nanoGPT's loop keeps the logits of one micro-step until the next has made its own,
fetches the next batch before backward, and lets gradients go after the optimizer's step.

One micro-step is interpreted: the one that makes the gradients. The others are the same operations on other batches,
logits and losses, with their gradients added to the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec

from oomph.config.schema import TrainConfig
from oomph.step import models
from oomph.step.depth import UnlikeBlocksError, deepened, sample
from oomph.step.models.gpt2 import attends_by_hand
from oomph.step.nanochat_optimizer import NanochatOptimizer
from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase, Section, Step, copied, exchanged
from oomph.step.optimizer import Optimizer
from oomph.step.parameters import parameters, trained
from oomph.step.precision import precision
from oomph.step.tensor.autograd import run_backward
from oomph.step.tensor.casts import to
from oomph.step.tensor.elementwise import scale
from oomph.step.tensor.layout import ITEM_BYTES
from oomph.step.tensor.quantized import stored
from oomph.step.tensor.tape import Module, Tape
from oomph.step.tensor.tensor import Storage, Tensor

SCALER = ("scaler.scale", "scaler.growth_tracker")


class Loop:
    """nanoGPT's training script with what its variables hold: the batch, the logits, the loss."""

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
        """Whether the model's call hands them to the loop."""
        return bool(self.config.return_logits)

    @property
    def in_chunks(self) -> bool:
        """Whether the loss is computed in chunks of tokens."""
        return bool(self.config.loss_chunk)

    def start(self) -> None:
        """What the variables hold as a step begins: what the one before it has left."""
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
        """What they hold now: the batch, the logits where they are kept, the loss."""
        batch = [tensor.storage for tensor in self.batch or ()]
        return tuple([each.buffer for each in (*batch, self.logits, self.loss) if each is not None])

    def _tokens(self, storage: Storage) -> Tensor:
        return self.tape.tensor(storage, (self.config.batch_size, self.config.block_size), "int64")

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
        """loss.backward(), of the loss that a GradScaler has multiplied where there is one."""
        tape = self.tape
        root = scale(loss, "amplified") if self.precision.is_scaled else loss
        grad = tape.made("grad", (), root.dtype)
        tape.grad_enabled = False
        run_backward((root, grad.detach()))
        tape.grad_enabled = True

    def evaluate(self) -> tuple[tuple[Op, ...], ...]:
        """estimate_loss: a first batch, then another while the first one's tensors are still held."""
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


class TrainerLoop(Loop):
    """transformers' Trainer (5.22, accelerate 1.15).

    The batches of a whole optimizer step are fetched at once and held. `compute_loss` lets the model's outputs go
    before backward; where autocast is on, accelerate has brought them to float32 before that.
    """

    def start(self) -> None:
        """Nothing but the batches, which are not the loop's to fetch."""
        size = 8 * self.config.batch_size * self.config.block_size
        hold = self.tape.ledger.hold
        self.batch = (
            self._tokens(hold("batch.input_ids", size, Kind.INPUTS)),
            self._tokens(hold("batch.labels", size, Kind.INPUTS)),
        )

    def carried(self) -> tuple[Buffer, ...]:
        """What one micro-step leaves to the next."""
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
    """The plainest loop around a transformers model (5.22): `outputs = model(**batch)`, backward, a step, zero_grad.

    The variable `outputs` holds logits, and the cache of keys and values, until the next forward has returned its own;
    `batch` holds its tensors until all of the next are on the device.
    """

    def __init__(self, config: TrainConfig, cuda: bool, threads: int, layers: Sequence[int]) -> None:
        super().__init__(config, cuda, threads, layers)
        self.cache: list[Storage | None] = []

    def micro_step(self) -> None:
        """One turn of the loop, but for the optimizer."""
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


class NanochatLoop(Loop):
    """nanochat's scripts/base_train.py (github.com/karpathy/nanochat at 92d63d4).

    Every batch is copied into the same buffer, after backward. The loss of a micro-step is held until the next has its
    own; it is divided by their number in another tensor.
    """

    returns_logits = in_chunks = False  # whatever the config says

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


_PROGRAMS: dict[str, type[Loop]] = {"hf": TrainerLoop, "torch": PlainLoop, "nanochat": NanochatLoop}


def _loop(config: TrainConfig, cuda: bool, threads: int, layers: Sequence[int]) -> Loop:
    return _PROGRAMS.get(config.trainer, Loop)(config, cuda, threads, layers)


class MicroStep(msgspec.Struct, frozen=True, eq=False):
    """The micro-step that makes the gradients."""

    ops: tuple[Op, ...]
    before: tuple[Buffer, ...]  # what the program's variables hold before it: the batch, logits, the loss
    after: tuple[Buffer, ...]
    grads: dict[str, Buffer]
    inputs: int = 2  # how many of what is held are the batch
    cache: Mapping[str, Buffer] = {}  # keys and values that the model's outputs hold, not yet among `after`

    def repeated(self, micro_steps: int) -> list[tuple[Op, ...]]:
        """So many of them, one after another: the later ones add to the gradients."""
        result = [self.ops]
        held = self.after
        adding = _adding(self.ops, self.grads) if micro_steps > 1 else []
        while len(result) < micro_steps:
            following = tuple(map(copied, held))
            new = dict(zip((*self.before, *self.after), (*held, *following), strict=True))
            result.append(tuple(exchanged(adding, new)))
            held = following
        return result


def _adding(ops: Sequence[Op], grads: Mapping[str, Buffer]) -> list[Op]:
    """The micro-step again, with each gradient added to the one that is there, and let go."""
    new = {buffer: copied(buffer) for buffer in grads.values()}
    kept = {op.name for op in ops if op.kernel is Kernel.NONE}
    result: list[Op] = []
    for op in exchanged(ops, new):
        made = grads.get(op.name.removesuffix(".grad")) if op.name.endswith(".grad") else None
        copies = op.name not in kept  # its layout is not the parameter's: the first is copied, later ones are added
        if made is not None and (op.kernel is Kernel.NONE or copies):
            frees = op.frees if copies else (*op.frees, new[made])
            op = Op(op.name, op.phase, (), frees, Kernel.POINTWISE, bytes_moved=3 * made.bytes, block=op.block)
        result.append(op)
    return result


@lru_cache(maxsize=8)  # a plan asks twice, for the first step and a later one
def micro_step(config: TrainConfig, cuda: bool, threads: int) -> MicroStep:
    """The first micro-step of a step."""
    layers, gaps = sample(models.kinds(config))
    found = _interpreted(config, cuda, threads, layers)
    sections, grads, cache = [found.ops], found.grads, found.cache
    try:
        for gap in gaps:
            sections, (grads, cache) = deepened(sections, (grads, cache), gap)
    except UnlikeBlocksError:
        return _with_previous_cache(_interpreted(config, cuda, threads, range(config.n_layer)))
    return _with_previous_cache(MicroStep(sections[0], found.before, found.after, grads, cache=cache))


def _with_previous_cache(found: MicroStep) -> MicroStep:
    """The micro-step with the last one's cache, which goes when the last one's outputs do."""
    if not found.cache:
        return found
    old = tuple(map(copied, found.cache.values()))
    logits = found.before[found.inputs]
    ops = [_freeing(op, old) if logits in op.frees else op for op in found.ops]
    return MicroStep(tuple(ops), (*found.before, *old), (*found.after, *found.cache.values()), found.grads)


def _freeing(op: Op, more: Sequence[Buffer]) -> Op:
    """The operation, which lets go of these buffers too."""
    work = (op.kernel, op.shape, op.dtype, op.flops, op.bytes_moved, op.times, op.block)
    return Op(op.name, op.phase, op.allocates, (*op.frees, *more), *work)


def _interpreted(config: TrainConfig, cuda: bool, threads: int, layers: Sequence[int]) -> MicroStep:
    loop = _loop(config, cuda, threads, layers)
    loop.start()
    before = loop.carried()
    loop.micro_step()
    ops = loop.tape.ledger.ops()
    grads = {name: storage.buffer for name, storage in loop.tape.grads.items() if storage is not None}
    held = dict.fromkeys(storage.buffer for storage in getattr(loop, "cache", ()) if storage is not None)
    cache = {f"{buffer.name}.{index % 2}": buffer for index, buffer in enumerate(held)}
    return MicroStep(ops, before, loop.carried(), grads, cache=cache)


@lru_cache(maxsize=8)
def evaluation(config: TrainConfig, cuda: bool, threads: int) -> tuple[tuple[Op, ...], ...]:
    """A first batch of an evaluation, and a later one."""
    layers, gaps = sample(models.kinds(config))
    batches: Sequence[tuple[Op, ...]] = _loop(config, cuda, threads, layers).evaluate()
    try:
        for gap in gaps:
            batches, _ = deepened(batches, (), gap)
    except UnlikeBlocksError:
        return _loop(config, cuda, threads, range(config.n_layer)).evaluate()
    return tuple(batches)


def build(
    config: TrainConfig, cuda: bool = True, first: bool = False, threads: int = 1, evaluates: bool = True
) -> Step:
    """One optimizer step of a settled config, run eagerly, and, unless it is not asked for, one evaluation."""
    alike = msgspec.structs.replace(config, gradient_accumulation_steps=1, world_size=1, eval_iters=1)
    count = max(1, config.gradient_accumulation_steps // config.world_size)
    evaluating: list[Section] = []
    if evaluates:
        batches = evaluation(alike, cuda, threads)
        later = Section("evaluation, later batches", batches[1], 2 * config.eval_iters - 1)
        evaluating = [Section("evaluation, first batch", batches[0]), later]
    own = NanochatOptimizer if config.trainer == "nanochat" else Optimizer
    optimizer = own(config, cuda, trained(config))
    resident, micro_steps = training(optimizer, micro_step(alike, cuda, threads), count, first)
    sections = [*evaluating, *micro_steps] if first else [*micro_steps, *evaluating]
    return Step((*model_buffers(config, cuda), *resident), tuple(sections))


def model_buffers(config: TrainConfig, cuda: bool) -> list[Buffer]:
    """The model's parameters and buffers."""
    dtypes = precision(config, cuda)
    weights = models.weights(config, dtypes)
    found: list[Buffer] = []
    for p in parameters(config):
        how = weights[p.name].quantization
        if how is None:
            found.append(Buffer(p.name, p.numel * ITEM_BYTES[weights[p.name].dtype], Kind.PARAMETERS, p.block))
        else:
            parts = stored(how, p.shape)
            found += [Buffer(f"{p.name}.{part}", size, Kind.PARAMETERS, p.block) for part, size in parts]
    found += [Buffer(name, size, Kind.PARAMETERS) for name, size in models.buffers(config, dtypes)]
    if attends_by_hand(config):
        triangle_bytes = config.block_size**2 * dtypes.weight_bytes
        names = [(f"transformer.h.{index}.attn.bias", index) for index in range(config.n_layer)]
        found += [Buffer(name, triangle_bytes, Kind.ATTENTION, index) for name, index in names]
    return found


def training(optimizer: Optimizer, pattern: MicroStep, count: int, first: bool) -> tuple[list[Buffer], list[Section]]:
    """What the program holds before a step beside the parameters, and the step."""
    scaler = [Buffer(name, 4, Kind.OPTIMIZER) for name in SCALER] if optimizer.precision.is_scaled else []
    ops = pattern.repeated(min(count, 3))
    batch, left = pattern.before[: pattern.inputs], pattern.before[pattern.inputs :]
    resident = [*batch]
    if first:
        ops[0] = _beginning(ops[0], left, scaler)
    else:
        optimizer.state = optimizer.create_state()
        resident += [*scaler, *(held.buffer for held in optimizer.state), *left]
    late = optimizer.config.zero_grad == "before_backward"
    if late and not first:
        old = tuple(map(copied, pattern.grads.values()))
        resident += old
        at = next(index for index, op in enumerate(ops[0]) if op.phase is Phase.BACKWARD)
        ops[0] = (*ops[0][:at], Op("zero_grad", Phase.BACKWARD, frees=old), *ops[0][at:])
    sections = [Section(f"micro-step {index}", each) for index, each in enumerate(ops, 1)]
    if count > 3:
        sections[-1] = Section(f"micro-steps 3 to {count}", ops[-1], count - 2)
    if not late:
        optimizer.grads = [Storage(optimizer.ledger, buffer) for buffer in pattern.grads.values()]
    optimizer.step(first)
    return resident, [*sections, Section("optimizer", optimizer.ledger.ops())]


def _beginning(ops: Sequence[Op], left: Sequence[Buffer], scaler: Sequence[Buffer]) -> tuple[Op, ...]:
    """A run's first micro-step: no earlier one has left anything, and the gradient scaler is made before backward."""
    gone = exchanged(ops, dict.fromkeys(left))
    at = next(index for index, op in enumerate(gone) if op.phase is Phase.BACKWARD)
    made = [Op(buffer.name, Phase.BACKWARD, (buffer,), (), Kernel.POINTWISE) for buffer in scaler]
    return (*gone[:at], *made, *gone[at:])
