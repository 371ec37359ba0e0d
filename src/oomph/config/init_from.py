"""`init_from`: the shape of the model whose weights a run begins with, OpenAI's or those at a path; without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oomph.config.layer import SourcedValue
from oomph.config.programs import GPT2_BLOCK, GPT2_SHAPES, GPT2_VOCABULARY
from oomph.config.reading import checkpoint
from oomph.config.shape import SHAPE
from oomph.errors import InputError, Problem

HUGGING_FACE = "config.json"
FAMILIES = ("gpt2", "llama", "qwen3")  # the Hugging Face families that oomph train's GPT can reproduce
_GPT2 = {key: key for key in ("n_layer", "n_head", "n_embd", "vocab_size")} | {"block_size": "n_positions"}
_LLAMA = {
    "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size",
    "vocab_size": "vocab_size", "block_size": "max_position_embeddings", "intermediate_size": "intermediate_size",
}  # fmt: skip
_UNSUPPORTED = ("attention_bias", "mlp_bias", "use_sliding_window")  # refused if true


def shape_of(path: Path) -> dict[str, Any]:
    """The shape keys of the model at `path`: a run's folder, a checkpoint, or a Hugging Face folder."""
    if path.is_dir() and (path / HUGGING_FACE).is_file():
        return hugging_face_shape(path)
    found = newest(path)
    values = checkpoint.read(found, str(path)).values
    return {key: values[key].value for key in SHAPE if key in values}


def newest(path: Path) -> Path:
    """The checkpoint of a run's folder: its best one, nanoGPT's only one, or the last."""
    if not path.is_dir():
        return path
    named = [path / name for name in ("best.pt", "ckpt.pt")] + sorted(path.glob("checkpoints/step_*.pt"), reverse=True)
    found = next((each for each in named if each.is_file()), None)
    if found is None:
        allowed = f"a run's folder, or Hugging Face's with {HUGGING_FACE} and model.safetensors"
        raise InputError(Problem(str(path), "no model in this folder", allowed=allowed))
    return found


def settings_in(folder: Path) -> dict[str, Any] | None:
    """The config.json beside weights, refused if oomph train has no such model; None without one."""
    path = folder / HUGGING_FACE
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None  # only weights: their names and shapes decide
    if not isinstance(settings, dict):
        return None
    if (family := settings.get("model_type", "gpt2")) not in FAMILIES:
        what = "not the architecture that oomph train trains"
        raise InputError(Problem(str(path), what, str(family)[:60], ", ".join(FAMILIES)))
    return settings


def hugging_face_shape(folder: Path) -> dict[str, Any]:
    """The shape of a Hugging Face model in oomph train's keys. Raises `InputError` if its GPT cannot be that model."""
    path = folder / HUGGING_FACE
    settings = settings_in(folder)
    try:
        if settings is None:
            raise ValueError("no object in JSON")
        return _gpt2(settings) if settings.get("model_type", "gpt2") == "gpt2" else _llama(settings, path)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        needed = ", ".join((_LLAMA if settings and settings.get("model_type", "gpt2") != "gpt2" else _GPT2).values())
        allowed = f"the config.json of {', '.join(FAMILIES)}, with {needed}"
        found = f"{type(error).__name__}: {error}"[:120]
        raise InputError(Problem(str(path), "cannot be read", found, allowed)) from None


def _gpt2(settings: dict[str, Any]) -> dict[str, Any]:
    shape: dict[str, Any] = {key: int(settings[theirs]) for key, theirs in _GPT2.items()}
    return shape | {"bias": True, "tie_weights": bool(settings.get("tie_word_embeddings", True))}


def _llama(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    unsupported = [key for key in _UNSUPPORTED if settings.get(key)] + ([f"rope {kind}"] if kind != "default" else [])
    if unsupported:
        raise InputError(Problem(str(path), "oomph train's GPT has not all of it", found=", ".join(unsupported)[:120]))
    shape: dict[str, Any] = {key: int(settings[theirs]) for key, theirs in _LLAMA.items()}
    heads = shape["n_head"]
    return shape | {
        "num_key_value_heads": int(settings.get("num_key_value_heads") or heads),
        "head_dim": int(settings.get("head_dim") or shape["n_embd"] // heads),
        "hidden_act": str(settings.get("hidden_act", "silu")),
        "rms_norm_eps": float(settings.get("rms_norm_eps", 1e-6)),
        "rope_theta": float(rope.get("rope_theta") or settings.get("rope_theta") or 10_000.0),
        "tie_weights": bool(settings.get("tie_word_embeddings", False)),
        "bias": False,
        "position_embedding_type": "rotary",
        "norm_type": "rmsnorm",
        "use_qk_norm": settings["model_type"] == "qwen3",
        "is_gated_act": True,
    }


def apply_init_from(values: dict[str, SourcedValue]) -> tuple[list[str], list[Problem]]:
    """Override `values` with the shape that `init_from = 'gpt2…'` loads, like nanoGPT; returns notes and problems."""
    notes: list[str] = []
    chosen = values["init_from"].value
    if chosen == "resume":
        notes.append(
            "init_from = 'resume': the model's shape is the checkpoint's; give its ckpt.pt as a source to have it read"
        )
    if not isinstance(chosen, str) or chosen not in GPT2_SHAPES:
        return notes, []
    source = f"init_from = {chosen!r}"
    for key, value in {**GPT2_SHAPES[chosen], "bias": True, "vocab_size": GPT2_VOCABULARY}.items():
        said = values[key]
        if said.firm and said.value != value and said.where != source:
            notes.append(f"{said.where}: {key} = {said.value} is replaced by {value}, from {source}")
        values[key] = SourcedValue(value, source)
    block = values["block_size"]
    if isinstance(block.value, int) and block.value > GPT2_BLOCK:
        allowed = f"at most {GPT2_BLOCK}, which is what {chosen} was trained with"
        return notes, [Problem(block.where, f"block_size is too long for {source}", str(block.value), allowed)]
    return notes, []
