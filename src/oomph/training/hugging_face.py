"""Weights from and to Hugging Face's folders: GPT-2, and Llama and Qwen3 for the modern recipe.

Hugging Face's GPT-2 stores four matrices of a block transposed (its Conv1D) and ties the head. Llama and Qwen3 have
separate matrices for queries, keys and values, and for gate and up; here each group is one matrix.
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
from oomph.config.init_from import hugging_face_shape, settings_in
from oomph.config.shape import head_size, inner_size, key_value_heads, qkv_widths
from oomph.data.errors import require
from oomph.errors import InputError, Problem
from oomph.files import write_whole
from oomph.training.model import GPT

MASKS = (".attn.bias", ".attn.masked_bias")  # causal masks that older versions save with the weights
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LONGEST = 4096  # tokens, at most, for an imported model, however many positions it has
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_NAMES = {
    "transformer.wte.": "model.embed_tokens.",
    "transformer.ln_f.": "model.norm.",
    "transformer.h.": "model.layers.",
}
_INSIDE = {
    ".attn.c_proj.": ".self_attn.o_proj.", ".attn.q_norm.": ".self_attn.q_norm.", ".attn.k_norm.": ".self_attn.k_norm.",
    ".mlp.c_proj.": ".mlp.down_proj.", ".ln_1.": ".input_layernorm.", ".ln_2.": ".post_attention_layernorm.",
}  # fmt: skip
_JOINED = {  # our matrix, and theirs that it consists of
    ".attn.c_attn.weight": tuple(f".self_attn.{name}_proj.weight" for name in "qkv"),
    ".mlp.c_fc.weight": (".mlp.gate_proj.weight", ".mlp.up_proj.weight"),
}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Every tensor in a safetensors file."""
    library = require("safetensors.torch", str(path))
    try:
        tensors: dict[str, Tensor] = library.load_file(path)
    except OSError as error:
        raise InputError(Problem(str(path), "cannot be read", found=error.strerror or str(error)[:120])) from None
    except Exception as error:  # the package's own class, known only if it is installed
        raise InputError(Problem(str(path), "not a valid safetensors file", found=str(error)[:120])) from None
    return tensors


def write_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a file that Hugging Face's libraries can read."""
    library = require("safetensors.torch", str(path))
    write_whole(path, library.save(dict(tensors), metadata={"format": "pt"}))


def read_folder(folder: Path) -> dict[str, Tensor]:
    """The weights in a Hugging Face folder with nanoGPT's names; its config.json says which model it is."""
    settings = settings_in(folder) or {}
    tensors = _all_tensors(folder)
    is_gpt2 = settings.get("model_type", "gpt2") == "gpt2"
    return from_gpt2(tensors) if is_gpt2 else _from_llama(tensors, huggingface_config(folder))


def _all_tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / SINGLE).is_file():
        return read_safetensors(folder / SINGLE)
    try:
        parts = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"[:120]
        raise InputError(Problem(str(folder / INDEX), "cannot be read", found, SINGLE)) from None
    # Only files in this folder: an index is untrusted data.
    return {name: tensor for part in parts for name, tensor in read_safetensors(folder / Path(part).name).items()}


def huggingface_config(folder: Path) -> TrainConfig:
    """The shape of the model in a Hugging Face folder, from its config.json. Raises `InputError` if it is not one."""
    shape = hugging_face_shape(folder)
    return TrainConfig(**shape | {"block_size": min(shape["block_size"], LONGEST)}, dropout=0.0)


def from_gpt2(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
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


def to_gpt2(weights: Mapping[str, Tensor], config: TrainConfig) -> dict[str, Tensor]:
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


def _sizes(name: str, config: TrainConfig) -> list[int]:
    """Rows of each matrix that one of ours consists of."""
    return qkv_widths(config) if ".attn." in name else [inner_size(config)] * 2


def _llamas_name(name: str) -> str:
    for ours, theirs in {**_NAMES, **_INSIDE}.items():
        name = name.replace(ours, theirs)
    return name


def to_llama(weights: Mapping[str, Tensor], config: TrainConfig) -> dict[str, Tensor]:
    """The weights with the names of transformers' Llama and Qwen3."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name == "lm_head.weight" and config.tie_weights:
            continue
        joined = next((suffix for suffix in _JOINED if name.endswith(suffix)), None)
        if joined is None:
            tensors[_llamas_name(name)] = tensor
            continue
        parts = torch.split(tensor, _sizes(name, config))
        tensors |= {
            _llamas_name(name.replace(joined, theirs)): part.contiguous()
            for theirs, part in zip(_JOINED[joined], parts, strict=True)
        }
    return tensors


def _from_llama(tensors: Mapping[str, Tensor], config: TrainConfig) -> dict[str, Tensor]:
    """The weights of a Llama or Qwen3 with nanoGPT's names; missing ones are detected later."""
    with torch.device("meta"):
        wanted = GPT(config).state_dict()
    named: dict[str, Tensor] = {}
    for name in wanted:
        joined = next((suffix for suffix in _JOINED if name.endswith(suffix)), None)
        theirs = (
            [_llamas_name(name)] if joined is None else [_llamas_name(name.replace(joined, t)) for t in _JOINED[joined]]
        )
        found = [tensors[each] for each in theirs if each in tensors]
        if len(found) == len(theirs):
            named[name] = found[0] if joined is None else torch.cat(found)
    if config.tie_weights and "transformer.wte.weight" in named:
        named.setdefault("lm_head.weight", named["transformer.wte.weight"])
    return named


def family_of(config: TrainConfig) -> str:
    """The transformers class that computes the same as the model. Raises `InputError` if there is none."""
    parts = {"position_embedding_type": "rotary", "norm_type": "rmsnorm", "is_gated_act": True, "bias": False}
    if all(getattr(config, key) == value for key, value in parts.items()):
        return "qwen3" if config.use_qk_norm else "llama"
    usual = {"position_embedding_type": "absolute", "norm_type": "layernorm", "is_gated_act": False}
    usual |= {"use_qk_norm": False}
    same_heads = key_value_heads(config) == config.n_head and config.n_head * head_size(config) == config.n_embd
    plain = all(getattr(config, key) == value for key, value in usual.items())
    if plain and same_heads and config.hidden_act in (None, "gelu"):
        return "gpt2"
    found = ", ".join(f"{key} = {getattr(config, key)!r}" for key in (*parts, "use_qk_norm", "hidden_act"))
    allowed = "GPT-2's parts, or Llama's: rotary positions, RMSNorm and a gated MLP without biases"
    raise InputError(Problem("--export", "no class of transformers computes this model", found, allowed))


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """The config.json that transformers needs to load the weights."""
    family = family_of(config)
    ends: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id"), 50256 if config.vocab_size > 50256 else None)
    ends |= {"model_type": family, "tie_word_embeddings": config.tie_weights, "vocab_size": config.vocab_size}
    if family == "gpt2":
        return ends | {
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": "gelu",  # the exact one, as in nanoGPT
            **{key: getattr(config, key) for key in ("n_layer", "n_head", "n_embd")},
            "n_positions": config.block_size,
            "layer_norm_epsilon": 1e-5,
            **{f"{part}_pdrop": config.dropout for part in ("attn", "embd", "resid")},
        }
    return ends | {
        "architectures": ["Qwen3ForCausalLM" if family == "qwen3" else "LlamaForCausalLM"],
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": key_value_heads(config),
        "head_dim": head_size(config),
        "hidden_size": config.n_embd,
        "intermediate_size": inner_size(config),
        "hidden_act": config.hidden_act or "silu",
        "max_position_embeddings": config.block_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,  # for transformers before 5
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_dropout": config.dropout,
    }


def export_huggingface(weights: Mapping[str, Tensor], config: TrainConfig, folder: Path) -> None:
    """Write a folder that transformers' `AutoModelForCausalLM.from_pretrained` can load."""
    settings = settings_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    convert = to_gpt2 if settings["model_type"] == "gpt2" else to_llama
    write_safetensors(convert(weights, config), folder / SINGLE)
    write_whole(folder / "config.json", (json.dumps(settings, indent=2) + "\n").encode())


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
    return from_gpt2(model.state_dict())
