"""Weights from and to other places: nanoGPT checkpoints, and Hugging Face's GPT-2 in safetensors files.

safetensors is read and written here: eight bytes of length, a JSON header of names, types, shapes and places, then
the numbers. Hugging Face keeps four matrices of a block transposed (its Conv1D), and ties the head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oomph.config import TrainConfig
from oomph.errors import InputError, Problem
from oomph.files import write_whole
from oomph.training import checkpoint
from oomph.training.named import MASKS, plain_names

_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_NAMES = {value: name for name, value in _TYPES.items()}
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_MAX_HEADER_BYTES = 2**26


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _MAX_HEADER_BYTES:
                raise ValueError("its header's length makes no sense")
            text = file.read(length)
            if len(text) != length:
                raise ValueError("cut short in its header")
            header = json.loads(text)
            if not isinstance(header, dict):
                raise ValueError("its header is not a table of names")
            data = bytearray(file.read())
        return {name: _tensor(entry, data) for name, entry in header.items() if name != "__metadata__"}
    except OSError as error:
        raise InputError(Problem(str(path), "cannot be read", found=error.strerror)) from None
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError, RecursionError) as error:
        raise InputError(Problem(str(path), "not a sound safetensors file", found=str(error)[:120])) from None


def _tensor(entry: Mapping[str, Any], data: bytearray) -> Tensor:
    first, last = entry["data_offsets"]
    kind = _TYPES.get(entry["dtype"])
    if kind is None:
        return torch.empty(0)  # masks in bytes or booleans: never weights
    if not 0 <= first <= last <= len(data):
        raise ValueError("cut short: a tensor ends beyond the file")
    count = (last - first) // kind.itemsize
    flat = torch.frombuffer(data, dtype=kind, count=count, offset=first) if count else torch.empty(0, dtype=kind)
    return flat.view(entry["shape"])


def write_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """A file that Hugging Face's library reads."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    at = 0
    for name, tensor in tensors.items():
        raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + len(raw)]}
        parts.append(raw)
        at += len(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_whole(path, b"".join([len(text).to_bytes(8, "little"), text, *parts]))


def from_huggingface(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's GPT-2 weights under nanoGPT's names."""
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
    """nanoGPT's weights under Hugging Face's names. Its GPT-2 always has biases: missing ones are zeros."""
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
    """A folder that `GPT2LMHeadModel.from_pretrained` opens."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu",  # the exact one, as nanoGPT has it
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
    """Weights under nanoGPT's names from a checkpoint, a safetensors file, or a folder that holds one."""
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
    """Fewer positions than the weights have: the first ones, as nanoGPT crops them."""
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
                "needs transformers",
                allowed="after: pip install transformers; or --weights FOLDER with Hugging Face's model.safetensors",
            )
        ) from None
    try:
        model = gpt2.from_pretrained(name)
    except OSError as error:
        reason = str(error).splitlines()[0][:160]
        raise InputError(
            Problem(f"init_from = {name!r}", "the weights cannot be had", reason, "--weights FOLDER")
        ) from None
    return from_huggingface(model.state_dict())
