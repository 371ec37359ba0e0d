"""FSDP2: one rank's micro-steps, from those of a single device.

Read in torch 2.13, torch/distributed/fsdp/_fully_shard: `_fsdp_param_group.py` has the hooks and the lifetimes,
`_fsdp_collectives.py` what they allocate. Around each group of parameters:

    forward   gather: the rank's parts cast (copy-in), all parts in one flat buffer, copied out to a tensor each;
              the flat buffer is freed when the next group has been gathered. After the forward the tensors are freed.
    backward  gathered again, the flat buffer freed at once, and the next group's gathering started; then gradients
              are copied into one flat buffer and reduced; it lives until the next group's is. The root's group is
              reduced last, at the end of backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from oomph.config.schema import TrainConfig
from oomph.step.ops import Buffer, Kernel, Kind, Op
from oomph.step.sharding.groups import Group
from oomph.step.sharding.hooks import HookedMicroSteps
from oomph.step.tensor.layout import ITEM_BYTES

_REDUCES_IN_FULL = ("torchtitan", "oomph")  # gradients are summed in float32, whatever their dtype
_GATHERING, _REDUCING = 1, 2  # CUDA streams of FSDPCommContext: the copy-in's and the reduce-scatter's


class Policy(msgspec.Struct, frozen=True):
    """How a program uses fully_shard."""

    keeps: frozenset[int | None]  # groups that stay gathered between forward and backward, by block; None: the root
    reshards_over: int | None  # ranks that share a group between forward and backward; None: all, or see `keeps`
    grad_dtype: str  # of gradients as backward makes them
    reduce_dtype: str
    kept_dtype: str  # of trained parts and their gradients
    each: bool  # reduce gradients in every micro-step
    replicas: int = 1  # HSDP: copies of the model, whose gradients are reduced too
    near_replicas: int = 1  # of them, those within one machine
    loss_outside: bool = False  # the loss is computed outside the sharded model
    offloads: bool = False  # parts and their gradients are on the host (CPUOffloadPolicy)

    @property
    def adds_in_place(self) -> bool:
        """Whether backward adds directly into the gradients kept for a later micro-step."""
        return not self.each and self.grad_dtype == self.reduce_dtype


def policy(config: TrainConfig, found: Sequence[Group]) -> Policy:
    """The program's own policy, overridden by the config."""
    blocks = [group.block for group in found if group.block is not None]
    titan = config.trainer == "torchtitan"
    told = (config.reshard_after_forward or "").lower()
    keeps: set[int | None] = {None}
    if told == "false":
        keeps |= set(blocks)
    elif titan and told != "true":
        keeps |= set(blocks[-1:])  # it would be gathered again at once
    if titan:
        keeps.discard(None)  # the root always reshards
    dtypes = {shard.gathered for group in found for shard in group.trained}
    kept = {shard.kept for group in found for shard in group.trained}
    grad_dtype = dtypes.pop() if dtypes else "float32"
    return Policy(
        keeps=frozenset(keeps),
        reshards_over=int(told) if told.isdigit() else None,
        grad_dtype=grad_dtype,
        reduce_dtype=config.reduce_dtype or ("float32" if config.trainer in _REDUCES_IN_FULL else grad_dtype),
        kept_dtype=kept.pop() if kept else "float32",
        each=(config.grad_sync or ("last" if config.trainer == "hf" else "each")) == "each",
        replicas=config.world_size // found[0].ranks,
        near_replicas=max(1, config.world_size // config.nodes // found[0].ranks),
        loss_outside=titan,
        offloads=config.cpu_offload == "all",
    )


class ShardedMicroSteps(HookedMicroSteps):
    """Micro-steps of one rank, in order: gathered tensors and gradients live across their operations."""

    def __init__(self, found: Sequence[Group], how: Policy, cuda: bool) -> None:
        super().__init__([group.block for group in found if group.block is not None], cuda, how.loss_outside)
        self.groups = {group.block: group for group in found}
        self.how = how
        self.gathered: dict[int | None, tuple[Buffer, ...]] = {}
        self.part: dict[int | None, tuple[Buffer, ...]] = {}  # between forward and backward, over fewer ranks
        self.flat: dict[int | None, Buffer] = {}  # gathered, not yet copied out
        self.last_flat: Buffer | None = None  # the last one copied out in forward
        self.reducing: tuple[str, Buffer] | None = None  # the gradient buffer being reduced
        self.grads: dict[int | None, Buffer] = {}  # gradients for the optimizer
        self.whole_grads: dict[str, Buffer] = {}  # gradients kept for the last micro-step
        self.all_reduced: list[Buffer] = []
        self.all_reducing = ""  # the last all-reduce between replicas
        self.late: list[int | None] = []  # blocks waiting for a gradient that a compiled graph makes later

    # --- the hooks --------------------------------------------------------------------------------

    def _pre_forward(self, block: int | None) -> None:
        if block is None and self.ops:
            return
        self._unshard(block)
        self._wait_for_unshard(block, keeps_flat=True)

    def _post_forward(self, block: int | None) -> None:
        if block is None or block in self.how.keeps:
            return
        self._reshard_after_forward(block)

    def _leave_forward(self, block: int | None, inside: bool) -> None:
        """The last block's post-forward hook and the root's."""
        if not inside:
            return
        self._post_forward(block)
        if None not in self.how.keeps:
            self._reshard_after_forward(None)
        if self.last_flat is not None:
            self._note("root.post_forward", frees=(self.last_flat,))
            self.last_flat = None

    def _reshard_after_forward(self, block: int | None) -> None:
        over, group = self.how.reshards_over, self.groups[block]
        if over and block is not None and over < group.ranks:
            item = [group.ranks * shard.gathered_bytes // over for shard in group.shards]
            part = tuple([Buffer(f"{group.name}.part", size, Kind.GATHERED, block) for size in item])
            self._note(f"{group.name}.reshard", part, kernel=Kernel.POINTWISE, moved=2 * sum(item))
            self.part[block] = part
        self._free(block)

    def _pre_backward(self, block: int | None, following: int | None) -> None:
        self._unshard(block)
        self._wait_for_unshard(block, keeps_flat=False)
        if following is not None:
            self._unshard(following)

    def _post_backward(self, block: int | None) -> None:
        self.through.add(block)
        waiting, self.late = [*self.late, block], []
        for each in waiting:
            made = [self.made[shard.name] for shard in self.groups[each].trained if shard.name in self.made]
            if self.seen.issuperset(made):
                self._reduce_or_keep(self.groups[each])
            else:
                self.late.append(each)

    def _reduce_or_keep(self, group: Group) -> None:
        names = [shard.name for shard in group.trained]
        self._accumulate(names)
        self._free(group.block)
        if not self.reduces:
            self._keep_whole(names)
            return
        if self.reducing is not None:
            self._note(self.reducing[0], kernel=Kernel.WAIT)
            self._note(f"{self.reducing[0]}.done", frees=(self.reducing[1],))
            self.reducing = None
        if names:
            self._reduce(group, names)

    def _finish(self, current: int | None) -> None:
        """The root's callback at the end of backward."""
        if current is not None and current >= 0:
            self._post_backward(current)
        self._post_backward(None)
        if self.all_reducing:  # the last one ends last
            self._note(self.all_reducing, kernel=Kernel.WAIT)
            self.all_reducing = ""
        left: list[Buffer] = [*self.all_reduced]
        self.all_reduced = []
        if self.reducing is not None:
            self._note(self.reducing[0], kernel=Kernel.WAIT)
            left.append(self.reducing[1])
            self.reducing = None
        if left:
            self._note("root.post_backward", frees=tuple(left))

    # --- gathering --------------------------------------------------------------------------------

    def _unshard(self, block: int | None) -> None:
        """foreach_all_gather: started, not waited for."""
        group = self.groups[block]
        if block in self.gathered or block in self.flat or not group.shards:
            return
        ranks = group.ranks
        copied_in = group.copied_in_bytes
        if block in self.part and self.how.reshards_over:
            ranks = self.how.reshards_over
            copied_in = sum(buffer.bytes for buffer in self.part[block]) if copied_in else 0
        flat = Buffer(f"{group.name}.all_gather", group.flat_bytes, Kind.COMMUNICATION, block, _GATHERING)
        cast: tuple[Buffer, ...] = ()
        if copied_in:
            cast = (Buffer(f"{group.name}.cast", copied_in, Kind.COMMUNICATION, block, _GATHERING),)
        if self.how.offloads and block not in self.part:
            cast = self._from_host(group, cast)
        elif cast:
            self._note(f"{group.name}.cast", cast, kernel=Kernel.POINTWISE, moved=3 * copied_in)
        moved = 2 * group.flat_bytes // ranks
        self._note(f"{group.name}.copy_in", (flat,), kernel=Kernel.POINTWISE, moved=moved)
        self._collective(f"{group.name}.all_gather", Kernel.ALL_GATHER, ranks, flat.bytes, frees=cast)
        self.flat[block] = flat

    def _from_host(self, group: Group, cast: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        """A group's parts on the card: copied one by one and cast, or as they are if they are gathered so."""
        plain = [shard.kept_bytes for shard in group.shards if shard.kept == shard.gathered]
        if plain:
            cast = (*cast, Buffer(f"{group.name}.from_host", sum(plain), Kind.COMMUNICATION, group.block, _GATHERING))
        widest = max([shard.kept_bytes for shard in group.shards if shard.kept != shard.gathered], default=0)
        wide = (
            (Buffer(f"{group.name}.from_host", widest, Kind.COMMUNICATION, group.block, _GATHERING),) if widest else ()
        )
        self._note(f"{group.name}.from_host", (*cast, *wide), wide, Kernel.POINTWISE)
        return cast

    def _wait_for_unshard(self, block: int | None, keeps_flat: bool) -> None:
        """foreach_all_gather_copy_out."""
        group = self.groups[block]
        if block not in self.flat:
            return
        flat = self.flat.pop(block)
        if keeps_flat and self.last_flat is not None:
            self._note(f"{group.name}.next", frees=(self.last_flat,))
            self.last_flat = None
        self._note(f"{group.name}.all_gather", kernel=Kernel.WAIT)
        whole = [(shard.name, group.ranks * shard.gathered_bytes) for shard in group.shards]
        tensors = tuple([Buffer(f"{name}.gathered", size, Kind.GATHERED, block) for name, size in whole])
        frees = [*self.part.pop(block, ()), *(() if keeps_flat else (flat,))]
        self._note(f"{group.name}.copy_out", tensors, tuple(frees), Kernel.POINTWISE, 2 * flat.bytes)
        self.gathered[block] = tensors
        if keeps_flat:
            self.last_flat = flat

    def _free(self, block: int | None) -> None:
        tensors = self.gathered.pop(block, None)
        if tensors:
            self._note(f"{self.groups[block].name}.reshard", frees=tensors)

    # --- reducing ---------------------------------------------------------------------------------

    def _accumulate(self, names: Sequence[str]) -> None:
        """Add gradients to those kept for a later micro-step, if their dtype is not the reduction's."""
        for name in names:
            if name in self.whole_grads and name in self.made:
                made = self.made.pop(name)
                moved = 2 * self.whole_grads[name].bytes + made.bytes
                self._note(f"{name}.accumulated", (), (made,), Kernel.POINTWISE, moved)

    def _keep_whole(self, names: Sequence[str]) -> None:
        """Without a reduction, keep the whole model's gradients, in the reduction's dtype."""
        for name in names:
            if name not in self.made:
                continue
            made = self.made.pop(name)
            if self.how.adds_in_place:
                self.whole_grads[name] = made
                continue
            size = made.bytes // ITEM_BYTES[self.how.grad_dtype] * ITEM_BYTES[self.how.reduce_dtype]
            kept = Buffer(f"{name}.accumulated", size, Kind.GRADIENTS, made.block)
            self._note(kept.name, (kept,), (made,), Kernel.POINTWISE, made.bytes + size)
            self.whole_grads[name] = kept

    def _reduce(self, group: Group, names: Sequence[str]) -> None:
        """foreach_reduce."""
        how, name = self.how, f"{group.name}.reduce_scatter"
        grads = [(self.whole_grads if each in self.whole_grads else self.made).pop(each) for each in names]
        whole = group.trained_numel * ITEM_BYTES[how.reduce_dtype]
        flat = Buffer(name, whole, Kind.COMMUNICATION, group.block)
        moved = whole + sum(buffer.bytes for buffer in grads)
        self._note(f"{name}.copy_in", (flat,), tuple(grads), Kernel.POINTWISE, moved)
        part = whole // group.ranks
        out = Buffer(f"{group.name}.grad", part, Kind.GRADIENTS, group.block, _REDUCING)
        self._collective(name, Kernel.REDUCE_SCATTER, group.ranks, whole, (out,))
        if how.replicas > 1:
            shape = (how.replicas, part, how.near_replicas)
            self.all_reducing = f"{group.name}.all_reduce"
            self.ops.append(Op(self.all_reducing, self.phase, kernel=Kernel.ALL_REDUCE, shape=shape))
        self.reducing = (name, flat)
        if how.reduce_dtype != how.kept_dtype:
            size = part // ITEM_BYTES[how.reduce_dtype] * ITEM_BYTES[how.kept_dtype]
            cast = Buffer(f"{group.name}.grad", size, Kind.GRADIENTS, group.block, _REDUCING)
            self._note(cast.name, (cast,), () if how.replicas > 1 else (out,), Kernel.POINTWISE, part + size)
            if how.replicas > 1:  # held until the end of backward
                self.all_reduced.append(out)
            out = cast
        if how.offloads:
            self._note(f"{group.name}.to_host", (), (out,))
        elif group.block in self.grads:
            self._note(f"{group.name}.grad", (), (out,), Kernel.POINTWISE, 3 * out.bytes)
        else:
            self.grads[group.block] = out
