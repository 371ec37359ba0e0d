"""One rank of a program: what it keeps of the model, and its micro-steps, from those of a single device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from oomph.config.schema import TrainConfig
from oomph.step import zero
from oomph.step.models.nanochat import is_table
from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase, Section
from oomph.step.parameters import Parameter, trained
from oomph.step.precision import precision
from oomph.step.sharding import deepspeed, flat_units
from oomph.step.sharding import groups as shards
from oomph.step.sharding.buckets import Reducer, arrival
from oomph.step.sharding.flat_units import FlatMicroSteps, flat_policy
from oomph.step.sharding.fully_shard import ShardedMicroSteps, policy
from oomph.step.tensor.layout import ITEM_BYTES

if TYPE_CHECKING:
    from oomph.step.loop import MicroStep

NANOCHAT_SLICED = 1024  # nanochat slices tensors with at least this many elements among its ranks
MOST_SHOWN = 3  # micro-steps written out: the first, one in between, the last


class Rank:
    """A single device: nothing is shared."""

    weight_bytes: int | None = None  # of one element that the optimizer updates; None: as in the config
    frees_grads_in_forward = False  # whether gradients live until the next forward begins

    def __init__(self, config: TrainConfig, cuda: bool) -> None:
        self.config, self.cuda = config, cuda
        self.resident: list[Buffer] = []  # buffers besides the model's and the optimizer's

    @property
    def model(self) -> TrainConfig:
        """The config whose forward and backward this rank runs."""
        return self.config

    def kept(self, whole: list[Buffer]) -> list[Buffer]:
        """What the rank keeps of the model's parameters and buffers."""
        return whole

    def updated(self) -> Sequence[Parameter]:
        """The parameters that the rank's optimizer updates."""
        return trained(self.config)

    def micro_steps(self, pattern: MicroStep, count: int, first: bool) -> tuple[list[tuple[Op, ...]], list[Buffer]]:
        """The micro-steps written out for `count` of them, and the gradients for the optimizer.

        `first`: they are the run's first.
        """
        runs = pattern.repeated(min(count, MOST_SHOWN))
        return runs, self.synced(runs, pattern.grads, first, [pattern.grads])

    def synced(
        self, runs: list[tuple[Op, ...]], grads: Mapping[str, Buffer], first: bool, made: Sequence[Mapping[str, Buffer]]
    ) -> list[Buffer]:
        """The gradients for the optimizer, reduced in the last of these micro-steps if the rank reduces any.

        `made` are the gradients that the first and the last micro-step make.
        """
        del runs, first, made
        return list(grads.values())

    def collected(
        self, made: Sequence[tuple[Sequence[Op], Mapping[str, Buffer]]], first: bool
    ) -> tuple[list[tuple[Op, ...]], list[Buffer]]:
        """Micro-steps that each make their own gradients: later ones are added to the first at the end."""
        kept = made[0][1]
        runs = [tuple(made[0][0])]
        runs += [(*ops, *(_added(name, buffer) for name, buffer in grads.items())) for ops, grads in made[1:]]
        return runs, self.synced(runs, kept, first, [kept, made[-1][1]])

    def sections(self, runs: Sequence[tuple[Op, ...]], count: int) -> list[Section]:
        """The written-out micro-steps, named: the first, the second, the others."""
        found = [Section(f"micro-step {index}", ops) for index, ops in enumerate(runs, 1)]
        if count > MOST_SHOWN:
            found[-1] = Section(f"micro-steps 3 to {count}", runs[-1], count - 2)
        return found

    def evaluation(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        """The operations of an evaluation batch."""
        return tuple(ops)

    def after_update(self) -> tuple[Op, ...]:
        """The operations after the optimizer's step."""
        return ()


def _added(name: str, buffer: Buffer) -> Op:
    """A later micro-step's AccumulateGrad: added in place, then freed."""
    return Op(f"{name}.grad", Phase.BACKWARD, (), (buffer,), Kernel.POINTWISE, bytes_moved=3 * buffer.bytes)


class Shared(Rank):
    """One of several ranks: the last micro-step differs from those before it."""

    def sections(self, runs: Sequence[tuple[Op, ...]], count: int) -> list[Section]:
        """The first, those in between, the last."""
        found = [Section(f"micro-step {index}", ops) for index, ops in enumerate(runs, 1)]
        if count > MOST_SHOWN:
            found[1] = Section(f"micro-steps 2 to {count - 1}", runs[1], count - 2)
            found[2] = Section(f"micro-step {count}", runs[2])
        return found


class DataParallel(Shared):
    """DistributedDataParallel: the whole model on every rank, gradients reduced in the last micro-step."""

    def synced(
        self, runs: list[tuple[Op, ...]], grads: Mapping[str, Buffer], first: bool, made: Sequence[Mapping[str, Buffer]]
    ) -> list[Buffer]:
        """The gradients, which live beside their buckets or become views of them."""
        views = self.config.gradient_as_bucket_view
        reducer = Reducer(arrival(runs[0], made[0]), self.config.world_size, first, views)
        runs[-1] = reducer.synced(runs[-1], grads, made[-1])
        self.resident = reducer.resident
        return [] if views else list(grads.values())


class SummedAtTheEnd(Shared):
    """`oomph train` shared by DDP: no buckets; gradients are summed in place once a step, after all micro-steps."""

    def synced(
        self, runs: list[tuple[Op, ...]], grads: Mapping[str, Buffer], first: bool, made: Sequence[Mapping[str, Buffer]]
    ) -> list[Buffer]:
        """The gradients, summed after backward, with nothing overlapped."""
        del first, made
        sizes = [(f"{name}.sum", (self.config.world_size, buffer.bytes)) for name, buffer in grads.items()]
        summed = [Op(name, Phase.BACKWARD, kernel=Kernel.ALL_REDUCE, shape=shape) for name, shape in sizes]
        runs[-1] = (*runs[-1], *summed, *(Op(name, Phase.BACKWARD, kernel=Kernel.WAIT) for name, _ in sizes))
        return list(grads.values())


class ShardedOptimizer(DataParallel):
    """ZeroRedundancyOptimizer around DistributedDataParallel: each rank updates some parameters and broadcasts them.

    torch/distributed/optim/zero_redundancy_optimizer.py, `_partition_parameters`: the largest first, each to the
    least loaded rank.
    """

    def _partition(self) -> list[list[Parameter]]:
        ranks: list[list[Parameter]] = [[] for _ in range(self.config.world_size)]
        sizes = [0] * len(ranks)
        for parameter in sorted(trained(self.config), key=lambda each: -each.numel):
            least = sizes.index(min(sizes))
            ranks[least].append(parameter)
            sizes[least] += parameter.numel
        return ranks

    def updated(self) -> Sequence[Parameter]:
        """The parameters of the rank that has most."""
        most = max(self._partition(), key=lambda rank: sum(parameter.numel for parameter in rank))
        return [parameter for parameter in trained(self.config) if parameter in most]

    def after_update(self) -> tuple[Op, ...]:
        """Every rank broadcasts the parameters it has updated."""
        item = 2 if self.config.dtype != "float32" and not self.config.autocast else 4
        size = item * sum(parameter.numel for parameter in trained(self.config))
        shape = (self.config.world_size, size)
        return (
            Op("zero.broadcast", Phase.OPTIMIZER, kernel=Kernel.ALL_GATHER, shape=shape),
            Op("zero.broadcast", Phase.OPTIMIZER, kernel=Kernel.WAIT),
        )


class NanochatRank(Shared):
    """nanochat's DistMuonAdamW (github.com/karpathy/nanochat at 92d63d4, nanochat/optim.py): no DDP, no buckets.

    After the last micro-step gradients are reduced to the rank that updates them, and the updated weights gathered.
    Each rank updates its share of every stack of matrices, and a slice of the rows of every other tensor; small tensors
    whole. Temporaries of the reduction are not counted.
    """

    def updated(self) -> Sequence[Parameter]:
        """The rank's share of every stack, and of the rows of the rest."""
        ranks, result = self.config.world_size, list[Parameter]()
        taken: dict[tuple[int, ...], int] = {}
        everything = trained(self.config)
        totals = Counter(each.shape for each in everything if _is_stacked(each))
        for each in everything:
            if not _is_stacked(each):
                rows = each.numel >= NANOCHAT_SLICED and each.shape[0] % ranks == 0
                shape = shards.first_part(each.shape, ranks) if rows else each.shape
                result.append(Parameter(each.name, shape, each.decayed))
            elif taken.setdefault(each.shape, 0) < -(-totals[each.shape] // ranks):
                taken[each.shape] += 1
                result.append(each)
        return result

    def after_update(self) -> tuple[Op, ...]:
        """The reduction and the gathering, none of it overlapped: they are part of the optimizer's step."""
        size = 4 * sum(parameter.numel for parameter in trained(self.config))
        shape = (self.config.world_size, size)
        kinds = (("nanochat.reduce", Kernel.REDUCE_SCATTER), ("nanochat.gather", Kernel.ALL_GATHER))
        found = [(Op(name, Phase.OPTIMIZER, kernel=kernel, shape=shape), name) for name, kernel in kinds]
        return tuple([each for op, name in found for each in (op, Op(name, Phase.OPTIMIZER, kernel=Kernel.WAIT))])


def _is_stacked(parameter: Parameter) -> bool:
    return parameter.block is not None and len(parameter.shape) == 2 and not is_table(parameter.name)


class FullySharded(Shared):
    """FSDP2: a part of every parameter, gathered block by block."""

    def __init__(self, config: TrainConfig, cuda: bool) -> None:
        super().__init__(config, cuda)
        self.groups = shards.groups(config, cuda)
        self.policy = policy(config, self.groups)
        self.weight_bytes = ITEM_BYTES[self.policy.kept_dtype]

    @property
    def model(self) -> TrainConfig:
        """The config without autocast: the mixed-precision policy casts what is gathered."""
        return shards.computing(self.config)

    def kept(self, whole: list[Buffer]) -> list[Buffer]:
        """The rank's parts, unless they are on the host."""
        found = shards.resident(self.config, self.cuda, self.groups, whole)
        return (
            found if self.config.cpu_offload == "off" else [each for each in found if each.kind is not Kind.PARAMETERS]
        )

    def updated(self) -> Sequence[Parameter]:
        """The rank's parts of the trained parameters; none if the host updates them."""
        return shards.trained_parts(self.config, self.groups) if self.config.cpu_offload == "off" else ()

    def micro_steps(self, pattern: MicroStep, count: int, first: bool) -> tuple[list[tuple[Op, ...]], list[Buffer]]:
        """Micro-steps that gather, and reduce their gradients or keep them whole for the last one to reduce."""
        shown = min(count, MOST_SHOWN)
        if not self.policy.adds_in_place:
            return self.collected(list(pattern.renewed(shown)), first)
        adding = pattern.repeated(shown)
        return self.collected([(adding[0], pattern.grads), *((ops, {}) for ops in adding[1:])], first)

    def collected(
        self, made: Sequence[tuple[Sequence[Op], Mapping[str, Buffer]]], first: bool
    ) -> tuple[list[tuple[Op, ...]], list[Buffer]]:
        """The same for micro-steps that each make their own gradients."""
        del first
        state = ShardedMicroSteps(self.groups, self.policy, self.cuda)
        last = len(made) - 1
        runs = [state.run(ops, grads, self.policy.each or at == last) for at, (ops, grads) in enumerate(made)]
        return runs, list(state.grads.values())

    def evaluation(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        """The evaluation with gathering and no reduction."""
        return ShardedMicroSteps(self.groups, self.policy, self.cuda).run(ops, {}, reduces=False)


class FlatSharded(Shared):
    """FSDP1: a part of each unit's flat parameter, gathered unit by unit."""

    frees_grads_in_forward = True

    def __init__(self, config: TrainConfig, cuda: bool) -> None:
        super().__init__(config, cuda)
        self.units = flat_units.units(config, cuda)
        self.policy = flat_policy(config)
        kept = next((unit.kept for unit in self.units if unit.trained), "float32")
        self.weight_bytes = ITEM_BYTES[kept]

    @property
    def model(self) -> TrainConfig:
        """The config whose parameters arrive in the dtype of the arithmetic."""
        return shards.computing(self.config)

    def kept(self, whole: list[Buffer]) -> list[Buffer]:
        """The rank's parts, unless they are on the host."""
        found = flat_units.resident(self.config, self.cuda, self.units, whole)
        return found if self.config.cpu_offload == "off" else found[len(self.units) :]

    def updated(self) -> Sequence[Parameter]:
        """The rank's parts of the trained parameters; none if the host updates them."""
        if self.config.cpu_offload != "off":
            return ()
        return [part for unit in self.units if unit.trained for part in unit.updated()]

    def micro_steps(self, pattern: MicroStep, count: int, first: bool) -> tuple[list[tuple[Op, ...]], list[Buffer]]:
        """Micro-steps that gather, and reduce their gradients or add them to flat ones for the last one to reduce."""
        return self.collected(list(pattern.renewed(min(count, MOST_SHOWN))), first)

    def collected(
        self, made: Sequence[tuple[Sequence[Op], Mapping[str, Buffer]]], first: bool
    ) -> tuple[list[tuple[Op, ...]], list[Buffer]]:
        """The same for micro-steps that each make their own gradients."""
        del first
        state = FlatMicroSteps(self.units, self.policy, self.cuda)
        last = len(made) - 1
        runs = [state.run(ops, grads, self.policy.each or at == last) for at, (ops, grads) in enumerate(made)]
        return runs, list(state.grads.values())

    def evaluation(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        """The evaluation with gathering and no reduction."""
        return FlatMicroSteps(self.units, self.policy, self.cuda).run(ops, {}, reduces=False)


class ZeroTwo(Shared):
    """DeepSpeed's ZeRO-2: the whole model, and a part of the gradients and of the optimizer's state."""

    def __init__(self, config: TrainConfig, cuda: bool) -> None:
        super().__init__(config, cuda)
        self.item_bytes = precision(config, cuda).weight_bytes
        self.resident = zero.offload_buffer(config, self.item_bytes)

    def updated(self) -> Sequence[Parameter]:
        """The rank's part of each group."""
        return zero.share(self.config).updated

    def after_update(self) -> tuple[Op, ...]:
        """Every rank broadcasts the parameters it has updated."""
        return deepspeed.gathering(self.config, self.cuda) if self.config.world_size > 1 else ()


class ZeroOne(ZeroTwo):
    """DeepSpeed's ZeRO-1: gradients are whole until the last micro-step reduces them."""

    def synced(
        self, runs: list[tuple[Op, ...]], grads: Mapping[str, Buffer], first: bool, made: Sequence[Mapping[str, Buffer]]
    ) -> list[Buffer]:
        """The rank's own gradients; buckets exist from the first backward on."""
        del first, made
        reduction = zero.Reduction(self.config, grads, self.item_bytes)
        runs[0] = reduction.begun(runs[0])
        runs[-1] = reduction.run(runs[-1], begins=False) if self.config.overlap_comm else reduction.after(runs[-1])
        return [] if reduction.total is None else [reduction.total]


class ZeroThree(Shared):
    """DeepSpeed's ZeRO-3: a part of every parameter, gathered module by module."""

    def __init__(self, config: TrainConfig, cuda: bool) -> None:
        super().__init__(config, cuda)
        self.gathered, self.small = (deepspeed.modules(config, cuda, persistent) for persistent in (False, True))
        item = precision(config, cuda).weight_bytes
        bucket = Buffer("zero.bucket", config.reduce_bucket_size * item, Kind.COMMUNICATION)
        whole = [Buffer(f"{unit.name}.gathered", unit.gathered_bytes, Kind.GATHERED, unit.block) for unit in self.small]
        self.resident = [bucket, *whole]
        if config.cpu_offload == "off":
            own = sum(each.numel for each in self.updated())
            self.resident.append(Buffer("zero.gradients", own * item, Kind.GRADIENTS))

    def kept(self, whole: list[Buffer]) -> list[Buffer]:
        """The rank's part of every parameter, unless it is on the host."""
        units = (*self.gathered, *self.small)
        found = flat_units.resident(self.config, self.cuda, units, whole)
        return found[len(units) :] if self.config.cpu_offload == "all" else found

    def updated(self) -> Sequence[Parameter]:
        """The rank's part of every trained parameter."""
        return deepspeed.own_parts((*self.gathered, *self.small))

    def micro_steps(self, pattern: MicroStep, count: int, first: bool) -> tuple[list[tuple[Op, ...]], list[Buffer]]:
        """Micro-steps that reduce their gradients into a permanent buffer; in the run's first nothing is prefetched."""
        state = deepspeed.ZeroThreeMicroSteps(self.config, self.gathered, self.small, self.cuda)
        shown = list(pattern.renewed(min(count, MOST_SHOWN)))
        begun = [state.run(*shown.pop(0), reduces=True)] if first else []
        return [*begun, *(state.traced(ops, grads) for ops, grads in shown)], []

    def evaluation(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        """The evaluation with gathering and no reduction."""
        state = deepspeed.ZeroThreeMicroSteps(self.config, self.gathered, self.small, self.cuda)
        return state.run(ops, {}, reduces=False)

    def after_update(self) -> tuple[Op, ...]:
        """Small parameters are gathered anew."""
        return deepspeed.regathering(self.config, self.cuda) if self.config.world_size > 1 else ()


def rank_of(config: TrainConfig, cuda: bool) -> Rank:
    """One rank of a settled config's program."""
    if config.deepspeed == "zero3":
        return ZeroThree(config, cuda)
    if config.deepspeed != "off":
        return ZeroOne(config, cuda) if config.deepspeed == "zero1" else ZeroTwo(config, cuda)
    if config.world_size == 1 or config.parallel in (None, "none"):
        return Rank(config, cuda)
    if config.trainer == "nanochat":
        return NanochatRank(config, cuda)
    if config.parallel == "fsdp1":
        return FlatSharded(config, cuda)
    if shards.is_sharded(config):
        return FullySharded(config, cuda)
    if config.parallel == "zero1":
        return ShardedOptimizer(config, cuda)
    return SummedAtTheEnd(config, cuda) if config.trainer == "oomph" else DataParallel(config, cuda)


def bucket_buffers(config: TrainConfig, found: Iterable[Parameter]) -> tuple[Buffer, ...]:
    """DistributedDataParallel's buckets for a model whose gradients arrive in the reverse order of its parameters."""
    if config.world_size == 1 or config.parallel == "none":
        return ()
    item = 2 if config.dtype != "float32" and not config.autocast else 4
    order = [(parameter.name, parameter.numel * item) for parameter in reversed(list(found))]
    return tuple([Buffer("ddp.bucket", each.bytes, Kind.COMMUNICATION) for each in Reducer(order, 1, False, False).resident])  # fmt: skip  # noqa: E501
