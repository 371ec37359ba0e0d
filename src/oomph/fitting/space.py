"""The settings that leave the training mathematically the same, for each program that could run it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import TypeVar

import msgspec

from oomph import config as configs
from oomph.config import LoadedConfig, TrainConfig
from oomph.devices import Device
from oomph.fitting.estimate import period_of
from oomph.fitting.result import Value

# Tokens; 0, all at once, is tried too. By the clock, over 1,600 drawn models, cards and amounts of room, the fastest
# setting with these is 0.07 % slower in the mean than with 256, 16384 and 32768 beside them, and 1 % in the worst
# hundredth; without 4096 it is 0.16 % and 2 %.
LOSS_CHUNKS = (512, 1024, 2048, 4096, 8192)
MOST_CHUNKS = 64  # to one micro-step: by then the chunk is a trifle beside the rest, and more only cost time
COMPILE_CAPABILITY = 7.0  # what torch.compile's GPU back end needs
_FIRST = ("trainer", "n_layer", "n_head", "n_embd", "block_size", "batch_size")  # as people would write them
FIT = "oomph fit"  # the source of a value that a fit chose


T = TypeVar("T")


class Program(msgspec.Struct, frozen=True):
    """A program that could run the config, and what it can set without changing the mathematics."""

    key: str  # "nanogpt", "patched" or "oomph"
    loaded: LoadedConfig  # the run under this program, not yet settled
    settled: TrainConfig
    compile: tuple[bool, ...]
    loss_chunk: tuple[int, ...]
    checkpoint_layers: tuple[int, ...]
    optimizer_loop: tuple[str, ...]
    expandable_segments: tuple[bool, ...]


class Ladder(msgspec.Struct, frozen=True):
    """Settings that differ in their checkpointed blocks and in the allocator's segments alone.

    Each block more takes more time. Most take less memory too, so that a search need not look at every rung: see
    `strands`.
    """

    config: TrainConfig  # of the lowest rung
    counts: tuple[int, ...]  # of checkpointed blocks, rising
    expandable_segments: tuple[bool, ...]  # the config's own first: they take the same time

    def at(self, rung: int) -> TrainConfig:
        """The setting on a rung, with the segments that are tried first."""
        return msgspec.structs.replace(self.config, checkpoint_layers=self.counts[rung])

    def both(self, rung: int) -> list[TrainConfig]:
        """The settings on a rung, one a kind of segments."""
        config = self.at(rung)
        return [msgspec.structs.replace(config, expandable_segments=each) for each in self.expandable_segments]

    def strands(self) -> list[list[int]]:
        """The rungs in groups in which the peak sinks from each to the next.

        With no block checkpointed the first one is like the others, and with all of them the last one's backward pass
        meets the loss's: both may turn the order, so that each is a group of its own. Between them compiled blocks
        take turns in whose buffers they reuse, so that every second one sinks.
        """
        groups: dict[int, list[int]] = {}
        period = period_of(self.config)
        for rung, count in enumerate(self.counts):
            ends = {0: -1, self.config.n_layer: -2}
            groups.setdefault(ends.get(count, count % period), []).append(rung)
        return list(groups.values())

    @property
    def settings(self) -> int:
        """How many they are."""
        return len(self.counts) * len(self.expandable_segments)


def programs(loaded: LoadedConfig, device: Device) -> dict[str, Program]:
    """nanoGPT as published, nanoGPT with a training step that returns the loss alone, and oomph train."""
    under = {trainer: _under(loaded, trainer) for trainer in ("nanogpt", "oomph")}
    patched = with_changes(under["nanogpt"], {"return_logits": False})
    on_gpu = device.kind in ("cuda", "rocm")
    compiles = device.compute_capability is None or device.compute_capability >= COMPILE_CAPABILITY
    result = {}
    for key, each in (("nanogpt", under["nanogpt"]), ("patched", patched), ("oomph", under["oomph"])):
        settled = configs.settle(each, device).config
        ours = key == "oomph"
        own = (settled.loss_chunk or 0, settled.checkpoint_layers)
        result[key] = Program(
            key=key,
            loaded=each,
            settled=settled,
            compile=_own_first(settled.compile, (True, False)) if compiles else (False,),
            loss_chunk=_own_first(own[0], (0, *LOSS_CHUNKS)) if ours and not settled.return_logits else own[:1],
            checkpoint_layers=_own_first(own[1], range(settled.n_layer + 1)) if ours else own[1:],
            optimizer_loop=_own_first(settled.optimizer_loop or "fused", ("fused",) if ours else ()),
            expandable_segments=_own_first(settled.expandable_segments, (False, True) if on_gpu else ()),
        )
    return result


def asked_of(found: dict[str, Program], loaded: LoadedConfig) -> str:
    """The key of the program that was asked for: nanoGPT whose step returns no logits is the patched one."""
    patched = loaded.config.trainer == "nanogpt" and found["nanogpt"].settled.return_logits is False
    return "patched" if patched else loaded.config.trainer


def _own_first(own: T, others: Iterable[T]) -> tuple[T, ...]:
    """The values to try, the config's own in front: of equally good settings the one that changes least is taken."""
    return tuple(dict.fromkeys((own, *others)))


def _under(loaded: LoadedConfig, trainer: str) -> LoadedConfig:
    """The run under a program; what only oomph can do is taken out of a config written for oomph."""
    if loaded.config.trainer == trainer:
        return loaded
    other = configs.with_trainer(loaded, trainer)
    if trainer == "oomph":
        return other
    plain = TrainConfig()
    names = ("return_logits", "loss_chunk", "checkpoint_layers", "optimizer", "optimizer_loop", "autocast")
    return with_changes(other, {name: getattr(plain, name) for name in names})


def with_changes(loaded: LoadedConfig, changes: dict[str, Value]) -> LoadedConfig:
    """The config with those keys set, and the fit named as their source."""
    config = msgspec.structs.replace(loaded.config, **changes)
    sources = {key: FIT if value is not None else "default" for key, value in changes.items()}
    return LoadedConfig(config, loaded.sources | sources, loaded.notes, loaded.files)


def divisors(number: int) -> list[int]:
    """Every divisor, the largest first."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)}, reverse=True)


def batches(config: TrainConfig) -> list[tuple[int, int]]:
    """Every (batch_size, gradient_accumulation_steps) with the same sequences to a step, the largest batch first.

    The micro-steps are shared out among the devices, so that each must get a whole number of them.
    """
    sequences = config.batch_size * config.gradient_accumulation_steps
    return [
        (size, sequences // size) for size in divisors(sequences) if sequences // size % max(1, config.world_size) == 0
    ]


def ladders(program: Program) -> Iterator[Ladder]:
    """Every setting of a program that keeps the mathematics, as settled configs; those that change least in front."""
    base = program.settled
    counts = tuple(sorted(program.checkpoint_layers))
    for size, micro_steps in batches(base):
        rows = size * base.block_size
        chunks = [each for each in program.loss_chunk if _sensible(each, rows) or each == base.loss_chunk]
        for compiled, chunk, loop in product(program.compile, chunks, program.optimizer_loop):
            lowest = msgspec.structs.replace(
                base,
                batch_size=size,
                gradient_accumulation_steps=micro_steps,
                compile=compiled,
                loss_chunk=chunk,
                checkpoint_layers=counts[0],
                optimizer_loop=loop,
            )
            yield Ladder(lowest, counts, program.expandable_segments)


def variant(program: Program, changes: dict[str, Value], device: Device) -> Program:
    """The program running the config with those keys changed, everything else still free to be set."""
    loaded = with_changes(program.loaded, changes)
    return msgspec.structs.replace(program, loaded=loaded, settled=configs.settle(loaded, device).config)


def resized(program: Program, changes: dict[str, Value], device: Device) -> Program:
    """The program running a model of another size, with as many blocks to checkpoint as that has."""
    other = variant(program, changes, device)
    counts = _own_first(other.settled.checkpoint_layers, range(other.settled.n_layer + 1))
    return msgspec.structs.replace(other, checkpoint_layers=counts)


def _sensible(chunk: int, rows: int) -> bool:
    return chunk == 0 or chunk < rows <= MOST_CHUNKS * chunk


def changes_between(asked: TrainConfig, chosen: TrainConfig) -> dict[str, Value]:
    """The keys whose values differ, with the chosen ones. Both are settled, so that no value is None."""
    names = [*_FIRST, *(name for name in asked.__struct_fields__ if name not in _FIRST)]
    return {name: getattr(chosen, name) for name in names if getattr(asked, name) != getattr(chosen, name)}
