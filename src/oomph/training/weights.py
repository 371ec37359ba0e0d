"""Weights from and to other places: nanoGPT's checkpoints, and Hugging Face's GPT-2 in safetensors files.

Hugging Face stores four matrices of a block transposed (its Conv1D) and ties the head.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oomph.config import TrainConfig
from oomph.data.errors import require
from oomph.errors import InputError, Problem
from oomph.files import write_whole
from oomph.training import checkpoint

_PREFIX = "_orig_mod."  # torch.compile's, which nanoGPT's checkpoints may have
MASKS = (".attn.bias", ".attn.masked_bias")  # causal masks that older versions save with the weights
_LAYER = re.compile(r"\.h\.(\d+)\.")
_HEAD, _EMBEDDING = "lm_head.weight", "transformer.wte.weight"
_MOST_SHAPES = 10
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file."""
    library = require("safetensors.torch", str(path))
    try:
        tensors: dict[str, Tensor] = library.load_file(path)
    except OSError as error:
        raise InputError(Problem(str(path), "cannot be read", found=error.strerror or str(error)[:120])) from None
    except Exception as error:  # the package's own class, known only if it is installed
        raise InputError(Problem(str(path), "not a valid safetensors file", found=str(error)[:120])) from None
    return tensors


def write_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a file that Hugging Face's libraries read."""
    library = require("safetensors.torch", str(path))
    write_whole(path, library.save(dict(tensors), metadata={"format": "pt"}))


def from_huggingface(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's GPT-2 weights with nanoGPT's names."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(MASKS):
            continue
        full = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        named[full] = tensor.t().contiguous() if full.endswith(_TRANSPOSED) else tensor
    if "transformer.wte.weight" in named:
        named.setdefault("lm_head.weight", named["transformer.wte.weight"])
    return named


def to_huggingface(weights: Mapping[str, Tensor], config: TrainConfig) -> dict[str, Tensor]:
    """nanoGPT's weights with Hugging Face's names. Its GPT-2 always has biases: missing ones become zeros."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name == "lm_head.weight" and config.tie_weights:
            continue
        tensors[name] = tensor.t().contiguous() if name.endswith(_TRANSPOSED) else tensor
        bias = name.removesuffix("weight") + "bias"
        has_bias = name.endswith("weight") and not any(part in name for part in (".wte.", ".wpe.", "lm_head"))
        if has_bias and bias not in weights:
            tensors[bias] = torch.zeros(tensor.shape[0], dtype=tensor.dtype)
    return tensors


def export_huggingface(weights: Mapping[str, Tensor], config: TrainConfig, folder: Path) -> None:
    """Write a folder that `GPT2LMHeadModel.from_pretrained` opens."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu",  # the exact one, as in nanoGPT
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_positions": config.block_size,
        "vocab_size": config.vocab_size,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": config.tie_weights,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 50256 if config.vocab_size > 50256 else None),
        **{f"{part}_pdrop": config.dropout for part in ("attn", "embd", "resid")},
    }
    write_safetensors(to_huggingface(weights, config), folder / "model.safetensors")
    write_whole(folder / "config.json", (json.dumps(settings, indent=2) + "\n").encode())


def read_weights(path: Path) -> dict[str, Tensor]:
    """Weights with nanoGPT's names from a checkpoint, a safetensors file, or a folder with one."""
    if path.is_dir():
        names = ("model.safetensors", checkpoint.BEST, checkpoint.NANOGPT)
        found = [path / name for name in names if (path / name).is_file()] or checkpoint.saved(path)[-1:]
        if not found:
            raise InputError(Problem(str(path), "no weights in this folder", allowed=" or ".join(names)))
        path = found[0]
    if path.suffix == ".safetensors":
        return from_huggingface(read_safetensors(path))
    return plain_names(checkpoint.load(path)["model"])


def crop_positions(weights: dict[str, Tensor], block_size: int) -> dict[str, Tensor]:
    """The weights with only the first `block_size` positions, as nanoGPT crops them."""
    name = "transformer.wpe.weight"
    if name in weights and weights[name].shape[0] > block_size:
        return weights | {name: weights[name][:block_size].clone()}
    return weights


def pretrained(name: str) -> dict[str, Tensor]:
    """OpenAI's weights (`init_from = 'gpt2'`), through Hugging Face's transformers and its cache."""
    try:
        gpt2 = import_module("transformers").GPT2LMHeadModel
    except ImportError:
        raise InputError(
            Problem(
                f"init_from = {name!r}",
                "needs transformers; try: pip install 'oomph[hf]'",
                allowed="--weights FOLDER with Hugging Face's model.safetensors",
            )
        ) from None
    try:
        model = gpt2.from_pretrained(name)
    except OSError as error:
        reason = str(error).splitlines()[0][:160]
        raise InputError(
            Problem(f"init_from = {name!r}", "the weights cannot be loaded", reason, "--weights FOLDER")
        ) from None
    return from_huggingface(model.state_dict())


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
    """A bias of zeros can be dropped: Hugging Face's format always has one."""
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
