"""The user's own model as plans need it: from a template kept on disk, or traced now. Only a trace imports torch."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from oomph.config.schema import TrainConfig
from oomph.step.collector import uncollected
from oomph.step.ops import Step
from oomph.step.trace.flops import uncounted
from oomph.step.trace.template import SHORT, Template, TemplateFacts, points, steps

KEPT = 64  # templates on disk: the oldest goes
_KEYS = ("trainer", "dtype", "autocast", "attention", "compile", "torch_version")  # what of a config changes the lists


class TracedModel(msgspec.Struct, frozen=True):
    """A user's model as plans need it."""

    facts: TemplateFacts
    steps: tuple[Step, Step]  # the first optimizer step, and a later one
    source: str  # which way the lists came
    uncounted: tuple[str, ...] = ()  # operators whose arithmetic is in no figure
    unseen_bytes: int = 0  # at most: what a CPU's convolutions copy while they run


def traced(spec: str, config: TrainConfig, cuda: bool, workspace_bytes: Sequence[int]) -> TracedModel:
    """The model that `spec` names, from a template that is kept or else is made now, which imports torch.

    `spec` is `file.py:function` or a Hugging Face `config.json`.
    """
    name = key(spec, config, cuda)
    template = load(name)
    if template is None or not template.covers(config.batch_size, config.block_size):
        template = _made(spec, config, cuda, cover_more=name is not None)
        save(name, template)
    lists = template.lists(config.batch_size, config.block_size)
    ops = [op for found in lists.sections.values() for op in found]
    unseen = 0 if cuda else max((op.bytes_moved for op in ops if ".convolution" in f".{op.name}"), default=0)
    source = "compiled trace" if config.compile else "traced"
    repeated = [what for what, is_so in (("blocks", template.gap), ("tokens", template.tokens == SHORT)) if is_so]
    source += f", {' and '.join(repeated)} repeated" if repeated else ""
    found = steps(template.facts, lists, config, cuda, workspace_bytes)
    return TracedModel(template.facts, found, source, tuple(uncounted(ops)), unseen)


def _made(spec: str, config: TrainConfig, cuda: bool, cover_more: bool) -> Template:
    with uncollected():
        from oomph.step.trace.user_model import make_template

        return make_template(spec, config, cuda, cover_more)


def key(spec: str, config: TrainConfig, cuda: bool) -> str | None:
    """What a Hugging Face config's template is kept under; None for a file of Python, which may read anything.

    It names all that the lists depend on: the config, the versions, the keys of the run, and which batches it covers.
    """
    path = Path(spec)
    if path.suffix != ".json" or not path.is_file():
        return None
    versions = [_version(name) for name in ("oomph", "torch", "transformers")]
    keys = [getattr(config, name) for name in _KEYS]
    threads = None if cuda else os.cpu_count()
    where = points(config.batch_size, config.block_size, cuda, bool(config.compile))
    about = (versions, keys, bool(config.checkpoint_layers), cuda, threads, where)
    return hashlib.sha256(path.read_bytes() + repr(about).encode()).hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def folder() -> Path:
    """Where templates are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "oomph" / "templates"


def load(name: str | None) -> Template | None:
    """The template kept under that name; None where there is none, or none that can be read."""
    if name is None:
        return None
    try:
        return msgspec.msgpack.decode((folder() / name).read_bytes(), type=Template)
    except (OSError, msgspec.MsgspecError):
        return None


def save(name: str | None, template: Template) -> None:
    """Keep a template, and let go of the oldest beyond a number. A folder that cannot be written keeps none."""
    if name is None:
        return
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder(), delete=False) as file:
            file.write(msgspec.msgpack.encode(template))
        Path(file.name).replace(folder() / name)
        for old in sorted(folder().iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)
    except OSError:
        return
