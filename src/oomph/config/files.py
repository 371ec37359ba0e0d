"""A source named by the user, found and read: which format it is, told by content before suffix."""

from __future__ import annotations

import stat
from itertools import islice
from pathlib import Path

from oomph.config.layer import Known, Layer
from oomph.config.presets import PRESETS
from oomph.errors import InputError, Problem, nearest

MAX_TEXT_BYTES = 2**18  # nanoGPT's whole train.py is 15 KiB
ZIP_MAGIC = b"PK\x03\x04"  # torch.save writes zip archives
MAX_LISTED = 10_000  # names of a folder looked at for the nearest one

_UNDERSTOOD = (
    f"a nanoGPT .py file, .toml, Hugging Face's config.json, a nanoGPT ckpt.pt, or one of {', '.join(PRESETS)}"
)


def read(path: Path, label: str, known: Known) -> Layer:
    """The layer of a file of any format. Raises `InputError` where it is none we understand."""
    head = _head(path, label)
    if head.startswith(ZIP_MAGIC):
        from oomph.config.checkpoint import read as read_checkpoint

        return read_checkpoint(path, label)
    _refuse_binary(head, label)
    return read_text(_text(path, label), label, known)


def read_text(text: str, label: str, known: Known) -> Layer:
    """The layer of a config's text; `label` is its name, whose suffix tells the format where the text does not."""
    suffix = Path(label).suffix.lower()
    if suffix in (".yaml", ".yml", ".ini", ".cfg"):
        raise InputError(Problem(where=label, what=f"{suffix} files are not understood", allowed=_UNDERSTOOD))
    if suffix == ".json" or (suffix not in (".py", ".toml") and text.lstrip().startswith("{")):
        from oomph.config.documents import read_json

        return read_json(text, label)
    if suffix == ".toml":
        from oomph.config.documents import read_toml

        layer = read_toml(text, label)
    else:
        from oomph.config.nanogpt import read as read_python  # brings in ast

        layer = read_python(text, label, known)
    if not text.strip():
        layer.notes.append(f"{label}: the file is empty; it changes nothing")
    elif not layer.values and not layer.problems:
        layer.notes.append(f"{label}: the file sets no key; it changes nothing")
    return layer


def _head(path: Path, label: str) -> bytes:
    """The first bytes of the file, once it is sure to be one."""
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
    elif path.parent == Path():
        near = nearest(path.name[:200], PRESETS)
    return Problem(where=label, what="there is no such file or preset", allowed=_UNDERSTOOD, nearest=near)


def _inside(folder: Path) -> str | None:
    """The config a folder holds, such as the checkpoint of a nanoGPT out_dir."""
    names = _names(folder)
    best = next((name for name in ("config.toml", "config.json", "ckpt.pt", "train.py") if name in names), None)
    return str(folder / best) if best else None


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in islice(folder.iterdir(), MAX_LISTED)]
    except OSError:
        return []


def _refuse_binary(head: bytes, label: str) -> None:
    """What is not text is refused by what it seems to be."""
    if head.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        what = "a pickle, or a torch file in the format from before torch 1.6: it cannot be read without running it"
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
