"""Weights by name: into a model whole, or not at all, with every difference said."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from oomph.errors import InputError, Problem

_PREFIX = "_orig_mod."  # torch.compile's, which nanoGPT's checkpoints may carry
MASKS = (".attn.bias", ".attn.masked_bias")  # causal masks, which older nanoGPT and Hugging Face keep beside weights
_LAYER = re.compile(r"\.h\.(\d+)\.")
_HEAD, _EMBEDDING = "lm_head.weight", "transformer.wte.weight"
_MOST_SHAPES = 10


def plain_names(weights: dict[str, Any]) -> dict[str, Any]:
    """The same weights without the prefix of a compiled model, and without masks."""
    plain = {name.removeprefix(_PREFIX): value for name, value in weights.items()}
    return {name: value for name, value in plain.items() if not name.endswith(MASKS)}


def load_weights(model: torch.nn.Module, weights: dict[str, Any], where: str) -> None:
    """Put them in. Raises `InputError` with all that is missing, too much, or of another shape."""
    named = plain_names(weights)
    wanted = model.state_dict()
    problems = _missing_or_surplus(named, wanted, where) + _not_tied(named, wanted, where)
    problems += [
        Problem(where, f"weights of another shape for {name}", str(tuple(value.shape)), str(tuple(wanted[name].shape)))
        for name, value in named.items()
        if name in wanted and value.shape != wanted[name].shape
    ][:_MOST_SHAPES]
    if problems:
        raise InputError(problems)
    try:
        model.load_state_dict({name: named[name] for name in wanted})
    except RuntimeError as error:
        raise InputError(Problem(where, "its weights cannot be taken", found=str(error)[:200])) from None


def _missing_or_surplus(named: dict[str, Any], wanted: dict[str, Tensor], where: str) -> list[Problem]:
    missing = [name for name in wanted if name not in named]
    surplus = [name for name, value in named.items() if name not in wanted and not _says_nothing(name, value)]
    problems = []
    if missing:
        what = f"no weights for {folded(missing)}"
        problems.append(Problem(where, what, allowed=_cure(missing, named, "False")))
    if surplus:
        what = f"the model has no place for its {folded(surplus)}"
        problems.append(Problem(where, what, allowed=_cure(surplus, named, "True")))
    return problems


def _says_nothing(name: str, value: Tensor) -> bool:
    """A bias of zeros is no bias: Hugging Face's form has one in any case."""
    return name.endswith(".bias") and not value.any()


def _cure(names: list[str], named: dict[str, Any], bias: str) -> str | None:
    """The keys that make a model of these weights' shape."""
    keys = [f"--bias={bias}"] if any(name.endswith(".bias") for name in names) else []
    layers = {int(layer[1]) for name in named if (layer := _LAYER.search(name))}
    others = [name for name in names if name.endswith(".weight") and _LAYER.search(name)]
    keys += [f"--n_layer={len(layers)}"] if others and layers else []
    return " ".join(keys) or None


def _not_tied(named: dict[str, Any], wanted: dict[str, Tensor], where: str) -> list[Problem]:
    """A head of its own in weights for a model whose head is the embedding: only one of the two could be kept."""
    if not all(name in each for name in (_HEAD, _EMBEDDING) for each in (named, wanted)):
        return []
    head, embedding = named[_HEAD], named[_EMBEDDING]
    if wanted[_HEAD].data_ptr() != wanted[_EMBEDDING].data_ptr() or head.data_ptr() == embedding.data_ptr():
        return []
    if head.shape == embedding.shape and torch.equal(head, embedding):
        return []
    return [Problem(where, f"its {_HEAD} is not its {_EMBEDDING}, as it is here", allowed="--tie_weights=False")]


def folded(names: Iterable[str]) -> str:
    """Names in words, each once for all the layers that have it."""
    layers: dict[str, list[int]] = {}
    for name in names:
        layer = _LAYER.search(name)
        found = layers.setdefault(_LAYER.sub(".h.{}.", name), [])
        if layer:
            found.append(int(layer[1]))
    return ", ".join(name.replace("{}", _span(found)) for name, found in layers.items())


def _span(numbers: list[int]) -> str:
    first, last = (min(numbers), max(numbers)) if numbers else (0, 0)
    if last - first + 1 == len(numbers) > 1:
        return f"{first}-{last}"
    return ",".join(map(str, sorted(numbers)))
