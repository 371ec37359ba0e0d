"""A model's parameters as FSDP keeps them: which are gathered together, and how much of each a rank has.

`fully_shard` on each block and then on the whole model makes one group per block, and a root group of the
rest: embeddings, the last norm, the head (torch/distributed/fsdp/_fully_shard/_fully_shard.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import msgspec

from oomph.config.programs import ON_THE_TRAINER
from oomph.config.schema import TrainConfig
from oomph.step import models
from oomph.step.ops import Buffer, Kind
from oomph.step.parameters import Parameter, parameters
from oomph.step.precision import precision
from oomph.step.tensor.layout import HALVES, ITEM_BYTES, Shape
from oomph.step.tensor.quantized import stored
from oomph.step.tensor.tape import Weight


def shard_ranks(config: TrainConfig) -> int:
    """The number of ranks that share one copy of the model."""
    if config.parallel == "hsdp" or (config.parallel == "fsdp1" and config.shard_size):
        return min(config.world_size, config.shard_size or config.world_size // config.nodes)
    return config.world_size


def is_sharded(config: TrainConfig) -> bool:
    """Whether each rank keeps only a part of the parameters."""
    return config.parallel in ("fsdp", "hsdp", "fsdp1") and config.world_size > 1


def computing(config: TrainConfig) -> TrainConfig:
    """The config of the model under FSDP's mixed-precision policy: parameters arrive in the dtype of the arithmetic."""
    if config.dtype not in HALVES or not config.autocast:
        return config
    if config.method == "full":
        return msgspec.structs.replace(config, autocast=False)
    autocast = config.trainer in ON_THE_TRAINER  # accelerate's autocast is on as well
    if autocast and config.parallel == "fsdp1":  # peft inspects adapters before they are gathered: still in float32
        return msgspec.structs.replace(config, base_dtype=config.dtype)
    return msgspec.structs.replace(config, autocast=autocast, adapter_dtype=config.dtype, base_dtype=config.dtype)


class Shard(NamedTuple):
    """One parameter, split along its first dimension over the ranks, with the last part padded."""

    name: str
    shape: Shape  # of one rank's padded part
    kept: str  # dtype in which the rank keeps it
    gathered: str  # dtype in which it is gathered
    trained: bool

    @property
    def numel(self) -> int:
        """Elements in one rank's part."""
        return prod(self.shape)

    @property
    def kept_bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.kept]

    @property
    def gathered_bytes(self) -> int:
        """Bytes of one rank's part when gathered."""
        return self.numel * ITEM_BYTES[self.gathered]


class Group(msgspec.Struct, frozen=True, eq=False):
    """Parameters that are gathered together."""

    block: int | None  # None: the root
    shards: tuple[Shard, ...]
    ranks: int

    @property
    def name(self) -> str:
        return "root" if self.block is None else f"block.{self.block}"

    @property
    def flat_bytes(self) -> int:
        """Bytes of the buffer that all ranks' parts are gathered into."""
        return self.ranks * sum(shard.gathered_bytes for shard in self.shards)

    @property
    def copied_in_bytes(self) -> int:
        """Bytes of a rank's parts that are cast before they are gathered."""
        return sum(shard.gathered_bytes for shard in self.shards if shard.kept != shard.gathered)

    @property
    def trained(self) -> tuple[Shard, ...]:
        return tuple([shard for shard in self.shards if shard.trained])

    @property
    def trained_numel(self) -> int:
        """Trained elements in all ranks' parts, padding included."""
        return self.ranks * sum(shard.numel for shard in self.trained)


def first_part(shape: Shape, ranks: int) -> Shape:
    """The first rank's part of a tensor split along its first dimension: the largest part."""
    return (-(-shape[0] // ranks), *shape[1:])


def groups(config: TrainConfig, cuda: bool) -> list[Group]:
    """The root's group, then the blocks' in order."""
    ranks = shard_ranks(config)
    kept = models.weights(config, precision(config, cuda))
    inner = computing(config)
    gathered = models.weights(inner, precision(inner, cuda))
    found: dict[int | None, list[Shard]] = {None: []}
    for each in parameters(config):
        shards = _shards(each, kept[each.name], gathered[each.name], ranks)
        found.setdefault(each.block, []).extend(shards)
    return [Group(block, tuple(shards), ranks) for block, shards in found.items()]


def _shards(parameter: Parameter, kept: Weight, gathered: Weight, ranks: int) -> Iterable[Shard]:
    if kept.quantization is None:
        shape = first_part(parameter.shape, ranks)
        return [Shard(parameter.name, shape, kept.dtype, gathered.dtype, parameter.trained)]
    packed = stored(kept.quantization, parameter.shape)[0][1]  # the scales are not parameters: every rank has them all
    return [Shard(parameter.name, (-(-packed // ranks),), "int8", "int8", False)]


def resident(config: TrainConfig, cuda: bool, found: Sequence[Group], whole: Iterable[Buffer]) -> list[Buffer]:
    """What one rank keeps of the model: its parts, and everything that is not a parameter."""
    parts = {shard.name: (shard, group.block) for group in found for shard in group.shards}
    weights = models.weights(config, precision(config, cuda))
    packed = {f"{name}.{stored(each.quantization, each.shape)[0][0]}": name for name, each in weights.items() if each.quantization}  # fmt: skip  # noqa: E501
    result: list[Buffer] = []
    for buffer in whole:
        shard, block = parts.get(packed.get(buffer.name, buffer.name), (None, None))
        result.append(buffer if shard is None else Buffer(buffer.name, shard.kept_bytes, Kind.PARAMETERS, block))
    return result


def trained_parts(config: TrainConfig, found: Sequence[Group]) -> list[Parameter]:
    """The parts that a rank's optimizer updates, as parameters, in the model's order."""
    shapes = {shard.name: shard.shape for group in found for shard in group.shards}
    return [Parameter(each.name, shapes[each.name], each.decayed) for each in parameters(config) if each.trained]
