"""Loading weights into a model: from checkpoints of oomph or nanoGPT, or Hugging Face folders."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oomph.config.init_from import settings_in
from oomph.errors import InputError, Problem
from oomph.training import checkpoint
from oomph.training.hugging_face import INDEX, MASKS, SINGLE, from_gpt2, read_folder, read_safetensors
from oomph.training.lora import is_adapter, merged, scale_of

_PREFIX = "_orig_mod."  # torch.compile's, which nanoGPT's checkpoints may have
_LAYER = re.compile(r"\.h\.(\d+)\.")
_HEAD, _EMBEDDING = "lm_head.weight", "transformer.wte.weight"
_MOST_SHAPES = 10


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint's content; for a sharded one, the weights and their average are put together."""
    if not path.is_dir():
        return checkpoint.load(path)
    from oomph.training.ranks import parts  # imports a second's worth of torch

    return parts.load_whole(path)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Weights with nanoGPT's names from a checkpoint, a safetensors file, or a folder with one."""
    if path.is_dir() and not checkpoint.is_folder(path):
        if any((path / name).is_file() for name in (SINGLE, INDEX)):
            return read_folder(path)
        names = (SINGLE, checkpoint.BEST, checkpoint.NANOGPT)
        found = [path / name for name in names if (path / name).exists()] or checkpoint.saved(path)[-1:]
        if not found:
            raise InputError(Problem(str(path), "no weights in this folder", allowed=" or ".join(names)))
        path = found[0]
    if path.suffix == ".safetensors":
        return read_folder(path.parent) if path.name == SINGLE else from_gpt2(read_safetensors(path))
    content = read_checkpoint(path)
    named = plain_names(content["model"])
    if not any(map(is_adapter, named)):
        return named
    return merged(named, scale_of(checkpoint.saved_config(content, str(path)).config))


def activation_note(source: str) -> str | None:
    """A note on weights that were trained with another activation; None if it is the same or unknown.

    `source` is a path, or OpenAI's name of a model.
    """
    path = Path(source)
    settings = settings_in(path if path.is_dir() else path.parent)
    activation = "gelu_new" if source.startswith("gpt2") and not path.exists() else None
    if settings is not None and settings.get("model_type", "gpt2") == "gpt2":
        activation = str(settings.get("activation_function", "gelu_new"))[:60]  # transformers' default for GPT-2
    if activation in (None, "gelu"):
        return None
    return f"NOTE: {source} was trained with {activation}; here it runs with the exact GELU, as in nanoGPT"


def crop_positions(weights: dict[str, Tensor], block_size: int) -> dict[str, Tensor]:
    """The weights with only the first `block_size` positions, as nanoGPT crops them."""
    name = "transformer.wpe.weight"
    if name in weights and weights[name].shape[0] > block_size:
        return weights | {name: weights[name][:block_size].clone()}
    return weights


def plain_names(weights: dict[str, Any]) -> dict[str, Any]:
    """The weights without torch.compile's prefix and without masks."""
    plain = {name.removeprefix(_PREFIX): value for name, value in weights.items()}
    return {name: value for name, value in plain.items() if not name.endswith(MASKS)}


def load_weights(model: torch.nn.Module, weights: dict[str, Any], where: str) -> None:
    """Load the weights. Raises `InputError` listing all that are missing, unexpected or of the wrong shape."""
    named = plain_names(weights)
    wanted = model.state_dict()
    problems = _missing_or_unexpected(named, wanted, where) + _not_tied(named, wanted, where)
    problems += [
        Problem(where, f"wrong shape of {name}", str(tuple(named[name].shape)), str(tuple(value.shape)))
        for name, value in wanted.items()
        if name in named and named[name].shape != value.shape
    ][:_MOST_SHAPES]
    if problems:
        raise InputError(problems)
    try:
        model.load_state_dict({name: named[name] for name in wanted})
    except RuntimeError as error:
        raise InputError(Problem(where, "its weights cannot be loaded", found=str(error)[:200])) from None


def _missing_or_unexpected(named: dict[str, Any], wanted: dict[str, Tensor], where: str) -> list[Problem]:
    missing = [name for name in wanted if name not in named]
    unexpected = [name for name, value in named.items() if name not in wanted and not _is_zero_bias(name, value)]
    problems = []
    if missing:
        what = f"missing weights: {folded(missing)}"
        problems.append(Problem(where, what, allowed=_cure(missing, named, "False")))
    if unexpected:
        what = f"weights that the model does not have: {folded(unexpected)}"
        problems.append(Problem(where, what, allowed=_cure(unexpected, named, "True")))
    return problems


def _is_zero_bias(name: str, value: Tensor) -> bool:
    """Whether it is a bias of zeros, which can be dropped: Hugging Face's format always has one."""
    return name.endswith(".bias") and not value.any()


def _cure(names: list[str], named: dict[str, Any], bias: str) -> str | None:
    """The config keys that would make the model match these weights."""
    keys = [f"--bias={bias}"] if any(name.endswith(".bias") for name in names) else []
    layers = {int(layer[1]) for name in named if (layer := _LAYER.search(name))}
    others = [name for name in names if name.endswith(".weight") and _LAYER.search(name)]
    keys += [f"--n_layer={len(layers)}"] if others and layers else []
    return " ".join(keys) or None


def _not_tied(named: dict[str, Any], wanted: dict[str, Tensor], where: str) -> list[Problem]:
    """Refuse a separate head for a model whose head is the embedding: only one of the two could be kept."""
    if not all(name in each for name in (_HEAD, _EMBEDDING) for each in (named, wanted)):
        return []
    head, embedding = named[_HEAD], named[_EMBEDDING]
    if wanted[_HEAD].data_ptr() != wanted[_EMBEDDING].data_ptr() or head.data_ptr() == embedding.data_ptr():
        return []
    if head.shape == embedding.shape and torch.equal(head, embedding):
        return []
    return [
        Problem(where, f"its {_HEAD} and {_EMBEDDING} differ, but the config ties them", allowed="--tie_weights=False")
    ]


def folded(names: Iterable[str]) -> str:
    """The names as text, each once for all layers that have it: transformer.h.0-11.ln_1.weight."""
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
