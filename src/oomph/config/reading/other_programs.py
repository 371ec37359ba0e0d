"""Config files of unsupported programs: refused by the program's name, instead of by unknown keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from oomph.errors import InputError, Problem

_BY_HAND = "a model by name or its config.json, with the settings as keys (--batch_size=, --block_size=, --gpu)"


class _OtherProgram(NamedTuple):
    """A program, how its files are recognised, and what to give instead."""

    name: str
    keys: tuple[str, ...]  # all required at the top level; dots lead into tables
    instead: str = _BY_HAND
    described: bool = False  # the program is supported, but its files are not read


_PROGRAMS = (
    _OtherProgram("torchtitan", ("model.flavor", "training"), f"trainer=torchtitan, and {_BY_HAND}", described=True),
    _OtherProgram("GPT-NeoX", ("train_micro_batch_size_per_gpu", "pipe_parallel_size")),
    _OtherProgram("DeepSpeed without ZeRO", ("train_micro_batch_size_per_gpu",), "one with zero_optimization", True),
    _OtherProgram(
        "accelerate", ("distributed_type", "compute_environment"), "--gpu 4xNAME --parallel=ddp or fsdp", True
    ),
    _OtherProgram("verl", ("actor_rollout_ref",)),
    _OtherProgram("llm-foundry", ("global_train_batch_size", "max_seq_len")),
    _OtherProgram("MaxText", ("base_emb_dim",)),
    _OtherProgram("MaxText", ("model_name", "per_device_batch_size")),
    _OtherProgram("NeMo", ("exp_manager", "trainer")),
    _OtherProgram("Megatron Bridge", ("checkpoint", "ddp", "optimizer", "train")),
    _OtherProgram("Levanter", ("trainer.train_batch_size", "model.hidden_dim")),
    _OtherProgram("GPT-NeoX", ("hidden-size",)),
)
_AUTOMODEL = "nemo_automodel"  # prefix of the targets in NeMo AutoModel's recipes
_DEPTH = 4  # levels of nested tables to search


def refuse(content: Mapping[str, object], label: str) -> None:
    """Raises `InputError` for a file of a program that is not supported, or whose files are not read."""
    if any(text.startswith(_AUTOMODEL) for text in _targets(content)):
        _raise(label, _OtherProgram("NeMo AutoModel", ()))
    for program in _PROGRAMS:
        if all(_has(content, key) for key in program.keys):
            _raise(label, program)


def _raise(label: str, program: _OtherProgram) -> None:
    what = "whose files are not read" if program.described else "which is not described"
    raise InputError(Problem(label, f"a config of {program.name}, {what}", allowed=program.instead))


def _has(content: object, key: str) -> bool:
    """Whether a mapping has a key, or a dotted key (a.b) in nested mappings."""
    first, _, rest = key.partition(".")
    if not isinstance(content, Mapping) or first not in content:
        return False
    return not rest or _has(content[first], rest)


def _targets(content: object, depth: int = 0) -> Iterator[str]:
    """The values of `_target_`, here and in nested tables."""
    if not isinstance(content, Mapping) or depth > _DEPTH:
        return
    for name, value in content.items():
        if name == "_target_" and isinstance(value, str):
            yield value
        yield from _targets(value, depth + 1)
