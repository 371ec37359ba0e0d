"""Configs that are data: TOML (oomph's own format) and Hugging Face's `config.json`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from oomph.config.keys import keys
from oomph.config.layer import Layer, reason, unknown_keys
from oomph.config.values import Said, show
from oomph.errors import InputError, Problem

# Hugging Face's names for nanoGPT's, and what its GPT2Config takes where a file leaves one out
# (transformers, models/gpt2/configuration_gpt2.py).
_HF_SHAPE: dict[str, tuple[tuple[str, ...], object]] = {
    "n_layer": (("n_layer", "num_hidden_layers"), 12),
    "n_head": (("n_head", "num_attention_heads"), 12),
    "n_embd": (("n_embd", "hidden_size"), 768),
    "block_size": (("n_positions", "n_ctx", "max_position_embeddings"), 1024),
    "vocab_size": (("vocab_size",), 50257),
    "tie_weights": (("tie_word_embeddings",), True),
}
MAX_DOTS = 200  # tomllib takes a time that grows with the square of a dotted key's parts
_HF_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def read_toml(text: str, label: str) -> Layer:
    """The layer of a TOML file: keys at the top, one a line."""
    import tomllib

    if any(line.count(".") > MAX_DOTS for line in text.split("\n")):
        raise InputError(Problem(where=label, what=f"a line with more than {MAX_DOTS} dots", allowed="plain keys"))
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError, OverflowError) as error:
        line = re.search(r"at line ([0-9]+)", str(error))
        where = f"{label}:{line[1]}" if line else label
        raise InputError(Problem(where=where, what=f"not TOML: {reason(error)}")) from None
    layer = Layer(ours=True)
    lines = _lines(text)
    unknown: list[tuple[str, str]] = []
    for name, value in content.items():
        where = f"{label}:{lines[name]}" if name in lines else label
        if isinstance(value, dict | list):
            what = f"{name[:60]!r} is a {'table' if isinstance(value, dict) else 'list'}"
            allowed = "plain keys at the top, such as n_layer = 12"
            layer.problems.append(Problem(where=where, what=what, allowed=allowed))
        elif name in keys():
            layer.values[name] = Said(value, where)
        else:
            unknown.append((name, where))
    layer.problems += unknown_keys(unknown)
    return layer


def _lines(text: str) -> dict[str, int]:
    """The line on which each key or table first stands."""
    found: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        match = re.match(r"\s*\[{0,2}\s*[\"']?([A-Za-z0-9_-]+)", line)
        if match:
            found.setdefault(match[1], number)
    return found


def read_json(text: str, label: str) -> Layer:
    """The layer of a Hugging Face `config.json`, or of a flat object of our own keys."""
    import json

    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        where = f"{label}:{line}" if line else label
        raise InputError(Problem(where=where, what=f"not JSON: {reason(error)}")) from None
    if not isinstance(content, dict):
        raise InputError(Problem(where=label, what="not a config", found=show(content), allowed="an object of keys"))
    if "model_type" in content or "architectures" in content:
        return _hugging_face(content, label)
    return read_mapping(content, label)


def read_mapping(values: Mapping[str, object], where: str) -> Layer:
    """The layer of a mapping from keys to values."""
    layer = Layer()
    unknown: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(name, str) and name in keys():
            layer.values[name] = Said(value, where)
        else:
            unknown.append((str(name), where))
    layer.problems += unknown_keys(unknown)
    return layer


def _hugging_face(content: Mapping[str, object], label: str) -> Layer:
    family = content.get("model_type", "gpt2" if content.get("architectures") == ["GPT2LMHeadModel"] else None)
    if family != "gpt2":
        raise InputError(
            Problem(where=label, what="a model of another family", found=f"model_type {show(family)}", allowed="gpt2")
        )
    layer = Layer()
    for key, (names, default) in _HF_SHAPE.items():
        given = next((content[name] for name in names if content.get(name) is not None), None)
        where = label if given is not None else f"{label} (Hugging Face's default)"
        layer.values[key] = Said(default if given is None else given, where)
    layer.values["bias"] = Said(True, label)
    _dropout(content, layer, label)
    inner, width = content.get("n_inner"), layer.values["n_embd"].value
    if inner is not None and isinstance(width, int) and inner != 4 * width:
        layer.problems.append(
            Problem(where=label, what="n_inner is not 4 x n_embd", found=show(inner), allowed=f"{4 * width} or null")
        )
    return layer


def _dropout(content: Mapping[str, object], layer: Layer, label: str) -> None:
    """nanoGPT has one dropout where Hugging Face has three, each 0.1 unless said."""
    found = [content.get(name, 0.1) for name in _HF_DROPOUTS]
    said = any(name in content for name in _HF_DROPOUTS)
    layer.values["dropout"] = Said(found[0], label if said else f"{label} (Hugging Face's default)")
    if any(value != found[0] for value in found):
        parts = ", ".join(f"{name} = {show(value)}" for name, value in zip(_HF_DROPOUTS, found, strict=True))
        layer.notes.append(f"{label}: nanoGPT has one dropout; of {parts} the first is taken")
