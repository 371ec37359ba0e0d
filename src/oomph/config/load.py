"""A `TrainConfig` from presets, files, mappings and --key=value, each value with the place it came from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from oomph.config import files, hugging_face, nanochat
from oomph.config.documents import read_mapping
from oomph.config.expression import parse_text
from oomph.config.layer import UNSET, Layer, Scope, SourcedValue, UnknownValue, unknown_keys
from oomph.config.schema import (
    ALL_BLOCKS,
    GPT2_BLOCK,
    GPT2_SHAPES,
    GPT2_VOCABULARY,
    MANY,
    TRANSFORMERS,
    TrainConfig,
    keys,
)
from oomph.config.values import check
from oomph.errors import InputError, Problem

# Where a program's defaults are not nanoGPT's. The Trainer counts epochs and has no length: these two are assumed.
# Neither it nor a plain loop allows tf32, which torch itself has off (torch.backends.cuda.matmul.allow_tf32).
PROGRAM_DEFAULTS: dict[str, dict[str, object]] = {
    "hf": {
        "batch_size": 8, "gradient_accumulation_steps": 1, "compile": False, "learning_rate": 5e-5, "weight_decay": 0.0,
        "beta2": 0.999, "warmup_iters": 0, "block_size": 1024, "max_iters": 1000, "allow_tf32": False,
    },
    "torch": {
        "batch_size": 8, "gradient_accumulation_steps": 1, "compile": False, "learning_rate": 5e-5,
        "weight_decay": 0.01, "beta2": 0.999, "warmup_iters": 0, "block_size": 1024, "max_iters": 1000,
        "grad_clip": 0.0, "allow_tf32": False,
    },
    "nanochat": {**nanochat.DEFAULTS, **nanochat.shape(nanochat.DEPTH)},
}  # fmt: skip
PROGRAM_SOURCES = {
    "hf": "default of transformers' Trainer, or assumed",
    "torch": "default of a plain PyTorch loop, or assumed",
    "nanochat": "default of nanochat's base_train",
}
MAX_PROBLEMS = 100  # more than anybody fixes at once
SETTLED = ("dtype", "return_logits", "loss_chunk", "use_cache", "optimizer_loop")  # what `settle` always fills in
Override = tuple[str, str, str]  # key, value as written, where: ("batch_size", "8", "--batch_size=8")


class Pasted(NamedTuple):
    """A pasted config: text under a name, without a file."""

    name: str
    text: str


ConfigSource = str | os.PathLike[str] | Pasted


class LoadedConfig(msgspec.Struct, frozen=True):
    """A config, and where each of its values came from."""

    config: TrainConfig
    sources: dict[str, str]  # every key -> "default", "config/run.py:12", "--batch_size=8", ...
    notes: list[str] = msgspec.field(default_factory=list)  # what was skipped or decided, with its line
    files: list[str] = msgspec.field(default_factory=list)  # the files read, as the user named them

    def said(self, key: str) -> bool:
        """Whether anything gave this key a value."""
        return not self.sources[key].startswith("default")

    def data_roots(self) -> list[Path]:
        """Where data/NAME is looked for: here, and beside the config files and their folders."""
        folders = [Path(file).parent for file in self.files]
        return [Path(), *folders, *(folder.parent for folder in folders)]


def load(
    sources: ConfigSource | Sequence[ConfigSource] = (), overrides: Sequence[Override] = (), *, confined: bool = False
) -> LoadedConfig:
    """The config that defaults, presets, files and overrides give, later over earlier.

    `confined` is for configs from strangers: their dataset is looked for in ./data, by a plain name only. Raises
    `InputError` with every problem of all sources.
    """
    gathering = _Gathering(known=Scope(_defaults(), confined=confined), confined=confined)
    for source in [sources] if isinstance(sources, str | os.PathLike | Pasted) else sources:
        gathering.add_source(source)
    for key, text, where in overrides:
        gathering.add_override(key, text, where)
    return gathering.finish()


def is_model(name: str) -> bool:
    """Whether a name stands for a model: a preset, a known model, a model's config.json or a folder with one."""
    if not files.exists(name):
        return preset(name) is not None or hugging_face.find(name) is not None
    path = Path(name)
    return files.is_model_file(path / files.HUGGING_FACE if path.is_dir() else path)


def stated_values(text: str, name: str) -> dict[str, object]:
    """The keys that a config file's text sets, with values as it states them, valid or not; those that cannot be known
    without running it are left out."""
    layer = files.read_text(text, name, Scope(_defaults()))
    return {key: said.value for key, said in layer.values.items() if not isinstance(said.value, UnknownValue)}


def from_dict(values: Mapping[str, Any], where: str = "given") -> LoadedConfig:
    """The config of a mapping from keys to values."""
    gathering = _Gathering()
    gathering.add(read_mapping(values, where))
    return gathering.finish()


def as_loaded(config: LoadedConfig | TrainConfig | Mapping[str, Any] | ConfigSource | None) -> LoadedConfig:
    """Any config the Python API takes, as a `LoadedConfig`. For a `TrainConfig` no dataset is looked for; one that is
    settled, such as a plan's, is left as it is."""
    if isinstance(config, LoadedConfig):
        return config
    if isinstance(config, TrainConfig):
        given = {key.name: getattr(config, key.name) for key in keys().values()}
        gathering = _Gathering(look_at_data=False)
        changed = {name: SourcedValue(v, "given") for name, v in given.items() if v != keys()[name].default}
        if None not in (given[name] for name in SETTLED):
            kept = {name: SourcedValue(v, "default: settled", firm=False) for name, v in given.items()}
            changed = kept | changed
        gathering.add(Layer(values=changed))
        return gathering.finish()
    if config is None:
        return load()
    return from_dict(config) if isinstance(config, Mapping) else load([config])


def with_trainer(loaded: LoadedConfig, trainer: str) -> LoadedConfig:
    """The same run under another trainer. What was decided for the first trainer is unset, to be decided again."""
    undecided = {name: None for name, key in keys().items() if key.optional and not loaded.said(name)}
    config = msgspec.structs.replace(loaded.config, **undecided, trainer=trainer)
    sources = loaded.sources | dict.fromkeys(undecided, "default") | {"trainer": f"the same run under {trainer}"}
    return LoadedConfig(config, sources, loaded.notes, loaded.files)


@dataclass
class _Gathering:
    """Layers put over one another, with their notes and problems."""

    values: dict[str, SourcedValue] = field(
        default_factory=lambda: {name: SourcedValue(key.default, "default", firm=False) for name, key in keys().items()}
    )
    known: Scope = field(default_factory=lambda: Scope(_defaults()))
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    program: tuple[str, str] | None = (
        None  # the trainer that the first file with a format of its own is for, and the file
    )
    look_at_data: bool = True
    confined: bool = False  # look for data below this folder alone

    def add_source(self, source: ConfigSource) -> None:
        name = source.name if isinstance(source, Pasted) else os.fspath(source)
        if not isinstance(source, Pasted) and (found := preset(name)) is not None:
            self.add(found)
            self.program = self.program or (found.program, name) if found.program else self.program
            return
        try:
            layer = self._read(source, name)
        except InputError as error:
            self.problems.extend(error.problems)
            return
        if layer.program is not None and self.program is None:
            self.program = layer.program, name
        self.add(layer)

    def _read(self, source: ConfigSource, name: str) -> Layer:
        if isinstance(source, Pasted):
            layer = files.read_text(source.text, name, self.known)
        elif (model := hugging_face.find(name)) is not None and not Path(name).exists():
            where, content = model
            return hugging_face.read(content, where)
        else:
            layer = files.read(Path(name), name, self.known)
        self.files.append(name)
        return layer

    def add_override(self, name: str, text: str, where: str) -> None:
        name = name.replace("-", "_")
        if name in keys():
            self.add(Layer(values={name: SourcedValue(parse_text(keys()[name], text), where)}))
        elif name in self.known.foreign:
            self.notes.append(f"{where}: a key of the fork only; skipped")
        else:
            self.problems += unknown_keys([(name, where)])

    def add(self, layer: Layer) -> None:
        self.notes.extend(layer.notes)
        self.problems.extend(layer.problems)
        self.known.take(layer)
        for name, said in layer.values.items():
            if isinstance(said.value, UnknownValue) and said.value.needs_running and not keys()[name].needed:
                self.notes.append(f"{said.where}: {name} is skipped: {said.value.reason}")
            else:
                unset = said.value in (None, UNSET) and keys()[name].optional
                self.values[name] = SourcedValue(None, f"default: unset in {said.where}", firm=False) if unset else said

    def finish(self) -> LoadedConfig:
        if self.program is not None and self.values["trainer"].where == "default":
            program, name = self.program
            self.values["trainer"] = SourcedValue(program, f"default: {name} is in {program}'s format", firm=False)
        self._take_defaults()
        if (said := self.values["checkpoint_layers"]).value == ALL_BLOCKS:
            self.values["checkpoint_layers"] = SourcedValue(self.values["n_layer"].value, said.where, said.firm)
        if self.look_at_data:
            self._look_at_data()
        notes, problems = apply_init_from(self.values)
        valid, found = check(self.values)
        self.problems += problems + found
        if self.problems:
            raise InputError(self.problems[:MAX_PROBLEMS])
        values: dict[str, Any] = dict(valid)
        sources = {name: said.where for name, said in self.values.items()}
        return LoadedConfig(TrainConfig(**values), sources, self.notes + notes, self.files)

    def _take_defaults(self) -> None:
        """What the program has where nothing is said and nanoGPT has something else."""
        program = str(self.values["trainer"].value)
        found = [(key, value, PROGRAM_SOURCES[program]) for key, value in PROGRAM_DEFAULTS.get(program, {}).items()]
        if program in TRANSFORMERS:
            world = self.values["world_size"].value  # these count a device's own micro-steps, one unless told
            each = ("gradient_accumulation_steps", world, f"{PROGRAM_SOURCES[program]}: one a device")
            found = [each, *found] if isinstance(world, int) else found
            family = self.values["model_type"].value
            own = hugging_face.class_defaults(family)
            found += [(key, value, f"default of transformers' {family}") for key, value in own.items()]
        for key, value, where in found:
            if self.values[key].where == "default":
                self.values[key] = SourcedValue(value, where, firm=False)
        if program == "nanochat":
            self._keep_nanochats_batch()

    def _keep_nanochats_batch(self) -> None:
        """With another batch size nanochat takes more or fewer micro-steps, and batches of an evaluation."""
        steps = self.values["gradient_accumulation_steps"]
        sizes = [self.values[key].value for key in ("n_layer", "batch_size", "block_size")]
        depth, batch, block = (value if isinstance(value, int) and 0 < value < MANY else 0 for value in sizes)
        if (steps.where.startswith("preset") or not steps.firm) and depth and batch and block:
            value = nanochat.micro_steps(depth, batch, block)
            self.values["gradient_accumulation_steps"] = SourcedValue(value, steps.where, steps.firm)
        if self.values["eval_iters"].where == "default" and batch and block:
            count = nanochat.eval_iters(batch, block)
            self.values["eval_iters"] = SourcedValue(count, PROGRAM_SOURCES["nanochat"], firm=False)

    def _look_at_data(self) -> None:
        """Take what nanoGPT would find in the dataset's folder, for keys that are not set."""
        name = self.values["dataset"].value
        if not isinstance(name, str) or not name:
            return
        if self.confined and not files.is_plain_name(name):
            return
        folders = [] if self.confined else [Path(file).parent for file in self.files]
        found = files.look_at_dataset(name, [Path(), *folders, *(folder.parent for folder in folders)])
        self.notes.extend(found.notes)
        for key, said in found.values.items():
            from_scratch = self.values["init_from"].value == "scratch"
            if self.values[key].where == "default" and (key != "vocab_size" or from_scratch):
                self.values[key] = said


def _defaults() -> dict[str, object]:
    """The names a config file starts with: nanoGPT's defaults, and `__name__`."""
    named = {
        name: UnknownValue("it is not set") if key.default is None else key.default for name, key in keys().items()
    }
    return {**named, "__name__": "__main__"}


def preset(name: str) -> Layer | None:
    """The layer of a preset, a program's defaults with that size; None if no preset has that name."""
    program: str | None = None
    values: Mapping[str, int | str] | None = GPT2_SHAPES.get(name)
    if (depth := nanochat.depth_of(name)) is not None:
        program, values = "nanochat", {"model_type": "nanochat", **nanochat.shape(depth)}
    if values is None:
        return None
    return Layer({key: SourcedValue(value, f"preset {name}") for key, value in values.items()}, program=program)


def apply_init_from(values: dict[str, SourcedValue]) -> tuple[list[str], list[Problem]]:
    """Put the shape that `init_from = 'gpt2…'` loads over `values`, as nanoGPT does, with a note for each change."""
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
