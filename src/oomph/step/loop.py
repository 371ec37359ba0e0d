"""An eager training step: a program's micro-steps, its optimizer's step, and an evaluation.

Only the micro-step that makes the gradients is interpreted. The others are the same operations on other batches,
logits and losses, with their gradients added to the first one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import msgspec

from oomph.config.schema import TrainConfig
from oomph.step import models, programs
from oomph.step.depth import UnlikeBlocksError, deepened, sample
from oomph.step.models import unsloth
from oomph.step.models.gpt2 import attends_by_hand
from oomph.step.nanochat_optimizer import NanochatOptimizer
from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase, Section, Step, copied, exchanged
from oomph.step.optimizer import Optimizer
from oomph.step.parameters import parameters
from oomph.step.precision import precision
from oomph.step.sharding.rank import Rank, rank_of
from oomph.step.tensor.layout import ITEM_BYTES
from oomph.step.tensor.quantized import stored
from oomph.step.tensor.tensor import Storage
from oomph.step.zero import ZeroOptimizer, bucketed

# Keys of a single device, in place of those that distribute the work over several.
ALONE = {
    "gradient_accumulation_steps": 1, "world_size": 1, "eval_iters": 1, "nodes": 1, "parallel": "none", "link": None,
    "network": None, "reshard_after_forward": None, "reduce_dtype": None, "grad_sync": None, "shard_size": None,
    "gradient_as_bucket_view": False,
}  # fmt: skip
SCALER = ("scaler.scale", "scaler.growth_tracker")


class MicroStep(msgspec.Struct, frozen=True, eq=False):
    """The micro-step that makes the gradients."""

    ops: tuple[Op, ...]
    before: tuple[Buffer, ...]  # what the program's variables hold before it: the batch, logits, the loss
    after: tuple[Buffer, ...]
    grads: dict[str, Buffer]
    inputs: int = 2  # how many of the held buffers are the batch
    cache: Mapping[str, Buffer] = {}  # keys and values that the model's outputs hold, not yet part of `after`
    later: tuple[Op, ...] | None = None  # a later micro-step, if it differs by more than adding gradients

    def repeated(self, micro_steps: int) -> list[tuple[Op, ...]]:
        """This many micro-steps, one after another: later ones add to the gradients."""
        result = [self.ops]
        held = self.after
        adding: Sequence[Op] = self.later or ()
        if micro_steps > 1 and self.later is None:
            adding = _adding(self.ops, self.grads)
        while len(result) < micro_steps:
            following = tuple(map(copied, held))
            new = dict(zip((*self.before, *self.after), (*held, *following), strict=True))
            result.append(tuple(exchanged(adding, new)))
            held = following
        return result

    def renewed(self, micro_steps: int) -> Iterator[tuple[tuple[Op, ...], dict[str, Buffer]]]:
        """This many micro-steps, one after another, each with its own gradients."""
        yield self.ops, self.grads
        held = self.after
        for _ in range(micro_steps - 1):
            following, grads = tuple(map(copied, held)), {name: copied(each) for name, each in self.grads.items()}
            new = dict(zip((*self.before, *self.after), (*held, *following), strict=True))
            new |= {buffer: grads[name] for name, buffer in self.grads.items()}
            yield tuple(exchanged(self.ops, new)), grads
            held = following


def _adding(ops: Sequence[Op], grads: Mapping[str, Buffer]) -> list[Op]:
    """The micro-step again, with each gradient added to the existing one and freed."""
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
    """A step's first micro-step."""
    found = _micro_step(config, cuda, threads)
    if config.deepspeed != "zero2":
        return found
    ops, later, kept = bucketed(found.ops, found.grads, config, precision(config, cuda).weight_bytes)
    return MicroStep(ops, found.before, found.after, kept, later=later)


def _micro_step(config: TrainConfig, cuda: bool, threads: int) -> MicroStep:
    layers, gaps = sample(models.kinds(config))
    found = _interpreted(config, cuda, threads, layers)
    sections, grads, cache = [found.ops], found.grads, found.cache
    try:
        for gap in gaps:
            sections, (grads, cache) = deepened(sections, (grads, cache), gap)
    except UnlikeBlocksError:
        return with_previous_cache(_interpreted(config, cuda, threads, range(config.n_layer)))
    return with_previous_cache(MicroStep(sections[0], found.before, found.after, grads, found.inputs, cache))


def with_previous_cache(found: MicroStep) -> MicroStep:
    """The micro-step with the previous one's cache, freed with the previous one's outputs."""
    if not found.cache:
        return found
    old = tuple(map(copied, found.cache.values()))
    logits = found.before[found.inputs]
    ops = [_freeing(op, old) if logits in op.frees else op for op in found.ops]
    after = (*found.after, *found.cache.values())
    return MicroStep(tuple(ops), (*found.before, *old), after, found.grads, found.inputs)


def _freeing(op: Op, more: Sequence[Buffer]) -> Op:
    """The operation, freeing these buffers too."""
    work = (op.kernel, op.shape, op.dtype, op.flops, op.bytes_moved, op.times, op.block)
    return Op(op.name, op.phase, op.allocates, (*op.frees, *more), *work)


def _interpreted(config: TrainConfig, cuda: bool, threads: int, layers: Sequence[int]) -> MicroStep:
    loop = programs.loop(config, cuda, threads, layers)
    loop.start()
    before = loop.carried()
    loop.micro_step()
    ops = loop.tape.ledger.ops()
    grads = {name: storage.buffer for name, storage in loop.tape.grads.items() if storage is not None}
    held = dict.fromkeys(storage.buffer for storage in getattr(loop, "cache", ()) if storage is not None)
    cache = {f"{buffer.name}.{index % 2}": buffer for index, buffer in enumerate(held)}
    return MicroStep(ops, before, loop.carried(), grads, loop.inputs, cache)


@lru_cache(maxsize=8)
def evaluation(config: TrainConfig, cuda: bool, threads: int) -> tuple[tuple[Op, ...], ...]:
    """The operations of an evaluation's first batch, and of a later one."""
    layers, gaps = sample(models.kinds(config))
    batches: Sequence[tuple[Op, ...]] = programs.loop(config, cuda, threads, layers).evaluate()
    try:
        for gap in gaps:
            batches, _ = deepened(batches, (), gap)
    except UnlikeBlocksError:
        return programs.loop(config, cuda, threads, range(config.n_layer)).evaluate()
    return tuple(batches)


def build(
    config: TrainConfig, cuda: bool = True, first: bool = False, threads: int = 1, evaluates: bool = True
) -> Step:
    """One optimizer step of a settled config, run eagerly, and, if `evaluates`, one evaluation."""
    rank = rank_of(config, cuda)
    shared = {"world_size": config.world_size} if config.deepspeed == "zero2" else {}  # ranks reduce its buckets
    alike = msgspec.structs.replace(rank.model, **(ALONE | shared))
    count = max(1, config.gradient_accumulation_steps // config.world_size)
    evaluating: list[Section] = []
    if evaluates:
        batches = [rank.evaluation(batch) for batch in evaluation(alike, cuda, threads)]
        later = Section("evaluation, later batches", batches[1], 2 * config.eval_iters - 1)
        evaluating = [Section("evaluation, first batch", batches[0]), later]
    optimizer = _optimizer(config)(config, cuda, rank.updated(), rank.weight_bytes)
    resident, micro_steps = training(optimizer, micro_step(alike, cuda, threads), count, first, rank)
    sections = [*evaluating, *micro_steps] if first else [*micro_steps, *evaluating]
    return Step((*rank.kept(model_buffers(config, cuda)), *resident, *rank.resident), tuple(sections))


def _optimizer(config: TrainConfig) -> type[Optimizer]:
    if config.deepspeed != "off":
        return ZeroOptimizer
    return NanochatOptimizer if config.trainer == "nanochat" else Optimizer


def model_buffers(config: TrainConfig, cuda: bool) -> list[Buffer]:
    """The model's parameters and buffers."""
    dtypes = precision(config, cuda)
    weights = models.weights(config, dtypes)
    found: list[Buffer] = []
    for p in parameters(config):
        if config.trainer == "unsloth" and unsloth.is_on_host(config, p.name):
            continue
        how = weights[p.name].quantization
        if how is None:
            found.append(Buffer(p.name, p.numel * ITEM_BYTES[weights[p.name].dtype], Kind.PARAMETERS, p.block))
        else:
            parts = stored(how, p.shape)
            found += [Buffer(f"{p.name}.{part}", size, Kind.PARAMETERS, p.block) for part, size in parts]
    found += [Buffer(name, size, unsloth.kind_of(name)) for name, size in models.buffers(config, dtypes)]
    if attends_by_hand(config):
        triangle_bytes = config.block_size**2 * dtypes.weight_bytes
        names = [(f"transformer.h.{index}.attn.bias", index) for index in range(config.n_layer)]
        found += [Buffer(name, triangle_bytes, Kind.ATTENTION, index) for name, index in names]
    return found


def training(
    optimizer: Optimizer, pattern: MicroStep, count: int, first: bool, rank: Rank | None = None
) -> tuple[list[Buffer], list[Section]]:
    """What the program holds before a step besides the parameters, and the step; one rank's, if there are several."""
    rank = rank or Rank(optimizer.config, optimizer.cuda)
    forgotten = _forgotten(optimizer.config, pattern.grads)
    scaler = [Buffer(name, 4, Kind.OPTIMIZER) for name in SCALER] if optimizer.precision.is_scaled else []
    ops, grads = rank.micro_steps(pattern, count, first)
    batch, left = pattern.before[: pattern.inputs], pattern.before[pattern.inputs :]
    resident = [*batch]
    if first:
        ops[0] = _beginning(ops[0], left, scaler)
    else:
        resident += [*scaler, *left]
        if forgotten:
            ops[0] = tuple(_adding(ops[0], forgotten))
            resident += forgotten.values()
    if not first or optimizer.starts_with_state:
        optimizer.state = optimizer.create_state()
        resident += [held.buffer for held in optimizer.state]
    in_forward = rank.frees_grads_in_forward
    late = optimizer.config.zero_grad == "before_backward" or in_forward
    if late and not first:
        old = tuple(map(copied, grads))
        resident += old
        at = 0 if in_forward else next(index for index, op in enumerate(ops[0]) if op.phase is Phase.BACKWARD)
        ops[0] = (*ops[0][:at], Op("zero_grad", ops[0][at].phase, frees=old), *ops[0][at:])
    if optimizer.config.zero_grad == "in_backward":
        return resident, rank.sections([_stepping(optimizer, ops[0], pattern.grads, first)], 1)
    sections = rank.sections(ops, count)
    if not late:
        kept = set(forgotten.values())
        optimizer.grads = [Storage(optimizer.ledger, buffer) for buffer in grads if buffer not in kept]
    optimizer.step(first)
    return resident, [*sections, Section("optimizer", (*optimizer.ledger.ops(), *rank.after_update()))]


def _stepping(optimizer: Optimizer, ops: Sequence[Op], grads: Mapping[str, Buffer], first: bool) -> tuple[Op, ...]:
    """A micro-step in which each parameter has its own optimizer, which runs as soon as the gradient exists."""
    result: list[Op] = []
    named = {f"{parameter.name}.grad": parameter for parameter in optimizer.everything}
    for op in ops:
        result.append(op)
        parameter = named.pop(op.name, None) if op.phase is Phase.BACKWARD else None
        if parameter is not None:
            own = type(optimizer)(optimizer.config, optimizer.cuda, [parameter])
            own.grads = [Storage(own.ledger, grads[parameter.name])]
            own.step(first)
            result += own.ledger.ops()
    return tuple(result)


def _forgotten(config: TrainConfig, grads: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """Gradients that no optimizer uses and no zero_grad frees: with adapters, those of all other parameters."""
    if config.method == "full" or config.deepspeed != "off":
        return {}
    return {name: grad for name, grad in grads.items() if not models.is_trained(name)}


def _beginning(ops: Sequence[Op], left: Sequence[Buffer], scaler: Sequence[Buffer]) -> tuple[Op, ...]:
    """A run's first micro-step: nothing is left from an earlier one, and the grad scaler is made before backward."""
    gone = exchanged(ops, dict.fromkeys(left))
    at = next(index for index, op in enumerate(gone) if op.phase is Phase.BACKWARD)
    made = [Op(buffer.name, Phase.BACKWARD, (buffer,), (), Kernel.POINTWISE) for buffer in scaler]
    return (*gone[:at], *made, *gone[at:])
