"""DeepSpeed's ZeRO-1 and ZeRO-2 (deepspeed/runtime/zero/stage_1_and_2.py, read in 0.19.6), with contiguous gradients.

Everything runs in the 16-bit dtype, without autocast. The trained weights of a group are views of one flat tensor, of
which each rank updates an equal part: it holds that part in float32, and its state, from before the first step.

    ZeRO-2    in the backward of every micro-step each gradient is copied into a bucket and freed. A full bucket is
              all-reduced, and gradients of the rank's part are copied into one buffer, to which those of later
              micro-steps are added. Parameters at the ends of a part are in that buffer whole.
    ZeRO-1    gradients stay whole until the last micro-step, and then go through the buckets: after its backward, or,
              with overlap_comm, in it.

All-reduced is a flat copy of the bucket if it has gradients of more than one rank's part. Between backward and the
update three copies exist for a moment: the gradients, a flat copy, and that in float32. With cpu_offload the float32
weights, their gradients and their state are on the host, and a buffer of the largest gradient goes between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from oomph.config.schema import TrainConfig
from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase
from oomph.step.optimizer import Optimizer
from oomph.step.parameters import Parameter, trained
from oomph.step.tensor.tensor import Storage

GRADIENTS = "zero.gradients"
SUB_GROUP = 1_000_000_000  # elements: stage 3's sub_group_size
ALIGNMENT = 2  # elements: each rank's part of a flat group begins at a multiple of it (nccl_start_alignment_factor)
CHECK_BYTES = 11  # per element, while it is searched for inf and NaN: in float32 twice, and three masks
NORM_BYTES = 8  # a norm is computed in float64


class RankPart(msgspec.Struct, frozen=True):
    """One rank's part of the trained parameters."""

    updated: tuple[Parameter, ...]  # its elements of each
    inside: dict[str, int]  # parameters with elements in it, and how many they have in all
    ranks: dict[str, tuple[int, ...]]  # of every parameter: the ranks with elements of it


def share(config: TrainConfig) -> RankPart:
    """The part of the rank that keeps most gradients. Groups are cut into equal parts, across parameters."""
    everything, world = trained(config), config.world_size
    ranks: dict[str, tuple[int, ...]] = {}
    held, spans = [0] * world, list[tuple[Parameter, int, int]]()  # a parameter, its offset, its group's part
    for decayed in (True, False):
        group, at = [each for each in everything if each.decayed is decayed], 0
        size = -(-sum(each.numel for each in group) // (ALIGNMENT * world)) * ALIGNMENT
        for each in group:
            ranks[each.name] = tuple(range(at // size, (at + each.numel - 1) // size + 1))
            for rank in ranks[each.name]:
                held[rank] += each.numel
            spans.append((each, at, size))
            at += each.numel
    most = held.index(max(held))
    inside = {each.name: each.numel for each, _, _ in spans if most in ranks[each.name]}
    found: list[Parameter] = []
    for each, at, size in spans:
        if each.name in inside:
            count = min(at + each.numel, (most + 1) * size) - max(at, most * size)
            found.append(each if count == each.numel else Parameter(each.name, (count,), each.decayed))
    return RankPart(tuple(found), inside, ranks)


def bucketed(
    ops: Sequence[Op], grads: Mapping[str, Buffer], config: TrainConfig, item_bytes: int
) -> tuple[tuple[Op, ...], tuple[Op, ...], dict[str, Buffer]]:
    """The operations of ZeRO-2's first micro-step and of a later one, and what it keeps of the gradients."""
    first = Reduction(config, grads, item_bytes)
    later = Reduction(config, grads, item_bytes)
    begun, again = first.run(ops), later.run(ops)
    if first.total is None or later.total is None:
        return begun, again, {}
    added = Op("zero.add", Phase.BACKWARD, (), (later.total,), Kernel.POINTWISE, bytes_moved=3 * first.total.bytes)
    return begun, (*again, added), {GRADIENTS: first.total}


def offload_buffer(config: TrainConfig, item_bytes: int) -> list[Buffer]:
    """With cpu_offload, the buffer through which gradients are added to those on the host: as large as the largest."""
    if config.cpu_offload == "off":
        return []
    size = item_bytes * max(each.numel for each in trained(config))
    return [Buffer("zero.offload", size, Kind.COMMUNICATION)]


class Reduction:
    """Gradients of a micro-step that go through buckets."""

    def __init__(self, config: TrainConfig, grads: Mapping[str, Buffer], item_bytes: int) -> None:
        self.size, self.item_bytes = config.reduce_bucket_size, item_bytes
        buckets = 2 if config.overlap_comm else 1
        self.buckets = [Buffer("zero.bucket", self.size * item_bytes, Kind.GRADIENTS) for _ in range(buckets)]
        self.grads, self.share = grads, share(config)
        kept_bytes = item_bytes * sum(self.share.inside.values())
        is_kept = config.cpu_offload == "off"
        self.total = Buffer(GRADIENTS, kept_bytes, Kind.GRADIENTS) if is_kept else None  # the rank's own gradients
        self.stays = config.deepspeed == "zero1"  # another rank's gradients are let go at the end alone
        self.names: list[str] = []  # parameters in the bucket
        self.filled = 0  # elements in the bucket
        self.large: list[Buffer] = []  # a gradient that is larger than a bucket, waiting to be reduced
        self.left: list[Buffer] = []  # gradients to be let go at the end
        self.reduced = False
        self.ranks, self.overlaps = config.world_size, config.overlap_comm
        self.waiting: tuple[str, tuple[Buffer, ...]] | None = None  # the last collective, and its copy of the bucket
        self.ops: list[Op] = []

    def run(self, ops: Sequence[Op], begins: bool = True) -> tuple[Op, ...]:
        """The micro-step, its gradients reduced while others are computed; `begins`: buckets are made in it."""
        self.ops = []
        ends = {op.name: op for op in ops if op.name.endswith(".grad")}  # the last operation of each gradient
        for op in self.begun(ops) if begins else ops:
            self.ops.append(op)
            name = op.name.removesuffix(".grad")
            if ends.get(op.name) is op and name in self.grads:
                self._take(name)
        return self._ended()

    def after(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        """The micro-step, its gradients reduced after all have been computed, group by group."""
        self.ops = list(ops)
        for name in self.share.ranks:
            if name in self.grads:
                self._take(name)
        return self._ended()

    def begun(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        """The micro-step, with buckets made as its backward begins."""
        at = next(index for index, op in enumerate(ops) if op.phase is Phase.BACKWARD)
        return (*ops[:at], Op("zero.bucket", Phase.BACKWARD, tuple(self.buckets)), *ops[at:])

    def _ended(self) -> tuple[Op, ...]:
        self._reduce()
        self._wait()
        self.ops.append(Op("zero.released", Phase.BACKWARD, frees=(*self.buckets, *self.left)))
        return tuple(self.ops)

    def _take(self, name: str) -> None:
        """Put a gradient into the bucket, which is emptied first if the gradient does not fit."""
        made = self.grads[name]
        count = made.bytes // self.item_bytes
        if self.filled + count > self.size:
            self._reduce()
        if count > self.size:
            self.large = [made]
        else:
            self._copy(f"{name}.bucketed", made.bytes, frees=(made,))
        self.filled += count
        self.names.append(name)

    def _reduce(self) -> None:
        """All-reduce the bucket, and keep the rank's own gradients."""
        if not self.filled:
            return
        if self.ranks > 1:
            self._exchange(self.filled * self.item_bytes)
        own = [name for name in self.names if name in self.share.inside]
        frees = tuple(self.large)
        if frees and self.stays and not own:
            self.left += frees
            frees = ()
        if self.total is None:
            self._send(own, frees)
        else:
            allocates = () if self.reduced else (self.total,)
            self._copy("zero.reduce", sum(self.grads[name].bytes for name in own), allocates, frees)
        self.reduced, self.filled, self.large, self.names = True, 0, [], []

    def _send(self, names: Sequence[str], frees: tuple[Buffer, ...]) -> None:
        """Check the rank's own gradients, and copy them in float32 to the host."""
        for name in names:
            size = CHECK_BYTES * (self.grads[name].bytes // self.item_bytes)
            check = Buffer("zero.check", size, Kind.TEMPORARY)
            self._copy(f"{name}.offloaded", size, (check,), (check,))
        self.ops.append(Op("zero.reduced", Phase.BACKWARD, frees=frees))

    def _exchange(self, size_bytes: int) -> None:
        """All-reduce the bucket among the ranks; with overlap_comm, while the other one fills."""
        name = f"zero.all_reduce.{len(self.ops)}"
        self._wait()
        receivers = {self.share.ranks[each] for each in self.names}
        one = len(receivers) == 1 and len(receivers.pop()) == 1
        flat = () if one else (Buffer("zero.flat_bucket", size_bytes, Kind.COMMUNICATION),)
        shape = (self.ranks, size_bytes)
        self.ops.append(Op(name, Phase.BACKWARD, flat, kernel=Kernel.ALL_REDUCE, shape=shape))
        self.waiting = name, flat
        if not self.overlaps:
            self._wait()

    def _wait(self) -> None:
        if self.waiting is not None:
            name, flat = self.waiting
            self.ops.append(Op(name, Phase.BACKWARD, frees=flat, kernel=Kernel.WAIT))
        self.waiting = None

    def _copy(
        self, name: str, size_bytes: int, allocates: tuple[Buffer, ...] = (), frees: tuple[Buffer, ...] = ()
    ) -> None:
        self.ops.append(Op(name, Phase.BACKWARD, allocates, frees, Kernel.POINTWISE, bytes_moved=2 * size_bytes))


class ZeroOptimizer(Optimizer):
    """AdamW on flat float32 copies of the trained weights, one per group: DeepSpeed's fused kernel."""

    starts_with_state = True

    def _split(self) -> None:
        """Split the parameters; ZeRO-3 updates its groups in parts of `SUB_GROUP` elements."""
        super()._split()
        if self.config.deepspeed == "zero3":
            self.groups = [part for group in self.groups for part in _parts(group, SUB_GROUP)]

    def create_state(self) -> list[Storage]:
        """The float32 weights and both moments, by group; none if they are on the host."""
        return [
            self.ledger.hold(f"zero.{part}", 4 * _numel(group), Kind.OPTIMIZER)
            for group in self.groups
            if group and self.config.cpu_offload == "off"
            for part in ("master", "exp_avg", "exp_avg_sq")
        ]

    def step(self, first: bool) -> None:  # noqa: ARG002 - its state exists already
        """Check the gradients and compute their norms one after another, then update the groups in turn."""
        ledger = self.ledger
        item, is_offloaded = self.weight_bytes, self.config.cpu_offload != "off"
        ledger.phase = Phase.CLIP
        for parameter in () if is_offloaded else self.everything:
            count = parameter.numel
            ledger.make("zero.check", CHECK_BYTES * count, Kind.TEMPORARY, moved=2 * CHECK_BYTES * count)
            ledger.make("zero.norm", NORM_BYTES * count, Kind.TEMPORARY, Kernel.REDUCTION, 18 * count)
        ledger.phase = Phase.OPTIMIZER
        groups = [_numel(group) for group in self.groups if group]
        for index, count in enumerate(groups):
            if not is_offloaded:
                self._update_flat(count, last=index == len(groups) - 1)
            ledger.note("zero.weights", (), Kernel.POINTWISE, (4 + item) * count)

    def _update_flat(self, count: int, last: bool) -> None:
        ledger, item = self.ledger, self.weight_bytes
        flat = ledger.make("zero.flat", item * count, Kind.TEMPORARY, moved=2 * item * count)
        wide = ledger.make("zero.flat_float32", 4 * count, Kind.TEMPORARY, moved=(item + 4) * count)
        del flat
        if last:
            self.grads.clear()
        ledger.note("zero.clip", (), Kernel.POINTWISE, 8 * count)
        ledger.note("adamw", (), Kernel.OPTIMIZER, 28 * count)
        del wide


def _parts(group: Sequence[Parameter], size: int) -> list[list[Parameter]]:
    """The group in parts of at least `size` elements each, except the last."""
    found: list[list[Parameter]] = [[]]
    for each in group:
        if _numel(found[-1]) >= size:
            found.append([])
        found[-1].append(each)
    return found


def _numel(group: Sequence[Parameter]) -> int:
    return sum(parameter.numel for parameter in group)
