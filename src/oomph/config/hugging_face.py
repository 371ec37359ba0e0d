"""A model's own `config.json` as Hugging Face writes it, and the models that people ask for most, by name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from oomph.config.layer import Layer, SourcedValue
from oomph.config.schema import MODEL_TYPES
from oomph.config.values import show
from oomph.errors import InputError, Problem, nearest

# Our keys and their names in transformers' configs, in the order they are looked for.
_NAMES: dict[str, tuple[str, ...]] = {
    "n_layer": ("num_hidden_layers", "n_layer"),
    "n_head": ("num_attention_heads", "n_head"),
    "n_embd": ("hidden_size", "n_embd"),
    "vocab_size": ("vocab_size",),
    "tie_weights": ("tie_word_embeddings",),
    "num_key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner"),
    "sliding_window": ("sliding_window",),
    "sliding_window_pattern": ("sliding_window_pattern",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
    "bias": ("attention_bias", "enable_bias"),
    "dropout": ("hidden_dropout", "dropout", "resid_pdrop"),
    "attention_dropout": ("attention_dropout",),
    "word_embed_proj_dim": ("word_embed_proj_dim",),
    "do_layer_norm_before": ("do_layer_norm_before",),
    "use_parallel_residual": ("use_parallel_residual",),
    "num_experts": ("num_experts", "num_local_experts"),
    "num_experts_per_tok": ("num_experts_per_tok",),
    "moe_intermediate_size": ("moe_intermediate_size",),
    "norm_topk_prob": ("norm_topk_prob",),
}
# What the descriptions do not cover: a key, the value they are for, and what it means.
_ONLY: dict[str, tuple[object, str]] = {
    "mlp_only_layers": ([], "blocks without experts among blocks with them"),
    "decoder_sparse_step": (1, "blocks without experts among blocks with them"),
    "output_router_logits": (False, "a loss that balances the experts"),
    "router_jitter_noise": (0.0, "noise on the router's input"),
    "layer_norm_elementwise_affine": (True, "layer norms without weights"),
    "_remove_final_layer_norm": (False, "no layer norm after the last block"),
    "layerdrop": (0.0, "blocks left out at random"),
}
# What a family's class has where a file does not say it (transformers 5.22, configuration_*.py).
_DEFAULTS: dict[str, dict[str, object]] = {
    "gpt2": {"tie_weights": True, "bias": True, "vocab_size": 50257, "dropout": 0.1,
             "max_position_embeddings": 1024},
    "gpt_neox": {"tie_weights": False, "bias": True, "partial_rotary_factor": 0.25},
    "opt": {"tie_weights": True, "bias": True, "dropout": 0.1, "attention_dropout": 0.0,
            "max_position_embeddings": 2048},
    "mixtral": {"tie_weights": False, "num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"tie_weights": False, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
                  "moe_intermediate_size": 768, "norm_topk_prob": False},
    "llama": {"tie_weights": False},
    "mistral": {"tie_weights": False, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"tie_weights": False},
    "qwen3": {"tie_weights": False, "head_dim": 128},
    "olmo2": {"tie_weights": False},
    "phi3": {"tie_weights": False},
    "gemma2": {"tie_weights": True, "head_dim": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
               "final_logit_softcapping": 30.0, "sliding_window_pattern": 2},
    "gemma3_text": {"tie_weights": True, "head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 6},
}  # fmt: skip
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu_new",
    "relu": "relu",
}  # fmt: skip
OWN_ACTIVATIONS = {"gpt2": "gelu_new", "gpt_neox": "gelu", "opt": "relu"}  # of a family's class; of the others silu
_NESTED = ("text_config",)  # where a model of several kinds of input keeps its language model
_ALIASES = {"gemma3": "gemma3_text"}
_GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "tie_weights": True}
_GPT2_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def is_model(content: Mapping[str, object]) -> bool:
    """Whether a JSON object is a model's config."""
    return "model_type" in content or "architectures" in content


def read(content: Mapping[str, object], label: str) -> Layer:
    """The layer of a model's `config.json`. Raises `InputError` for an architecture that is not described."""
    for name in _NESTED:
        if isinstance(inner := content.get(name), dict) and "num_hidden_layers" in inner:
            content = {"model_type": _ALIASES.get(str(content.get("model_type")), content.get("model_type")), **inner}
    family = content.get("model_type", "gpt2" if content.get("architectures") == ["GPT2LMHeadModel"] else None)
    if family == "gpt2":
        return _gpt2(content, label)
    if family not in MODEL_TYPES:
        raise InputError(
            Problem(
                where=label, what="an architecture that is not described", found=f"model_type {show(family)}",
                allowed=f"{', '.join(MODEL_TYPES)}; any other with --model {label}, which needs torch and transformers",
            )
        )  # fmt: skip
    assert isinstance(family, str)
    layer = Layer(program="hf")
    layer.values["model_type"] = SourcedValue(family, label)
    defaults = _DEFAULTS.get(family, {})
    content = _with_rotary(content)
    for key, names in _NAMES.items():
        given = next((content[name] for name in names if content.get(name) is not None), None)
        if given is not None:
            layer.values[key] = SourcedValue(given, label)
        elif key in defaults and not (key in content or any(name in content for name in names)):
            layer.values[key] = SourcedValue(defaults[key], f"{label} (transformers' default)")
    if family == "opt":  # whose positions are a table
        layer.values["max_position_embeddings"] = SourcedValue(content.get("max_position_embeddings", 2048), label)
    _windows(content, layer, label)
    _activation(content, layer, label, family)
    layer.problems += _not_covered(content, label)
    return layer


def class_defaults(family: object) -> Mapping[str, object]:
    """What a family's class in transformers has where nothing is said."""
    return _DEFAULTS.get(str(family), {})


def _with_rotary(content: Mapping[str, object]) -> Mapping[str, object]:
    """The config with the share of a head that is rotated, which newer files keep among rope_parameters."""
    inner = content.get("rope_parameters")
    share = inner.get("partial_rotary_factor") if isinstance(inner, dict) else None
    return content if share is None else {**content, "partial_rotary_factor": share}


def _not_covered(content: Mapping[str, object], label: str) -> list[Problem]:
    """Problems of switches that change the model into one that is not described."""
    allowed = "; with --model it is traced, which needs torch and transformers"
    return [
        Problem(
            where=label, what=f"{key}: {what} are not described", found=show(content[key]), allowed=f"{only}{allowed}"
        )
        for key, (only, what) in _ONLY.items()
        if content.get(key) not in (None, only)
    ]


def _windows(content: Mapping[str, object], layer: Layer, label: str) -> None:
    """Which blocks see a window: none where it is switched off, else by the list of their kinds."""
    if content.get("use_sliding_window") is False:
        layer.values.pop("sliding_window", None)
    kinds = content.get("layer_types")
    if isinstance(kinds, list) and kinds:
        if "sliding_attention" not in kinds:
            layer.values.pop("sliding_window", None)
            layer.values.pop("sliding_window_pattern", None)
        elif "full_attention" in kinds:
            every = kinds.index("full_attention") + 1
            layer.values["sliding_window_pattern"] = SourcedValue(every, f"{label} (layer_types)")


def _activation(content: Mapping[str, object], layer: Layer, label: str, family: str) -> None:
    names = ("hidden_activation", "hidden_act", "activation_function")
    name = next((content[name] for name in names if content.get(name)), OWN_ACTIVATIONS.get(family, "silu"))
    known = _ACTIVATIONS.get(str(name))
    if known is None:
        allowed = ", ".join(_ACTIVATIONS)
        layer.problems.append(Problem(where=label, what="an unknown activation", found=show(name), allowed=allowed))
    else:
        layer.values["hidden_act"] = SourcedValue(known, label)


def _gpt2(content: Mapping[str, object], label: str) -> Layer:
    """GPT-2, which nanoGPT trains too."""
    layer = Layer()
    for key, default in _GPT2.items():
        names = _NAMES[key]
        given = next((content[name] for name in reversed(names) if content.get(name) is not None), None)
        where = label if given is not None else f"{label} (Hugging Face's default)"
        layer.values[key] = SourcedValue(default if given is None else given, where)
    positions = ("n_positions", "n_ctx", "max_position_embeddings")
    given = next((content[name] for name in positions if content.get(name) is not None), None)
    where = label if given is not None else f"{label} (Hugging Face's default)"
    for key in ("block_size", "max_position_embeddings"):
        layer.values[key] = SourcedValue(1024 if given is None else given, where)
    layer.values["bias"] = SourcedValue(True, label)
    _dropout(content, layer, label)
    if content.get("activation_function"):
        _activation(content, layer, label, "gpt2")
    if content.get("n_inner") is not None:
        layer.values["intermediate_size"] = SourcedValue(content["n_inner"], label)
    return layer


def _dropout(content: Mapping[str, object], layer: Layer, label: str) -> None:
    """nanoGPT has one dropout where Hugging Face has three, each 0.1 by default."""
    found = [content.get(name, 0.1) for name in _GPT2_DROPOUTS]
    said = any(name in content for name in _GPT2_DROPOUTS)
    where = label if said else f"{label} (Hugging Face's default)"
    layer.values["dropout"] = SourcedValue(found[0], where)
    layer.values["attention_dropout"] = SourcedValue(found[2], where)
    if any(value != found[0] for value in found):
        parts = ", ".join(f"{name} = {show(value)}" for name, value in zip(_GPT2_DROPOUTS, found, strict=True))
        layer.notes.append(f"{label}: nanoGPT has one dropout; the first of {parts} is used")


# --- by name ------------------------------------------------------------------------------------------------------


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """The models in `models.json`, by their names on the hub: each its own config.json, as far as it matters here."""
    text = resources.files("oomph.config").joinpath("models.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)["models"]
    return found


def find(name: str) -> tuple[str, Mapping[str, object]] | None:
    """A model by its name on the hub, or the last part of it: where its config was found, and the config.

    The local cache of huggingface_hub is looked at first, then `models.json`. Nothing is downloaded.
    """
    cached = _cached(name)
    if cached is not None:
        return cached
    models = known_models()
    by_short = {full.rpartition("/")[2].lower(): full for full in models}
    full = next((each for each in models if each.lower() == name.lower()), None) or by_short.get(name.lower())
    return (f"{full}'s config.json", models[full]) if full else None


def nearest_name(name: str) -> str | None:
    """The known model that a name comes closest to."""
    models = known_models()
    if "/" in name:
        return nearest(name, list(models))
    short = nearest(name.lower(), [full.rpartition("/")[2].lower() for full in models])
    return next((full for full in models if full.rpartition("/")[2].lower() == short), None)


def _cached(name: str) -> tuple[str, Mapping[str, object]] | None:
    """The config.json of a model that huggingface_hub has downloaded."""
    owner, slash, model = name.partition("/")
    if not slash or not owner or not model or "/" in model or ".." in name:
        return None
    home = os.environ.get("HF_HUB_CACHE") or str(
        Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"
    )
    folder = Path(home) / f"models--{owner}--{model}" / "snapshots"
    try:
        for snapshot in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True):
            file = snapshot / "config.json"
            if file.is_file() and file.stat().st_size < 2**20:
                content = json.loads(file.read_text(encoding="utf-8"))
                if isinstance(content, dict) and is_model(content):
                    return str(file), content
    except (OSError, ValueError):
        return None
    return None
