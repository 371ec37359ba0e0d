"""A user's own model for planning: from a template cached on disk, or traced now. Only a trace imports torch."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import msgspec

from oomph.config.schema import TrainConfig
from oomph.config.settle import installed
from oomph.errors import InputError, Problem
from oomph.step.collector import uncollected
from oomph.step.ops import Op, Step
from oomph.step.trace.flops import uncounted
from oomph.step.trace.template import SHORT, Lists, Template, TemplateFacts, points, step

KEPT = 64  # templates on disk: beyond this the oldest is deleted
MOST_BATCHES = 16  # batches whose lists are kept in memory: a search asks for each several times
_KEYS = ("trainer", "dtype", "autocast", "attention", "compile", "use_cache", "torch_version")


class TracedModel(msgspec.Struct, frozen=True):
    """A user's model at one batch size, for planning."""

    facts: TemplateFacts
    lists: Lists
    source: str  # where the lists come from

    def uncounted(self) -> tuple[str, ...]:
        """The operators whose arithmetic is not counted."""
        return tuple(uncounted(self._ops()))

    def unseen_bytes(self) -> int:
        """An upper bound of what a CPU's convolutions copy while they run."""
        return max((op.bytes_moved for op in self._ops() if ".convolution" in f".{op.name}"), default=0)

    def _ops(self) -> list[Op]:
        return [op for found in self.lists.sections.values() for op in found]

    def step(self, config: TrainConfig, cuda: bool, first: bool) -> Step:
        """The first optimizer step or a later one, with an evaluation if the program has one."""
        return step(self.facts, self.lists, config, cuda, first)


class OwnModel:
    """A user's own model, `file.py:function` or a Hugging Face `config.json`, with what has been traced of it."""

    def __init__(self, spec: str, of_search: bool = False) -> None:
        """`of_search`: many batches will be asked for, so a template should cover them, if necessary approximately."""
        self.spec, self.of_search = spec, of_search
        self._templates: list[tuple[tuple[object, ...], Template]] = []
        self._at: dict[tuple[int, int, int], TracedModel] = {}

    def at(self, config: TrainConfig, cuda: bool) -> TracedModel:
        """The model at a config's batch: from a cached template, or else traced now, which imports torch."""
        batch, tokens = config.batch_size, config.block_size
        template = self._template(config, cuda)
        found = self._at.get((id(template), batch, tokens))
        if found is None:
            scaled = config.compile and template.batch is None
            found_again = (("blocks", template.gap), ("tokens", template.tokens == SHORT), ("sequences", scaled))
            repeated = [what for what, so in found_again if so]
            source = "compiled trace" if config.compile else "traced"
            source += f", {' and '.join(repeated)} repeated" if repeated else ""
            found = TracedModel(template.facts, template.lists(batch, tokens), source)
            self._at = dict(list(self._at.items())[1 - MOST_BATCHES :]) | {(id(template), batch, tokens): found}
        return found

    def _template(self, config: TrainConfig, cuda: bool) -> Template:
        about, asked = _about(config, cuda), (config.batch_size, config.block_size)
        for known, template in self._templates:
            if known == about and template.covers(*asked):
                return template
        name = key(self.spec, config, cuda)
        found = load(name)
        if found is None and self.of_search and config.compile:
            name = key(self.spec, config, cuda, search=True)
            found = load(name)
        if found is None or not found.covers(*asked):
            found = _made(self.spec, config, cuda, self.of_search or name is not None, self.of_search)
            save(name, found)
        self._templates.append((about, found))
        return found


def _made(spec: str, config: TrainConfig, cuda: bool, cover_more: bool, search: bool) -> Template:
    needed, extra = (("torch", "transformers"), "hf") if spec.endswith(".json") else (("torch",), "train")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        what = f"tracing it needs {' and '.join(missing)}; try: pip install 'oomph[{extra}]'"
        raise InputError(Problem(spec, what))
    with uncollected():
        from oomph.step.trace.user_model import make_template

        return make_template(spec, config, cuda, cover_more, search)


def key(spec: str, config: TrainConfig, cuda: bool, search: bool = False) -> str | None:
    """The cache key of a Hugging Face config's template; None for a Python file, which may read anything.

    It covers everything that the lists depend on: the config, the versions, the run's keys, and the batches covered.
    """
    import hashlib  # with OpenSSL, needed only for a traced model

    path = Path(spec)
    if path.suffix != ".json" or not path.is_file():
        return None
    versions = [installed(name) for name in ("oomph", "torch", "transformers")]
    where = points(config.batch_size, config.block_size, cuda, bool(config.compile), search)
    about = (versions, where, *_about(config, cuda))
    return hashlib.sha256(path.read_bytes() + repr(about).encode()).hexdigest()[:32]


def _about(config: TrainConfig, cuda: bool) -> tuple[object, ...]:
    """The parts of a run, besides the batch, that change the lists."""
    threads = None if cuda else os.cpu_count()
    return *(getattr(config, name) for name in _KEYS), bool(config.checkpoint_layers), cuda, threads


def folder() -> Path:
    """The cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "oomph" / "templates"


def load(name: str | None) -> Template | None:
    """The cached template of that name; None if there is none, or it cannot be read."""
    if name is None:
        return None
    try:
        return msgspec.msgpack.decode((folder() / name).read_bytes(), type=Template)
    except (OSError, msgspec.MsgspecError):
        return None


def save(name: str | None, template: Template) -> None:
    """Cache a template, and delete the oldest beyond `KEPT`. Does nothing if the folder is not writable."""
    import tempfile  # needed only after a trace

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
