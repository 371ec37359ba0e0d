"""The config inside a nanoGPT checkpoint (`ckpt.pt`), read without torch and without its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from oomph.config.keys import keys
from oomph.config.layer import Layer, SourcedValue
from oomph.config.reading import pickles
from oomph.errors import InputError, Problem

SHAPE_KEYS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")  # the weights have this shape


def read(path: Path, label: str) -> Layer:
    """The layer of a checkpoint: its `config`, overridden by the shape in its `model_args`."""
    content = _content(path, label)
    config, shape = content.get("config"), content.get("model_args")
    if not isinstance(config, dict) and not isinstance(shape, dict):
        raise InputError(
            Problem(
                where=label,
                what="this checkpoint holds neither 'config' nor 'model_args'",
                found="entries " + ", ".join(sorted(repr(str(name)[:30]) for name in list(content)[:6])),
                allowed="a checkpoint written by nanoGPT's train.py; for weights alone, give their config.json",
            )
        )
    layer = Layer()
    _take(layer, config if isinstance(config, dict) else {}, label, only=None)
    _take(layer, shape if isinstance(shape, dict) else {}, label, only=SHAPE_KEYS)
    return layer


def _take(layer: Layer, values: Mapping[object, object], label: str, only: tuple[str, ...] | None) -> None:
    for name, value in values.items():
        if not isinstance(name, str) or name not in keys():
            layer.notes.append(f"{label}: {str(name)[:60]} is not a key of nanoGPT or oomph; skipped")
            layer.foreign.add(str(name))
        elif value is not None and (only is None or name in only or name not in layer.values):
            layer.values[name] = SourcedValue(value, label)


def _content(path: Path, label: str) -> Mapping[object, object]:
    from zipfile import ZipFile

    try:
        with ZipFile(path) as archive:
            inside = [info for info in archive.infolist() if info.filename.endswith("data.pkl")]
            if not inside:
                raise InputError(Problem(where=label, what="a zip archive, but not one of torch: no data.pkl in it"))
            with archive.open(inside[0]) as stream:
                data = stream.read(pickles.MAX_PICKLE_BYTES + 1)
    except InputError:
        raise
    except Exception as error:  # zipfile and its decompressors raise a dozen kinds for a damaged archive
        what = f"the archive cannot be read: {str(error)[:100] or type(error).__name__}"
        raise InputError(Problem(where=label, what=what)) from None
    if len(data) > pickles.MAX_PICKLE_BYTES:
        raise InputError(Problem(where=label, what="its description of tensors is larger than 16 MiB"))
    return _mapping(data, label)


def _mapping(data: bytes, label: str) -> Mapping[object, object]:
    try:
        content = pickles.read(data)
    except pickles.RefusedError as refusal:
        raise InputError(
            Problem(
                where=label,
                what=f"the checkpoint was not read, and nothing in it was run: {refusal}",
                allowed="a checkpoint of tensors and plain values, as nanoGPT's train.py writes them",
            )
        ) from None
    if not isinstance(content, dict):
        raise InputError(Problem(where=label, what="a torch file, but not a checkpoint: it does not hold a dict"))
    return content
