"""DeepSpeed's ZeRO on several devices (deepspeed/runtime/zero, read in 0.19.6), as transformers' Trainer runs it.

ZeRO-1 and ZeRO-2 are `step.zero`, on a rank's part of the flat groups.
ZeRO-3 (stage3.py, partition_parameters.py, partitioned_param_coordinator.py) keeps a part of every parameter, and
gathers a module's when it runs; small ones stay gathered. From the second step on it knows the order of modules: it
gathers those that come next ahead, several in one flat buffer, which is copied out when the first of them runs and
freed when all have. It lets parameters stay that are used again soon, as those of the last blocks are in backward.
Gradients go through a permanent bucket, and once reduced into one buffer for a rank's part of them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oomph.config.schema import TrainConfig
from oomph.step import models
from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase
from oomph.step.parameters import Parameter, parameters, trained
from oomph.step.precision import precision
from oomph.step.sharding.flat_units import GATHERING, FlatMicroSteps, FlatPolicy, Unit, UnitPart


def gathering(config: TrainConfig, cuda: bool) -> tuple[Op, ...]:
    """ZeRO-1 and 2 after the update: every rank broadcasts the weights it has updated."""
    return _gathered(config.world_size, precision(config, cuda).weight_bytes, trained(config))


def regathering(config: TrainConfig, cuda: bool) -> tuple[Op, ...]:
    """ZeRO-3 after the update: small parameters, which stay gathered, are gathered anew."""
    small = [each for each in trained(config) if is_persistent(config, each)]
    return _gathered(config.world_size, precision(config, cuda).weight_bytes, small)


def _gathered(ranks: int, item_bytes: int, found: Sequence[Parameter]) -> tuple[Op, ...]:
    name, shape = "zero.all_gather", (ranks, item_bytes * sum(parameter.numel for parameter in found))
    gather = Op(name, Phase.OPTIMIZER, kernel=Kernel.ALL_GATHER, shape=shape)
    return gather, Op(name, Phase.OPTIMIZER, kernel=Kernel.WAIT)


def is_persistent(config: TrainConfig, parameter: Parameter) -> bool:
    """Whether ZeRO-3 keeps a parameter gathered."""
    return parameter.numel <= config.stage3_param_persistence_threshold


def modules(config: TrainConfig, cuda: bool, persistent: bool) -> list[Unit]:
    """ZeRO-3's modules, each a unit of the parameters that are gathered for it, or of those that stay gathered."""
    kept = models.weights(config, precision(config, cuda))
    ranks = config.world_size
    found: dict[str, list[Parameter]] = {}
    for each in parameters(config):
        if is_persistent(config, each) is persistent:
            found.setdefault(each.name.rpartition(".")[0], []).append(each)
    result: list[Unit] = []
    for name, inside in found.items():
        at, parts = 0, list[UnitPart]()
        for each in inside:
            parts.append(UnitPart(each.name, at, each.numel, each.decayed))
            at += -(-each.numel // ranks) * ranks
        dtype = kept[inside[0].name].dtype
        result.append(Unit(name, inside[0].block, tuple(parts), at, ranks, dtype, dtype, inside[0].trained))
    return result


def own_parts(found: Sequence[Unit]) -> list[Parameter]:
    """A rank's part of every trained parameter."""
    return [
        Parameter(part.name, (-(-part.numel // unit.ranks),), part.decayed)
        for unit in found
        if unit.trained
        for part in unit.parts
    ]


@dataclass
class _Batch:
    """Modules that are gathered together (AllGatherCoalescedHandle)."""

    name: str
    flat: Buffer
    units: list[Unit]
    left: set[str]  # names of those that have not run yet
    is_copied: bool = False


class ZeroThreeMicroSteps(FlatMicroSteps):
    """Micro-steps of one rank under ZeRO-3."""

    def __init__(self, config: TrainConfig, gathered: Sequence[Unit], small: Sequence[Unit], cuda: bool) -> None:
        super().__init__(gathered, FlatPolicy(reshards=True, reduce_dtype=None, each=True), cuda)
        self.config = config
        self.order = list(range(config.n_layer))
        self.units = dict.fromkeys((None, *self.order))
        self.nested = list(gathered)
        self.first_used = {}
        self.small = list(small)
        self.ranks, self.size = config.world_size, config.reduce_bucket_size
        self.item_bytes = precision(config, cuda).weight_bytes
        self.filled = 0  # elements in the bucket
        self.batches: dict[str, _Batch] = {}  # of modules that were gathered ahead and have not run
        self.uses: list[Unit] = []  # the modules of a micro-step in order
        self.at = -1  # the use that runs
        self.ahead = 0  # the first use that was not looked at by the prefetcher

    def traced(self, ops: Sequence[Op], grads: Mapping[str, Buffer]) -> tuple[Op, ...]:
        """One device's micro-step as this rank runs it once it knows the order of modules."""
        self.uses, self.at, self.ahead = [], -1, 0
        for op in ops:
            unit = self._unit(op)
            if unit is not None and (not self.uses or self.uses[-1] is not unit):
                self.uses.append(unit)
        return self.run(ops, grads, reduces=True)

    def _unit(self, op: Op) -> Unit | None:
        return self.used.get(op.name) or self.used.get(op.name.removesuffix(".dw").removesuffix(".dx"))

    def _run(self, op: Op) -> None:
        unit = self._unit(op)
        if unit is not None and self.uses and (self.at < 0 or self.uses[self.at] is not unit):
            self.at += 1
            self._gather(unit)
            self._prefetch()
        super()._run(op)
        if unit is not None and not unit.trained and op.name.endswith(".dx"):
            self._let_go(unit)

    def _prefetch(self) -> None:
        """fetch_sub_module: start gathering the modules that come next, up to a bucket of elements."""
        available = sum(unit.numel for unit in self.nested if self._is_available(unit))
        room = self.config.stage3_max_live_parameters - available
        most, found = min(room, self.config.stage3_prefetch_bucket_size), list[Unit]()
        self.ahead = max(self.ahead, self.at + 1)
        while self.ahead < len(self.uses) and sum(unit.numel for unit in found) < most:
            unit = self.uses[self.ahead]
            self.ahead += 1
            if not self._is_available(unit) and unit not in found:
                found.append(unit)
        self._begin(found)

    def _is_available(self, unit: Unit) -> bool:
        """Whether a module's parameters are gathered, or on their way."""
        return unit.name in self.gathered or unit.name in self.batches

    def _begin(self, found: list[Unit]) -> None:
        """all_gather_coalesced: a single parameter is gathered in place, several into a flat buffer."""
        if sum(len(unit.parts) for unit in found) == 1:
            self._unshard(found[0])
        elif found:
            size = sum(unit.gathered_bytes for unit in found)
            name = f"{found[0].name}.all_gather.{len(self.ops)}"
            flat = Buffer(name, size, Kind.COMMUNICATION, found[0].block, GATHERING)
            self._collective(name, Kernel.ALL_GATHER, self.ranks, size, (flat,))
            batch = _Batch(name, flat, found, {unit.name for unit in found})
            self.batches |= dict.fromkeys(batch.left, batch)

    def _gather(self, unit: Unit | None) -> None:
        """Wait for a module's parameters, gathering them now unless they were begun ahead."""
        if unit is not None and not self._is_available(unit):
            self._begin([unit])
        batch = self.batches.pop(unit.name, None) if unit is not None else None
        if unit is None or batch is None:
            super()._gather(unit)
            return
        if not batch.is_copied:
            batch.is_copied = True
            whole = [
                Buffer(f"{each.name}.gathered", each.gathered_bytes, Kind.GATHERED, each.block) for each in batch.units
            ]
            self.gathered |= {each.name: buffer for each, buffer in zip(batch.units, whole, strict=True)}
            self._note(batch.name, kernel=Kernel.WAIT)
            self._note(f"{batch.name}.copy_out", tuple(whole), (), Kernel.POINTWISE, 2 * batch.flat.bytes)
        batch.left.discard(unit.name)
        if not batch.left:
            self._note(f"{batch.name}.done", frees=(batch.flat,))

    def _let_go(self, unit: Unit) -> None:
        """Free a module's parameters, unless they are used again within the reuse distance, or were to be fetched."""
        if not self._is_used_soon(unit):
            super()._let_go(unit)

    def _is_used_soon(self, unit: Unit) -> bool:
        if any(each is unit for each in self.uses[self.at + 1 : self.ahead]):
            return True
        passed = 0
        for each in self.uses[self.at + 1 :]:
            if passed >= self.config.stage3_max_reuse_distance:
                return False
            if each is unit:
                return True
            passed += each.numel
        return False

    def _reduce(self, unit: Unit) -> None:
        """Put a module's gradients into the bucket, which is reduced first if one does not fit."""
        made = [self.made.pop(part.name) for part in unit.parts if part.name in self.made]
        self._let_go(unit)
        for each in made:
            count = each.bytes // self.item_bytes
            if self.filled + count > self.size:
                self._reduce_bucket()
            if count > self.size:
                self._scatter(each.bytes, (each,))
                continue
            self._note(f"{unit.name}.bucketed", (), (each,), Kernel.POINTWISE, 2 * each.bytes)
            self.filled += count

    def _reduce_bucket(self) -> None:
        if self.filled:
            self._scatter(self.filled * self.item_bytes, ())
        self.filled = 0

    def _scatter(self, size_bytes: int, frees: tuple[Buffer, ...]) -> None:
        """reduce_scatter_coalesced: all ranks' parts in one copy, reduced and added to the rank's own."""
        copy = Buffer("zero.scattered", size_bytes, Kind.COMMUNICATION)
        name = f"zero.reduce_scatter.{len(self.ops)}"
        self._collective(name, Kernel.REDUCE_SCATTER, self.ranks, size_bytes, (copy,), (copy, *frees))
        self.reduced.append(name)

    def _finish(self, current: int | None) -> None:
        for unit in self.small:
            self._reduce(unit)
        self.uses = []  # whatever is still gathered is let go
        super()._finish(current)
        self._reduce_bucket()
        for name in (*(f"{name}.all_gather" for name in self.begun), *self.reduced):
            self._note(name, kernel=Kernel.WAIT)
        self.reduced, self.begun = [], set()
