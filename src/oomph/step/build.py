"""The op list of one training step of a config, from its architecture's description: no torch, milliseconds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import msgspec

from oomph.config.schema import KEYS, TRANSFORMERS, TrainConfig
from oomph.step import loop
from oomph.step.compile import programs
from oomph.step.kernels import RANDOM_STATE_BYTES
from oomph.step.ops import Buffer, Kind, Op, Phase, Section, Step
from oomph.step.parameters import Parameter, trained

_CUBLAS_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024  # CUBLAS_WORKSPACE_CONFIG's default, ":4096:2:16:8"
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20  # torch/nn/parallel/distributed.py
_CUBLAS_LARGE_BYTES = 32 << 20  # on compute capability 9, 10 and 12


def workspaces(capability: tuple[int, int] | None = None) -> tuple[int, ...]:
    """Bytes that cuBLAS holds from its first call on: one handle for the main thread, one for autograd's."""
    size = _CUBLAS_LARGE_BYTES if capability is not None and capability[0] in (9, 10, 12) else _CUBLAS_BYTES
    return size, size


def gradient_buckets(config: TrainConfig, found: Sequence[Parameter]) -> tuple[Buffer, ...]:
    """DistributedDataParallel's second copy of the gradients, from the last layer: a bucket of 1 MiB, then of 25."""
    if config.world_size == 1:
        return ()
    weight_bytes = 2 if config.dtype != "float32" and not config.autocast else 4
    buckets: list[Buffer] = []
    filled, limit = 0, _FIRST_BUCKET_BYTES
    for parameter in reversed(found):
        filled += parameter.numel * weight_bytes
        if filled >= limit:
            buckets.append(Buffer("ddp.bucket", filled, Kind.GRADIENTS))
            filled, limit = 0, _BUCKET_BYTES
    if filled:
        buckets.append(Buffer("ddp.bucket", filled, Kind.GRADIENTS))
    return tuple(buckets)


def build(
    config: TrainConfig,
    cuda: bool = True,
    first: bool = False,
    capability: tuple[int, int] | None = None,
    evaluates: bool = True,
    threads: int | None = None,
    nearly: bool = False,
) -> Step:
    """One optimizer step and, unless it is not asked for, one evaluation of a settled config (no value None).

    `cuda` chooses the GPU's kernels or the CPU's; `first` the run's first step, before which nanoGPT evaluates and in
    which the optimizer's state is made; `capability` is the card's, for cuBLAS's workspaces; `threads` are the CPU's,
    by default one a core. `nearly`: a compiled step may be scaled from those of other batch sizes, as a search does.
    """
    workspace_bytes = workspaces(capability) if cuda else ()
    evaluates = evaluates and config.trainer not in TRANSFORMERS  # these do not, unless told to
    threads = threads or os.cpu_count() or 1
    make = partial(programs.build, nearly=nearly) if config.compile else loop.build
    step = make(config, cuda, first, threads, evaluates)
    held = [Buffer("workspace", size, Kind.WORKSPACE) for size in workspace_bytes]
    later = config.gradient_accumulation_steps // config.world_size - 1
    if config.trainer == "hf" and later > 0:  # the Trainer fetches a step's batches at once, and holds them
        held.append(Buffer("batch.later", 16 * later * config.batch_size * config.block_size, Kind.INPUTS))
    step = Step((*step.resident, *held), step.sections)
    if config.trainer == "oomph" and not cuda:
        step = _with_random_state(step)
    buckets = gradient_buckets(config, trained(config) if config.world_size > 1 else ())
    return Step((*step.resident, *buckets), step.sections) if buckets else step


def keys_read(config: TrainConfig, cuda: bool = True) -> frozenset[str]:
    """The keys that the program and the architecture of a settled config look at, found by running a small one."""
    layers = min(2, config.n_layer)
    few = {"n_layer": layers, "checkpoint_layers": min(layers, config.checkpoint_layers), "batch_size": 1}
    few |= {"block_size": min(8, config.block_size), "compile": False, "gradient_accumulation_steps": config.world_size}
    return _keys_read(msgspec.structs.replace(config, **few), cuda)


@lru_cache(maxsize=64)  # a search asks it of many settings, and few of them differ when made small
def _keys_read(config: TrainConfig, cuda: bool) -> frozenset[str]:
    found: set[str] = set()

    class Watched(TrainConfig, frozen=True):
        def __getattribute__(self, name: str) -> Any:
            found.add(name)
            return super().__getattribute__(name)

    build(Watched(**{key: getattr(config, key) for key in KEYS}), cuda)
    return frozenset(found.intersection(KEYS))


def _with_random_state(step: Step) -> Step:
    """With the random numbers' state that oomph train keeps, to repeat a step that ran out of memory.

    On a GPU it is the host's. A step's is let go before clipping, an evaluation's when that ends.
    """
    sections = list(step.sections)
    evaluating = [index for index, section in enumerate(sections) if section.ops[0].phase is Phase.EVAL]
    training = [index for index in range(len(sections)) if index not in evaluating]
    for places, after in ((training, False), (evaluating, True)):
        if places:
            state = Buffer("random.state", RANDOM_STATE_BYTES, Kind.TEMPORARY)
            first, last = sections[places[0]], sections[places[-1]]
            kept = Op("random.state", first.ops[0].phase, allocates=(state,))
            gone = Op("random.state", last.ops[0].phase, frees=(state,))
            sections[places[0]] = Section(first.name, (kept, *first.ops), first.times)
            last = sections[places[-1]]
            ops = (*last.ops, gone) if after else (gone, *last.ops)
            sections[places[-1]] = Section(last.name, ops, last.times)
    return Step(step.resident, tuple(sections))
