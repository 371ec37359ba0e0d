"""A config file of any format, recognised by content before suffix; and what the dataset's folder says about a run."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from oomph.config.layer import Layer, Scope, SourcedValue
from oomph.config.programs import PRESETS
from oomph.config.reading import checkpoint, nanogpt, pickles
from oomph.config.reading.documents import read_json, read_toml, read_yaml
from oomph.config.reading.hugging_face import is_model, nearest_name, stated_shape
from oomph.errors import InputError, Problem, nearest

NANOGPT = (".py", ".pt")  # suffixes of its configs and checkpoints
MAX_TEXT_BYTES = 2**18  # nanoGPT's whole train.py is 15 KiB
MAX_META_BYTES = 2**24
VOCABULARY_MULTIPLE = 64  # nanoGPT's 50304 is GPT-2's 50257 rounded up to a multiple of it
# The readme of each of nanoGPT's data/*/ (github.com/karpathy/nanoGPT at 3adf61e).
NANOGPT_DATASETS = {
    "openwebtext": {"dataset_tokens": 9_035_582_198},
    "shakespeare": {"dataset_tokens": 301_966},
    "shakespeare_char": {"dataset_tokens": 1_003_854, "vocab_size": 65},
}
TRAIN, META, MANIFEST = "train.bin", "meta.pkl", "meta.json"
HUGGING_FACE = "config.json"  # in the folder of a model
JSON = ".json"
ZIP_MAGIC = b"PK\x03\x04"  # torch.save writes zip archives
MAX_LISTED = 10_000  # names in a folder searched for the nearest one

_UNDERSTOOD = (
    "a nanoGPT .py file, .toml, Hugging Face's config.json, a fine-tuning's .yaml, a nanoGPT ckpt.pt, a model by its "
    f"name such as Qwen/Qwen3-0.6B, or one of {', '.join(PRESETS)}, nanochat-d20"
)


def read(path: Path, label: str, scope: Scope) -> Layer:
    """The layer of a file of any format, or of a model's folder. Raises `InputError` if the format is unknown."""
    if _inside(path) == str(path / HUGGING_FACE):
        path, label = path / HUGGING_FACE, str(Path(label) / HUGGING_FACE)
    head = _head(path, label)
    if head.startswith(ZIP_MAGIC):
        return checkpoint.read(path, label)
    _refuse_binary(head, label)
    return read_text(_text(path, label), label, scope)


def exists(name: str) -> bool:
    """Whether there is a file or folder of that name; False for a name that no file can have."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def is_model_file(path: Path) -> bool:
    """Whether a file is a model's `config.json`, under any name that ends in .json."""
    return path.suffix.lower() == JSON and is_model(_object(path))


def shape_of_model(path: Path) -> dict[str, int]:
    """The sizes that a `config.json` of any model family states under known names; empty if it cannot be
    read."""
    return stated_shape(_object(path))


def _object(path: Path) -> dict[str, object]:
    """The object in a small JSON file; empty if it is not such a file."""
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            return {}
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_text(text: str, label: str, scope: Scope) -> Layer:
    """The layer of a config's text; `label` is its name, whose suffix gives the format if the text does not."""
    suffix = Path(label).suffix.lower()
    if suffix in (".yaml", ".yml"):
        return read_yaml(text, label, scope)
    if suffix in (".ini", ".cfg"):
        raise InputError(Problem(where=label, what=f"{suffix} files are not understood", allowed=_UNDERSTOOD))
    if suffix == ".json" or (suffix not in (".py", ".toml") and text.lstrip().startswith("{")):
        return read_json(text, label, scope)
    layer = read_toml(text, label) if suffix == ".toml" else nanogpt.read(text, label, scope)
    if not text.strip():
        layer.notes.append(f"{label}: the file is empty; it changes nothing")
    elif not layer.values and not layer.problems:
        layer.notes.append(f"{label}: the file sets no key; it changes nothing")
    return layer


def _head(path: Path, label: str) -> bytes:
    """The first bytes of the file. Raises `InputError` if it is not a regular file."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise InputError(Problem(where=label, what="this is a folder", allowed="a file", nearest=_inside(path)))
        if not stat.S_ISREG(mode):
            raise InputError(Problem(where=label, what="this is not a regular file", allowed=_UNDERSTOOD))
        with path.open("rb") as stream:
            return stream.read(64)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(_missing(path, label)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(Problem(where=label, what=f"this cannot be opened: {reason}")) from None


def _missing(path: Path, label: str) -> Problem:
    near = nearest(path.name[:200], _names(path.parent))
    if near is not None:
        near = str(path.parent / near)
    elif not path.suffix[1:].isalpha():  # a model's name, which may end in a number: "Qwen3-0.7B"
        near = nearest(label[:200], PRESETS) or nearest_name(label[:200])
    return Problem(where=label, what="there is no such file, preset or model", allowed=_UNDERSTOOD, nearest=near)


def _inside(folder: Path) -> str | None:
    """The config file in a folder, such as the checkpoint of a nanoGPT out_dir; None if there is none."""
    names = _names(folder)
    best = next((name for name in ("config.toml", HUGGING_FACE, "ckpt.pt", "train.py") if name in names), None)
    return str(folder / best) if best else None


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in islice(folder.iterdir(), MAX_LISTED)]
    except (OSError, ValueError):  # no such folder, or not a valid name
        return []


def _refuse_binary(head: bytes, label: str) -> None:
    """Raises `InputError` for pickles and safetensors files, saying what to give instead."""
    if head.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        what = "a pickle, or a torch file from before torch 1.6: it cannot be read without running it"
        cure = "a checkpoint in torch's zip format: load this one with torch and torch.save it again"
        raise InputError(Problem(where=label, what=what, allowed=cure))
    if head[8:9] == b"{" and b"\0" in head[:8]:
        what = "a safetensors file: it holds weights and no settings"
        raise InputError(Problem(where=label, what=what, allowed="the config.json that lies beside it"))


def _text(path: Path, label: str) -> str:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_TEXT_BYTES + 1)
            size = stream.seek(0, 2)
    except OSError as error:
        raise InputError(Problem(where=label, what=f"this cannot be read: {error.strerror}")) from None
    if size > MAX_TEXT_BYTES:
        found = f"{size / 2**10:,.0f} KiB"
        raise InputError(Problem(where=label, what="too large for a config", found=found, allowed="at most 256 KiB"))
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(Problem(where=label, what="the file is in UTF-16", allowed="UTF-8: save it again as that"))
    if b"\0" in data:
        raise InputError(Problem(where=label, what="a binary file, not text", allowed=_UNDERSTOOD))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(Problem(where=f"{label}:{line}", what="the file is not in UTF-8")) from None


# --- the dataset's folder ------------------------------------------------------------------------------


def is_plain_name(dataset: str) -> bool:
    """Whether the dataset is a plain name, not a path to somewhere else."""
    return dataset not in (".", "..") and not any(letter in dataset for letter in "/\\:\0")


def look_at_dataset(dataset: str, roots: Iterable[Path]) -> Layer:
    """`dataset_tokens` and `vocab_size` from the dataset's folder; an empty layer if there is none.

    nanoGPT reads data/NAME in the folder it runs in; `roots` are that folder and those of the config files.
    """
    layer = Layer()
    folder = _folder(dataset, roots)
    if folder is None:
        return layer
    _manifest(folder / MANIFEST, layer)
    meta = _meta(folder / META, layer)
    words = meta.get("vocab_size")
    if isinstance(words, int) and not isinstance(words, bool):  # nanoGPT takes it as it is
        layer.values["vocab_size"] = SourcedValue(words, str(folder / META))
    if "dataset_tokens" in layer.values:
        return layer
    token_bytes = 4 if meta.get("dtype") in ("uint32", "int32") else 2
    train = folder / TRAIN
    size = train.stat().st_size if train.is_file() else 0
    if size >= token_bytes:
        layer.values["dataset_tokens"] = SourcedValue(size // token_bytes, f"{train}, at {token_bytes} bytes a token")
    return layer


def known_dataset(dataset: str) -> Layer:
    """The same for a dataset that nanoGPT has a recipe for, without its files."""
    known = NANOGPT_DATASETS.get(dataset, {})
    return Layer({key: SourcedValue(value, f"nanoGPT's {dataset}", firm=False) for key, value in known.items()})


def _folder(dataset: str, roots: Iterable[Path]) -> Path | None:
    """The first folder of that name that holds data."""
    for root in roots:
        for folder in (root / "data" / dataset, root / dataset):
            try:
                if any((folder / name).is_file() for name in (TRAIN, META, MANIFEST)):
                    return folder
            except (OSError, ValueError):  # not a valid file name
                continue
    return None


def _manifest(file: Path, layer: Layer) -> None:
    """Add what `oomph data` wrote next to its token files. The vocabulary is padded, as nanoGPT pads GPT-2's."""
    if not file.is_file() or file.stat().st_size > MAX_META_BYTES:
        return
    try:
        content = json.loads(file.read_bytes())
        tokens, words = int(content["splits"]["train"]["tokens"]), int(content["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        layer.notes.append(f"{file}: not a manifest of oomph data: skipped")
        return
    padded = -(-words // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    layer.values["dataset_tokens"] = SourcedValue(tokens, str(file))
    layer.values["vocab_size"] = SourcedValue(
        padded, f"{file}: {words}, rounded up to a multiple of {VOCABULARY_MULTIPLE}"
    )


def _meta(file: Path, layer: Layer) -> dict[object, object]:
    try:
        if not file.is_file():  # opening a named pipe would block
            return {}
        with file.open("rb") as stream:
            data = stream.read(MAX_META_BYTES + 1)
    except OSError:
        return {}
    try:
        if len(data) > MAX_META_BYTES:
            raise pickles.RefusedError("it is larger than 16 MiB")
        content = pickles.read(data)
    except pickles.RefusedError as refusal:
        layer.notes.append(f"{file}: not read, and nothing in it was run: {refusal}")
        return {}
    return content if isinstance(content, dict) else {}
