"""A model's own `config.json` as Hugging Face writes it, and the most popular models by name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from oomph.config.keys import KEYS, keys
from oomph.config.layer import Layer, SourcedValue
from oomph.config.programs import GPT2_BLOCK, MODEL_TYPES, READ_BY
from oomph.config.schema import MOST_BLOCKS, TrainConfig
from oomph.config.values import coerce, show
from oomph.errors import InputError, Problem, nearest

# Our keys and their names in transformers' configs, in order of precedence.
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
# Keys with one supported value: the key, that value, and what any other value means.
_ONLY: dict[str, tuple[object, str]] = {
    "mlp_only_layers": ([], "blocks without experts among blocks with them"),
    "decoder_sparse_step": (1, "blocks without experts among blocks with them"),
    "output_router_logits": (False, "a loss that balances the experts"),
    "router_jitter_noise": (0.0, "noise on the router's input"),
    "layer_norm_elementwise_affine": (True, "layer norms without weights"),
    "_remove_final_layer_norm": (False, "no layer norm after the last block"),
    "layerdrop": (0.0, "blocks left out at random"),
    "mlp_bias": (False, "biases in the MLP"),
    "no_bias": (True, "biases in every linear layer"),
}
# Defaults of a family's class (transformers 5.22, configuration_*.py). What is not here is
# unset there too, and follows from the rest: a head's size from the width, for example.
_DEFAULTS: dict[str, dict[str, object]] = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "tie_weights": True, "bias": True,
             "dropout": 0.1, "max_position_embeddings": 1024},
    "gpt_neox": {"n_layer": 44, "n_head": 64, "n_embd": 6144, "intermediate_size": 24576, "vocab_size": 50432,
                 "tie_weights": False, "bias": True, "partial_rotary_factor": 0.25},
    "opt": {"n_layer": 12, "n_head": 12, "n_embd": 768, "intermediate_size": 3072, "vocab_size": 50272,
            "tie_weights": True, "bias": True, "dropout": 0.1, "attention_dropout": 0.0,
            "max_position_embeddings": 2048},
    "mixtral": {"n_layer": 32, "n_head": 32, "n_embd": 4096, "intermediate_size": 14336, "vocab_size": 32000,
                "tie_weights": False, "num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"n_layer": 24, "n_head": 32, "n_embd": 2048, "intermediate_size": 6144, "vocab_size": 151936,
                  "tie_weights": False, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
                  "moe_intermediate_size": 768, "norm_topk_prob": False},
    "llama": {"n_layer": 32, "n_head": 32, "n_embd": 4096, "intermediate_size": 11008, "vocab_size": 32000,
              "tie_weights": False},
    "mistral": {"n_layer": 32, "n_head": 32, "n_embd": 4096, "intermediate_size": 14336, "vocab_size": 32000,
                "tie_weights": False, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"n_layer": 32, "n_head": 32, "n_embd": 4096, "intermediate_size": 22016, "vocab_size": 151936,
              "tie_weights": False, "num_key_value_heads": 32},
    "qwen3": {"n_layer": 32, "n_head": 32, "n_embd": 4096, "intermediate_size": 22016, "vocab_size": 151936,
              "tie_weights": False, "num_key_value_heads": 32, "head_dim": 128},
    "qwen": {"n_layer": 32, "n_head": 32, "n_embd": 4096, "intermediate_size": 22016, "vocab_size": 151936,
             "tie_weights": False},
    "olmo2": {"n_layer": 32, "n_head": 32, "n_embd": 4096, "intermediate_size": 11008, "vocab_size": 50304,
              "tie_weights": False},
    "phi3": {"n_layer": 32, "n_head": 32, "n_embd": 3072, "intermediate_size": 8192, "vocab_size": 32064,
             "tie_weights": False},
    "gemma2": {"n_layer": 26, "n_head": 8, "n_embd": 2304, "intermediate_size": 9216, "vocab_size": 256000,
               "tie_weights": True, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
               "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2},
    "gemma3_text": {"n_layer": 26, "n_head": 8, "n_embd": 2304, "intermediate_size": 9216, "vocab_size": 262208,
                    "tie_weights": True, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
                    "sliding_window_pattern": 6},
}  # fmt: skip
# Families whose window is off unless use_sliding_window is set, and those that have it only in their last blocks.
_SWITCHED = ("qwen2", "qwen3", "qwen3_moe")
_LAST_BLOCKS = ("qwen2", "qwen3")
_WINDOW, _WINDOWED_FROM = 4096, 28  # defaults of sliding_window and max_window_layers when it is on
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu_new",
    "relu": "relu",
}  # fmt: skip
# Default activations of a family's class; silu for the others.
OWN_ACTIVATIONS = {"gpt2": "gelu_new", "gpt_neox": "gelu", "opt": "relu", "gemma2": "gelu", "gemma3_text": "gelu"}
_POSITIONS = {"opt": 2048, "qwen": 8192}  # default lengths of families with a table or mask of positions
_KINDS = {"full_attention", "sliding_attention"}
_NESTED = ("text_config",)  # where a multimodal model keeps its language model
_ALIASES = {"gemma3": "gemma3_text"}
_GPT2 = ("n_layer", "n_head", "n_embd", "vocab_size", "tie_weights")
_ACTIVATION_NAMES = ("hidden_activation", "hidden_act", "activation_function")
_POSITION_NAMES = ("n_positions", "n_ctx", "max_position_embeddings")
_GPT2_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def is_model(content: Mapping[str, object]) -> bool:
    """Whether a JSON object is a model's config: it says so, or has transformers' names for our keys."""
    theirs = {name for names in _NAMES.values() for name in names} - set(KEYS)
    return not {"model_type", "architectures", *theirs}.isdisjoint(content)


def read(content: Mapping[str, object], label: str) -> Layer:
    """The layer of a model's `config.json`. Raises `InputError` for an unsupported architecture."""
    content, left_out = _language_model(content, label)
    family = content.get("model_type", "gpt2" if content.get("architectures") == ["GPT2LMHeadModel"] else None)
    if family not in MODEL_TYPES or not isinstance(family, str):
        raise InputError(_not_described(content, family, label))
    layer = _gpt2(content, label) if family == "gpt2" else _described(content, family, label)
    layer.is_model = True
    layer.notes += left_out
    layer.problems += _not_covered(content, label)
    return layer


def _language_model(content: Mapping[str, object], label: str) -> tuple[Mapping[str, object], list[str]]:
    """The part of a config that is planned, and notes on parts that are not: an image encoder, a quantization."""
    parts = [name for name, value in content.items() if name.endswith("_config") and isinstance(value, dict) and value]
    for name in _NESTED:
        if isinstance(inner := content.get(name), dict) and inner:
            parts.remove(name)
            content = {"model_type": _ALIASES.get(str(content.get("model_type")), content.get("model_type")), **inner}
    if not parts:
        return content, []
    return content, [f"{label}: not in the figures, which are the language model's alone: {', '.join(parts)}"]


def _not_described(content: Mapping[str, object], family: object, label: str) -> Problem:
    """The problem with a config whose architecture is missing or unsupported."""
    if family is not None:
        return Problem(
            where=label, what="an architecture that is not described", found=f"model_type {show(family)}",
            allowed=f"{', '.join(MODEL_TYPES)}; any other with --model {label}, which needs torch and transformers",
        )  # fmt: skip
    classes = content.get("architectures")
    named = str(classes[0]) if isinstance(classes, list) and classes else ""
    like = [each for each in MODEL_TYPES if named.lower().startswith(each.removesuffix("_text").replace("_", ""))]
    return Problem(
        where=label,
        what="a Hugging Face config without model_type, which says the architecture",
        found=f"architectures {named}" if named else None,
        allowed=f'a line "model_type": one of {", ".join(MODEL_TYPES)}',
        nearest=max(like, key=len, default=None),
    )


def _described(content: Mapping[str, object], family: str, label: str) -> Layer:
    """The layer of an architecture that only transformers trains."""
    layer = Layer(program="hf")
    layer.values["model_type"] = SourcedValue(family, label)
    defaults = _DEFAULTS.get(family, {})
    content = _with_rotary(content)
    for key, names in _NAMES.items():
        if family not in READ_BY.get(key, (family,)):
            continue
        name = _name_in(content, names)
        if name is not None:
            layer.values[key] = SourcedValue(content[name], label, name=name)
        elif key in defaults:
            layer.values[key] = SourcedValue(defaults[key], f"{label} (transformers' default)")
    if family in _POSITIONS:
        count = content.get("max_position_embeddings", _POSITIONS[family])
        layer.values["max_position_embeddings"] = SourcedValue(count, label)
    _windows(content, layer, label, family)
    _activation(content, layer, label, family)
    return layer


def _name_in(content: Mapping[str, object], names: Iterable[str]) -> str | None:
    """The name under which a file gives a key: the first with a value, else one that is null; None if absent."""
    stated = [name for name in names if name in content]
    return next((name for name in stated if content[name] is not None), stated[0] if stated else None)


def stated_shape(content: Mapping[str, object]) -> dict[str, int]:
    """Layers, heads, width and vocabulary of a model of any family, if its config states them under known names and
    their values are possible."""
    inner = next((content[name] for name in _NESTED if isinstance(content.get(name), dict)), content)
    assert isinstance(inner, Mapping)
    names = {key: _NAMES[key] for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
    names["n_layer"] = (*names["n_layer"], "num_layers", "n_layers")
    found = {key: inner[name] for key, known in names.items() if (name := _name_in(inner, known)) is not None}
    sound = {key: coerce(keys()[key], value, "") for key, value in found.items()}
    shape = {key: value for key, value in sound.items() if isinstance(value, int)}
    if "n_head" not in shape or shape.get("n_embd", 1) % shape["n_head"]:  # the head size may be set separately
        shape = {key: value for key, value in shape.items() if key not in ("n_head", "n_embd")}
    return shape


def class_defaults(family: object) -> Mapping[str, object]:
    """The defaults of a family's class in transformers."""
    return _DEFAULTS.get(str(family), {})


def _with_rotary(content: Mapping[str, object]) -> Mapping[str, object]:
    """The config with the rotated share of a head, which newer files keep in rope_parameters."""
    inner = content.get("rope_parameters")
    share = inner.get("partial_rotary_factor") if isinstance(inner, dict) else None
    return content if share is None else {**content, "partial_rotary_factor": share}


def _not_covered(content: Mapping[str, object], label: str) -> list[Problem]:
    """Problems with switches that make the model an unsupported one."""
    allowed = "; with --model it is traced, which needs torch and transformers"
    return [
        Problem(
            where=label, what=f"{key}: {what} are not described", found=show(content[key]), allowed=f"{only}{allowed}"
        )
        for key, (only, what) in _ONLY.items()
        if content.get(key) not in (None, only)
    ]


def _windows(content: Mapping[str, object], layer: Layer, label: str, family: str) -> None:
    """Set which blocks use a sliding window: none if it is switched off, else by the list of their kinds."""
    unset = SourcedValue(None, label)
    if family in _SWITCHED:
        if not content.get("use_sliding_window"):
            layer.values["sliding_window"] = unset
        elif "sliding_window" not in content:
            layer.values["sliding_window"] = SourcedValue(_WINDOW, f"{label} (transformers' default)")
    windowed = _windowed(content, layer, family)
    if not windowed:
        return
    if not any(windowed):
        layer.values |= {"sliding_window": unset, "sliding_window_pattern": unset}
    elif all(windowed):
        layer.values["sliding_window_pattern"] = unset
    else:
        every = windowed.index(False) + 1
        layer.values["sliding_window_pattern"] = SourcedValue(every, f"{label} (layer_types)")
        if any(each != ((block + 1) % every != 0) for block, each in enumerate(windowed)):
            what = "blocks with and without a window that do not take turns are not described"
            allowed = "every so many blocks one without; with --model it is traced, which needs torch and transformers"
            layer.problems.append(Problem(where=label, what=what, allowed=allowed))


def _windowed(content: Mapping[str, object], layer: Layer, family: str) -> list[bool]:
    """Whether each block uses a window, if the config lists it or gives the first such block; else empty."""
    kinds, blocks = content.get("layer_types"), layer.values["n_layer"].value
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != blocks or not set(map(str, kinds)) <= _KINDS:
            what, allowed = (
                "layer_types does not say of every block what it is",
                f"{blocks} of {', '.join(sorted(_KINDS))}",
            )
            layer.problems.append(Problem(layer.values["n_layer"].where, what, show(kinds), allowed))
            return []
        return [kind == "sliding_attention" for kind in kinds]
    start = content.get("max_window_layers", _WINDOWED_FROM)
    on = family in _LAST_BLOCKS and layer.values["sliding_window"].value is not None
    if not on or not isinstance(start, int) or not isinstance(blocks, int):
        return []
    return [block >= start for block in range(min(blocks, MOST_BLOCKS))]


def _activation(content: Mapping[str, object], layer: Layer, label: str, family: str) -> None:
    own = OWN_ACTIVATIONS.get(family, "silu")
    name = next((content[name] for name in _ACTIVATION_NAMES if content.get(name)), own)
    known = _ACTIVATIONS.get(str(name))
    if known is None:
        allowed = ", ".join(_ACTIVATIONS)
        layer.problems.append(Problem(where=label, what="an unknown activation", found=show(name), allowed=allowed))
    else:
        layer.values["hidden_act"] = SourcedValue(known, label)


def _gpt2(content: Mapping[str, object], label: str) -> Layer:
    """GPT-2, which nanoGPT trains too."""
    layer = Layer({"model_type": SourcedValue("gpt2", label)})
    looked_for = {key: tuple(reversed(_NAMES[key])) for key in _GPT2}
    looked_for |= dict.fromkeys(("block_size", "max_position_embeddings"), _POSITION_NAMES)
    for key, names in looked_for.items():
        name, default = _name_in(content, names), _DEFAULTS["gpt2"].get(key, GPT2_BLOCK)
        if name is None or content[name] is None:
            layer.values[key] = SourcedValue(default, f"{label} (Hugging Face's default)")
        else:
            layer.values[key] = SourcedValue(content[name], label, name=name)
    layer.values["bias"] = SourcedValue(True, label)
    _dropout(content, layer, label)
    if content.get("activation_function"):
        _activation(content, layer, label, "gpt2")
    if content.get("n_inner") is not None:
        layer.values["intermediate_size"] = SourcedValue(content["n_inner"], label, name="n_inner")
    return layer


def _dropout(content: Mapping[str, object], layer: Layer, label: str) -> None:
    """nanoGPT has one dropout where Hugging Face has three, each 0.1 by default."""
    found = [content.get(name, 0.1) for name in _GPT2_DROPOUTS]
    said = any(name in content for name in _GPT2_DROPOUTS)
    where = label if said else f"{label} (Hugging Face's default)"
    layer.values["dropout"] = SourcedValue(found[0], where, name=_GPT2_DROPOUTS[0])
    layer.values["attention_dropout"] = SourcedValue(found[2], where, name=_GPT2_DROPOUTS[2])
    if any(value != found[0] for value in found):
        parts = ", ".join(f"{name} = {show(value)}" for name, value in zip(_GPT2_DROPOUTS, found, strict=True))
        layer.notes.append(f"{label}: nanoGPT has one dropout; the first of {parts} is used")


# --- back again ---------------------------------------------------------------------------------------------------


def _weights_dtype(config: TrainConfig) -> str | None:
    if config.method != "full":
        return config.base_dtype or config.dtype
    return "float32" if config.autocast else config.dtype


def written(config: TrainConfig) -> dict[str, object]:
    """The arguments of transformers' config class for this model: every key under all of its names there.

    What changes neither memory nor time is left to the class: the base of rotary embeddings, the norms' epsilon.
    """
    theirs = {name: getattr(config, key) for key, names in _NAMES.items() for name in names}
    theirs |= dict.fromkeys(_ACTIVATION_NAMES, config.hidden_act)
    theirs |= dict(zip(_GPT2_DROPOUTS, (config.dropout, config.dropout, config.attention_dropout), strict=True))
    theirs |= dict.fromkeys(_POSITION_NAMES, config.max_position_embeddings)
    kinds = ("full_attention", "sliding_attention")
    return theirs | {
        "layer_types": [kinds[each] for each in windowed(config)],
        "use_sliding_window": config.sliding_window is not None,
        "use_cache": config.use_cache,
        "torch_dtype": _weights_dtype(config),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),  # the defaults may exceed a small vocabulary
    }


def windowed(config: TrainConfig) -> list[bool]:
    """Whether each block uses a sliding window."""
    every = config.sliding_window_pattern
    return [bool(config.sliding_window) and (not every or (block + 1) % every != 0) for block in range(config.n_layer)]


# --- by name ------------------------------------------------------------------------------------------------------


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """The models in `models.json`, by their names on the hub: the relevant part of each one's config.json."""
    text = Path(__file__).with_name("models.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)["models"]
    return found


def find(name: str) -> tuple[str, Mapping[str, object]] | None:
    """A model by its name on the hub, or the last part of it: where its config was found, and the config.

    The local cache of huggingface_hub is searched first, then `models.json`. Nothing is downloaded.
    """
    return _cached(name) or find_known(name)


def find_known(name: str) -> tuple[str, Mapping[str, object]] | None:
    """The same from `models.json` alone: whatever the name, nothing else on the disk is read."""
    models = known_models()
    by_short = {full.rpartition("/")[2].lower(): full for full in models}
    full = next((each for each in models if each.lower() == name.lower()), None) or by_short.get(name.lower())
    return (f"{full}'s config.json", models[full]) if full else None


def nearest_name(name: str) -> str | None:
    """The known model whose name is closest."""
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
