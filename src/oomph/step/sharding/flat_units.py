"""FSDP1 (FullyShardedDataParallel): one rank's micro-steps, from those of a single device.

Read in torch 2.13, torch/distributed/fsdp: `_runtime_utils.py` has the hooks, `_flat_param.py` what they allocate. The
parameters of a unit are views of one flat parameter, of which each rank keeps a part (use_orig_params):

    forward   the part is cast, if mixed precision is on, and gathered into one buffer, of which the
              parameters are views; after the forward it is freed, except the root's.
    backward  gathered again, and the next unit's gathering started (BACKWARD_PRE). Gradients of views end up in
              one flat gradient, which is reduced to a part and freed. A part's gradient stays until the next forward
              begins, regardless of zero_grad.

Units are the blocks and, as the root's, the rest; beside frozen weights every trained module is a unit of its
own, by peft's fsdp_auto_wrap_policy. When transformers before 4.53 recomputes a checkpointed block, it also runs
the hooks again: gathered, freed and gathered once more, without prefetching. For a frozen block, the hook that
frees it then holds the block's input and its gradient until the end of backward (register_multi_grad_hook).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from oomph.config.programs import TRANSFORMERS, release
from oomph.config.schema import TrainConfig
from oomph.step import models
from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase
from oomph.step.parameters import Parameter, parameters
from oomph.step.precision import precision
from oomph.step.sharding.groups import computing, shard_ranks
from oomph.step.sharding.hooks import HookedMicroSteps
from oomph.step.tensor.layout import ITEM_BYTES
from oomph.step.tensor.quantized import stored
from oomph.step.tensor.tape import Weight

GATHERING, _REDUCING, _CASTING = 1, 2, 3  # FSDP1's CUDA streams: unshard, post-backward and pre-unshard
CHECKPOINTED_INSIDE_SINCE = (
    4,
    53,
)  # transformers' blocks checkpoint themselves, within FSDP's hooks (modeling_layers.py)
_ALIGNMENT = 16  # bytes: alignment of a parameter inside a flat one


class UnitPart(msgspec.Struct, frozen=True):
    """A parameter inside a flat one."""

    name: str
    at: int  # offset in elements
    numel: int
    decayed: bool


class Unit(msgspec.Struct, frozen=True, eq=False):
    """Parameters that are gathered together, as one flat tensor."""

    name: str
    block: int | None  # None: the root
    parts: tuple[UnitPart, ...]
    numel: int  # elements of the flat parameter, padded to a multiple of the ranks
    ranks: int
    kept: str  # dtype of the part a rank keeps
    gathered: str
    trained: bool

    @property
    def kept_bytes(self) -> int:
        """Bytes of one rank's part."""
        return self.numel // self.ranks * ITEM_BYTES[self.kept]

    @property
    def gathered_bytes(self) -> int:
        """Bytes of all parts when gathered."""
        return self.numel * ITEM_BYTES[self.gathered]

    def updated(self) -> list[Parameter]:
        """What the first rank's optimizer updates: the elements of each parameter inside its part."""
        size = self.numel // self.ranks
        inside = [(part, min(part.at + part.numel, size) - part.at) for part in self.parts]
        return [Parameter(part.name, (count,), part.decayed) for part, count in inside if count > 0]


def units(config: TrainConfig, cuda: bool) -> list[Unit]:
    """The root's unit, the blocks' units, and those of modules trained beside frozen ones."""
    kept = models.weights(config, precision(config, cuda))
    inner = computing(config)
    gathered = models.weights(inner, precision(inner, cuda))
    found: dict[tuple[int | None, str], list[Parameter]] = {(None, ""): []}
    for each in parameters(config):
        own = each.name.rpartition(".")[0] if each.trained and config.method != "full" else ""
        found.setdefault((each.block, own), []).append(each)
    result: list[Unit] = []
    for (block, own), inside in found.items():
        plain = next((each.name for each in inside if kept[each.name].quantization is None), None)
        storage = kept[plain].dtype if plain else precision(config, cuda).compute
        arrives = gathered[plain].dtype if plain else storage
        parts, numel = _placed(inside, {each.name: _numel(each, kept[each.name], storage) for each in inside}, arrives)
        ranks = shard_ranks(config)
        name = own or ("root" if block is None else f"block.{block}")
        padded = -(-numel // ranks) * ranks
        result.append(Unit(name, block, tuple(parts), padded, ranks, storage, arrives, inside[0].trained))
    return [unit for unit in result if unit.numel]


def _numel(parameter: Parameter, weight: Weight, storage: str) -> int:
    """The elements a parameter takes in a flat one: for a quantized parameter, enough to hold its bytes."""
    if weight.quantization is None:
        return parameter.numel
    return stored(weight.quantization, parameter.shape)[0][1] // ITEM_BYTES[storage]


def _placed(inside: Sequence[Parameter], numels: dict[str, int], dtype: str) -> tuple[list[UnitPart], int]:
    """The parameters laid out one after another, each aligned, and the elements that takes."""
    step, at, found = _ALIGNMENT // ITEM_BYTES[dtype], 0, list[UnitPart]()
    for each in inside:
        at = -(-at // step) * step
        found.append(UnitPart(each.name, at, numels[each.name], each.decayed))
        at += numels[each.name]
    return found, at


def resident(config: TrainConfig, cuda: bool, found: Sequence[Unit], whole: Sequence[Buffer]) -> list[Buffer]:
    """What one rank keeps of the model: its parts, and everything that is not a parameter."""
    weights = models.weights(config, precision(config, cuda))
    flat = {name for name, each in weights.items() if each.quantization is None}
    flat |= {f"{name}.{stored(each.quantization, each.shape)[0][0]}" for name, each in weights.items() if each.quantization}  # fmt: skip  # noqa: E501
    parts = [Buffer(f"{unit.name}.part", unit.kept_bytes, Kind.PARAMETERS, unit.block) for unit in found]
    return [*parts, *(buffer for buffer in whole if buffer.name not in flat)]


class FlatPolicy(msgspec.Struct, frozen=True):
    """How a program uses FullyShardedDataParallel."""

    reshards: bool  # FULL_SHARD, not SHARD_GRAD_OP
    reduce_dtype: str | None  # None: the gradients' dtype
    each: bool  # reduce gradients in every micro-step, not only in the last (no_sync)
    replicas: int = 1  # HYBRID_SHARD: copies of the model, whose gradients are reduced too
    near_replicas: int = 1  # of them, those within one machine
    offloads: bool = False  # parts and their gradients are on the host (CPUOffload)
    run_again: int = 0  # how many blocks, from the first, run the hooks again when recomputed


def flat_policy(config: TrainConfig) -> FlatPolicy:
    """The program's own policy, overridden by the config."""
    older = config.trainer in TRANSFORMERS and release(config.transformers_version) < CHECKPOINTED_INSIDE_SINCE
    return FlatPolicy(
        reshards=(config.reshard_after_forward or "true").lower() != "false",
        reduce_dtype=config.reduce_dtype,
        each=(config.grad_sync or ("last" if config.trainer in TRANSFORMERS else "each")) == "each",
        replicas=config.world_size // shard_ranks(config),
        near_replicas=max(1, config.world_size // config.nodes // shard_ranks(config)),
        offloads=config.cpu_offload == "all",
        run_again=config.checkpoint_layers if older else 0,
    )


class FlatMicroSteps(HookedMicroSteps):
    """Micro-steps of one rank under FSDP1."""

    def __init__(self, found: Sequence[Unit], how: FlatPolicy, cuda: bool) -> None:
        blocks = sorted({unit.block for unit in found if unit.block is not None})
        super().__init__(blocks, cuda, loss_outside=False)
        self.how = how
        named = {unit.name: unit for unit in found}
        self.units = {block: named.get("root" if block is None else f"block.{block}") for block in (None, *blocks)}
        self.nested = [unit for unit in found if unit is not self.units.get(unit.block)]
        self.used = {unit.name: unit for unit in self.nested}  # by the name of its forward operation
        self.first_used = {unit.block: unit for unit in reversed(self.nested)}
        self.gradients = {f"{part.name}.grad": unit for unit in self.nested for part in unit.parts}
        self.parameter_grads = {f"{part.name}.grad" for unit in found for part in unit.parts}
        self.gathered: dict[str, Buffer] = {}
        self.begun: set[str] = set()  # units whose gathering was started, but not waited for
        self.reduced: list[str] = []  # collectives to wait for at the end of backward
        self.whole_grads: dict[str, Buffer] = {}  # flat gradients kept for the last micro-step
        self.grads: dict[str, Buffer] = {}  # gradients for the optimizer
        self.forward_ops: Counter[int] = Counter()  # operations in each block's forward
        self.again: tuple[int, int] | None = None  # the block being recomputed, and its remaining operations
        self.makers: dict[
            Buffer, int | None
        ] = {}  # the block that made a buffer; excludes buffers that backward makes outside of blocks
        self.hooked: list[Buffer] = []  # buffers that the hooks of frozen blocks hold

    # --- the hooks --------------------------------------------------------------------------------

    def _pre_forward(self, block: int | None) -> None:
        if block is None and self.ops:
            return
        if block is None:
            self.forward_ops.clear()
        self._gather(self.units[block])

    def _post_forward(self, block: int | None) -> None:
        if block is not None and self.how.reshards:
            self._free(block)

    def _leave_forward(self, block: int | None, inside: bool) -> None:
        if inside:
            self._post_forward(block)

    def _pre_backward(self, block: int | None, following: int | None) -> None:
        self._gather(self.units[block])
        if block is not None and self._runs_again(block):
            self.again = (block, self.forward_ops[block])
        if block not in self.first_used:
            self._look_ahead(following)

    def _runs_again(self, block: int) -> bool:
        return self.order.index(block) < self.how.run_again

    def _look_ahead(self, following: int | None) -> None:
        """BACKWARD_PRE: gather the next unit while this one runs, unless it will recompute its forward."""
        if following is not None and not self._runs_again(following):
            self._unshard(self.units[following])

    def _run(self, op: Op) -> None:
        block = op.block
        if self.again is not None and block == self.again[0]:
            self._count_down(*self.again)
        elif self.again is None and block is not None and self.phase is not Phase.BACKWARD:
            self.forward_ops[block] += 1
        unit = self.used.get(op.name) or self.used.get(op.name.removesuffix(".dw").removesuffix(".dx"))
        if unit is None:
            self.ops.append(self._holding(op) if self.how.run_again else op)
            if (own := self.gradients.get(op.name)) is not None and self._is_made(own, op):
                self._reduce(own)
            return
        self._gather(unit)
        self.ops.append(op)
        if op.name == unit.name:  # its forward
            self._let_go(unit)
        elif unit is self.first_used.get(block) and block is not None:
            at = self.order.index(block)
            self._look_ahead(self.order[at - 1] if at else None)

    def _is_made(self, unit: Unit, op: Op) -> bool:
        """Whether a unit's gradients are complete after this operation: a tied weight gets another one added later."""
        made = [self.made[part.name] for part in unit.parts if part.name in self.made]
        return all(buffer in self.seen or buffer in op.allocates for buffer in made)

    def _holding(self, op: Op) -> Op:
        """The operation, not freeing what a recomputed frozen block's hook holds: the input and its gradient."""
        block, own = op.block, self.units.get(op.block)
        if self.phase is not Phase.BACKWARD or block is not None:
            self.makers |= dict.fromkeys(op.allocates, block)
        ends = self.phase is Phase.BACKWARD and op.kernel is Kernel.NONE and op.name.endswith(".grad")
        if block is None or not ends or op.name in self.parameter_grads or not self._runs_again(block) or own is None:
            return op
        if own.trained:
            self._reduce(own)  # within the region that ends here
            return op
        held = [buffer for buffer in op.frees if self.makers.get(buffer, block) != block]
        self.hooked += held
        return op.on(op.allocates, tuple([buffer for buffer in op.frees if buffer not in held]))

    def _count_down(self, block: int, left: int) -> None:
        """Free a recomputed block and gather it once more before its backward."""
        self.again = (block, left - 1) if left else None
        if not left and self.how.reshards:
            self._free(block)
            self._gather(self.units[block])

    def _post_backward(self, block: int | None) -> None:
        self.through.add(block)
        for unit in self.nested:
            if unit.block == block:
                self._reduce(unit)
        own = self.units[block]
        if own is not None and own.trained:
            self._reduce(own)
        elif block is not None:
            self._free(block)

    def _finish(self, current: int | None) -> None:
        if current is not None and current >= 0:
            self._post_backward(current)
        self._post_backward(None)
        self._free(None)
        for name in self.reduced:
            self._note(name, kernel=Kernel.WAIT)
        if self.hooked:
            self._note("root.post_backward", frees=tuple(self.hooked))
        self.reduced, self.hooked, self.makers = [], [], {}

    def _free(self, block: int | None) -> None:
        unit = self.units[block]
        if unit is not None:
            self._let_go(unit)

    # --- gathering --------------------------------------------------------------------------------

    def _unshard(self, unit: Unit | None) -> None:
        if unit is None or unit.name in self.gathered:
            return
        name = f"{unit.name}.all_gather"
        cast: tuple[Buffer, ...] = ()
        brought: tuple[Buffer, ...] = ()
        if self.how.offloads:
            brought = (Buffer(f"{unit.name}.from_host", unit.kept_bytes, Kind.COMMUNICATION, unit.block, _CASTING),)
            self._note(f"{unit.name}.from_host", brought)
        if unit.kept != unit.gathered:
            size = unit.gathered_bytes // unit.ranks
            cast = (Buffer(f"{unit.name}.cast", size, Kind.COMMUNICATION, unit.block, _CASTING, recorded=True),)
            self._note(f"{unit.name}.cast", cast, brought, Kernel.POINTWISE, size + unit.kept_bytes)
            brought = ()
        flat = Buffer(f"{unit.name}.gathered", unit.gathered_bytes, Kind.GATHERED, unit.block, GATHERING, recorded=True)
        self._collective(name, Kernel.ALL_GATHER, unit.ranks, flat.bytes, (flat,), (*cast, *brought))
        self.gathered[unit.name] = flat
        self.begun.add(unit.name)

    def _gather(self, unit: Unit | None) -> None:
        """Start gathering a unit, if it has not been started, and wait for it."""
        self._unshard(unit)
        if unit is not None and unit.name in self.begun:
            self.begun.discard(unit.name)
            self._note(f"{unit.name}.all_gather", kernel=Kernel.WAIT)

    def _let_go(self, unit: Unit) -> None:
        flat = self.gathered.pop(unit.name, None)
        if flat is not None:
            self._note(f"{unit.name}.reshard", frees=(flat,))

    # --- reducing ---------------------------------------------------------------------------------

    def _reduce(self, unit: Unit) -> None:
        """The backward of the split, AccumulateGrad, and _post_backward_hook."""
        made = tuple([self.made.pop(part.name) for part in unit.parts if part.name in self.made])
        if not made:
            self._let_go(unit)
            return
        flat = Buffer(f"{unit.name}.flat_grad", unit.gathered_bytes, Kind.GRADIENTS, unit.block, recorded=True)
        self._note(flat.name, (flat,), made, Kernel.POINTWISE, 2 * flat.bytes)
        done = [flat]  # the engine holds it until the hook returns
        if (waiting := self.whole_grads.pop(unit.name, None)) is not None:
            self._note(f"{flat.name}.add", kernel=Kernel.POINTWISE, moved=3 * flat.bytes)
            done.append(waiting)
        self._let_go(unit)
        if not self.reduces:
            self.whole_grads[unit.name] = done.pop()
            self._note(f"{unit.name}.kept", frees=tuple(done))
            return
        dtype = self.how.reduce_dtype or unit.gathered
        size = unit.numel * ITEM_BYTES[dtype]
        if dtype != unit.gathered:
            done.append(Buffer(f"{flat.name}.cast", size, Kind.GRADIENTS, unit.block, _REDUCING))
            self._note(f"{flat.name}.cast", (done[-1],), (), Kernel.POINTWISE, size + flat.bytes)
        part = Buffer(f"{unit.name}.grad", size // unit.ranks, Kind.GRADIENTS, unit.block, _REDUCING)
        name = f"{unit.name}.reduce_scatter"
        self._collective(name, Kernel.REDUCE_SCATTER, unit.ranks, size, (part,))
        self.reduced.append(name)
        if self.how.replicas > 1:
            shape = (self.how.replicas, part.bytes, self.how.near_replicas)
            self.ops.append(Op(f"{unit.name}.all_reduce", self.phase, kernel=Kernel.ALL_REDUCE, shape=shape))
            self.reduced.append(f"{unit.name}.all_reduce")
        if dtype != unit.kept:
            cast = Buffer(f"{unit.name}.grad", unit.kept_bytes, Kind.GRADIENTS, unit.block, _REDUCING)
            self._note(cast.name, (cast,), (part,), Kernel.POINTWISE, part.bytes + cast.bytes)
            part = cast
        if self.how.offloads:
            self._note(f"{unit.name}.to_host", (), (*done, part))
            return
        if unit.name in self.grads:
            done.append(part)
            self._note(f"{unit.name}.grad", (), tuple(done), Kernel.POINTWISE, 3 * part.bytes)
            return
        self.grads[unit.name] = part
        self._note(f"{unit.name}.reduced", frees=tuple(done))
