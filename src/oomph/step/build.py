"""The op list of one training step of a config, from its architecture's description: no torch, milliseconds."""

from __future__ import annotations

import os
from functools import lru_cache, partial
from typing import Any

import msgspec

from oomph.config.keys import KEYS
from oomph.config.programs import ON_THE_TRAINER, TRANSFORMERS
from oomph.config.schema import TrainConfig
from oomph.step import loop
from oomph.step.compile import programs
from oomph.step.kernels import RANDOM_STATE_BYTES
from oomph.step.ops import Buffer, Kind, Op, Phase, Section, Step
from oomph.step.sharding.rank import bucket_buffers
from oomph.step.sharding.tensor_parallel import part
from oomph.step.trace.cache import OwnModel

_CUBLAS_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024  # CUBLAS_WORKSPACE_CONFIG's default, ":4096:2:16:8"
_CUBLAS_LARGE_BYTES = 32 << 20  # on compute capability 9, 10 and 12


def workspaces(capability: tuple[int, int] | None = None) -> tuple[int, ...]:
    """Bytes that cuBLAS holds after its first call: one handle for the main thread, one for autograd's."""
    size = _CUBLAS_LARGE_BYTES if capability is not None and capability[0] in (9, 10, 12) else _CUBLAS_BYTES
    return size, size


def build(
    config: TrainConfig,
    cuda: bool = True,
    first: bool = False,
    capability: tuple[int, int] | None = None,
    evaluates: bool = True,
    threads: int | None = None,
    nearly: bool = False,
    own: OwnModel | None = None,
) -> Step:
    """One optimizer step and, if `evaluates`, one evaluation of a settled config (no value None).

    `cuda` chooses the GPU's kernels or the CPU's; `first` the run's first step, before which nanoGPT evaluates and in
    which the optimizer's state is created; `capability` is the card's, for cuBLAS's workspaces; `threads` the CPU's,
    by default one per core. `nearly`: a compiled step may be scaled from other batch sizes, as in a search.
    `own` is traced in place of the config's model.
    """
    config = part(config)
    workspace_bytes = workspaces(capability) if cuda else ()
    quiet = (*TRANSFORMERS, "torchtune", "torchtitan")  # these do not evaluate by default
    evaluates = evaluates and config.trainer not in quiet
    threads = threads or os.cpu_count() or 1
    if own is not None:
        found = own.at(config, cuda)
        step = found.step(config, cuda, first)
        sections = [each for each in step.sections if evaluates or each.ops[0].phase is not Phase.EVAL]
        step = Step((*step.resident, *bucket_buffers(config, found.facts.trained)), tuple(sections))
    else:
        make = partial(programs.build, nearly=nearly) if config.compile else loop.build
        step = make(config, cuda, first, threads, evaluates)
    held = [Buffer("workspace", size, Kind.WORKSPACE) for size in workspace_bytes]
    later = config.gradient_accumulation_steps // config.world_size - 1
    tokens = config.batch_size * config.block_size
    masks = 8 if config.trainer in ("trl", "unsloth") or config.packing != "off" else 0  # bytes per token
    if masks:  # TRL's collator makes attention masks; with packing every collator makes positions instead
        name = "batch.attention_mask" if config.packing == "off" else "batch.position_ids"
        held.append(Buffer(name, masks * tokens, Kind.INPUTS))
    if config.trainer in ON_THE_TRAINER and later > 0:  # the Trainer fetches all of a step's batches at once
        held.append(Buffer("batch.later", (16 + masks) * later * tokens, Kind.INPUTS))
    step = Step((*step.resident, *held), step.sections)
    if config.trainer == "oomph" and not cuda and own is None:
        step = _with_random_state(step)
    return step


def keys_read(config: TrainConfig, cuda: bool = True) -> frozenset[str]:
    """The keys that the program and architecture of a settled config read, found by running a small one."""
    layers = min(2, config.n_layer)
    few = {"n_layer": layers, "checkpoint_layers": min(layers, config.checkpoint_layers), "batch_size": 1}
    few |= {
        "block_size": min(max(8, config.tensor_parallel_degree), config.block_size),
        "compile": False,
        "gradient_accumulation_steps": config.world_size,
    }
    return _keys_read(msgspec.structs.replace(config, **few), cuda)


@lru_cache(maxsize=64)  # a search asks for many settings, few of which differ when made small
def _keys_read(config: TrainConfig, cuda: bool) -> frozenset[str]:
    found: set[str] = set()

    class Watched(TrainConfig, frozen=True):
        def __getattribute__(self, name: str) -> Any:
            found.add(name)
            return super().__getattribute__(name)

    build(Watched(**{key: getattr(config, key) for key in KEYS}), cuda)
    return frozenset(found.intersection(KEYS))


def _with_random_state(step: Step) -> Step:
    """The step with the random state that oomph train keeps to repeat a step that ran out of memory.

    On a GPU the state is on the host. A step's is freed before clipping, an evaluation's at its end.
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
