"""A `TrainConfig` from presets, files, mappings and --key=value, each value with the place it came from."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec

from oomph.config.defaults import apply_defaults, apply_recipe, preset
from oomph.config.init_from import apply_init_from, shape_of
from oomph.config.keys import keys
from oomph.config.layer import UNSET, Layer, Scope, SourcedValue, UnknownValue, unknown_keys
from oomph.config.lengths import apply_lengths
from oomph.config.reading import files, hugging_face
from oomph.config.reading.documents import looks_like_toml, read_mapping
from oomph.config.reading.expression import parse_text
from oomph.config.schema import ALL_BLOCKS, INITS, TrainConfig
from oomph.config.shape import OF_THE_MODEL
from oomph.config.validate import check
from oomph.errors import InputError, Problem

MAX_PROBLEMS = 100  # problems shown at once
SETTLED = ("dtype", "return_logits", "loss_chunk", "use_cache", "optimizer_loop")  # keys that `settle` always fills in
DECIDED_WITH_IT = ("return_logits", "loss_chunk", "fused_loss", "padding")  # keys that a traced model decides, too
MODELS_OWN = "default: the traced model's own"  # the source of a key that a traced model decides
Override = tuple[str, str, str]  # key, value as written, where: ("batch_size", "8", "--batch_size=8")


_YAML = re.compile(r"(?:[ \t]*(?:#[^\n]*|---)?\n)*[A-Za-z_]\w*:(?:\s|$)")  # its first line that is not a comment


class Pasted(NamedTuple):
    """A config without a file: text under a name, whose suffix is its format."""

    name: str
    text: str

    @classmethod
    def named(cls, text: str, filename: str | None = None) -> Pasted:
        """The text under its filename, or under one with a fitting suffix. An object is JSON, whatever its name."""
        text = text.removeprefix("\ufeff")  # the byte order mark that some editors write
        if "\0" in text:
            raise InputError(
                Problem("config", "a binary file, not text", allowed="a .py, .toml, .json or .yaml config")
            )
        name = PurePosixPath((filename or "").replace("\\", "/").strip()).name
        if text.lstrip().startswith("{"):
            name = f"{PurePosixPath(name or 'config').stem}.json"
        own = "config.yaml" if _YAML.match(text) else "config.toml" if looks_like_toml(text) else "config.py"
        return cls(name or own, text)


STDIN = "-"  # as a source: standard input
ConfigSource = str | os.PathLike[str] | Pasted


class LoadedConfig(msgspec.Struct, frozen=True):
    """A config, and where each of its values came from."""

    config: TrainConfig
    sources: dict[str, str]  # every key -> "default", "config/run.py:12", "--batch_size=8", ...
    notes: list[str] = msgspec.field(default_factory=list)  # what was skipped or decided, with its line
    files: list[str] = msgspec.field(default_factory=list)  # the files read, as the user named them
    model: str | None = None  # "file.py:function" or a config.json: traced in place of the config's model
    weights: str | None = None  # what `init_from` named: a run, a checkpoint or a Hugging Face folder
    foreign: tuple[str, ...] = ()  # a fork's own keys that change a step, unknown to the plan

    def said(self, key: str) -> bool:
        """Whether any source set this key."""
        return not self.sources[key].startswith("default")

    @property
    def traces_transformers(self) -> bool:
        """Whether the model that is traced is one of transformers', built from its config.json."""
        return self.model is not None and self.model.endswith(files.JSON)

    def data_roots(self) -> list[Path]:
        """The folders searched for data/NAME: this one, those of the config files, and their parents."""
        folders = [Path(file).parent for file in self.files]
        return [Path(), *folders, *(folder.parent for folder in folders)]


def load(
    sources: ConfigSource | Sequence[ConfigSource] = (),
    overrides: Sequence[Override] = (),
    *,
    confined: bool = False,
    model: str | None = None,
) -> LoadedConfig:
    """The config from defaults, presets, files and overrides; later ones win.

    `confined` is for untrusted configs: their dataset is looked for in ./data, by a plain name only. `model` is
    traced in place of the config's own. Raises `InputError` with every problem of all sources.
    """
    gathering = _Gathering(known=Scope(_defaults(), confined=confined), confined=confined, model=model)
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
    """The keys that a config file's text sets, with values as written, valid or not; values that cannot be known
    without running it are left out."""
    layer = files.read_text(text, name, Scope(_defaults()))
    return {key: said.value for key, said in layer.values.items() if not isinstance(said.value, UnknownValue)}


def from_dict(values: Mapping[str, Any], where: str = "given") -> LoadedConfig:
    """The config from a mapping of keys to values."""
    gathering = _Gathering()
    gathering.add(read_mapping(values, where))
    return gathering.finish()


def as_loaded(
    config: LoadedConfig | TrainConfig | Mapping[str, Any] | ConfigSource | None,
    given: Mapping[str, Any] | None = None,
    model: str | None = None,
) -> LoadedConfig:
    """Any config the Python API takes, with `given` keys over it and `model` traced in place of its own.

    For a `TrainConfig` no dataset is looked up; a settled one, such as a plan's, is left as it is.
    """
    if isinstance(config, LoadedConfig):
        if not given and model in (None, config.model):
            return config
        model = model or config.model
    gathering = _Gathering(look_at_data=not isinstance(config, LoadedConfig | TrainConfig), model=model)
    if isinstance(config, LoadedConfig):
        gathering.take(config)
    elif isinstance(config, TrainConfig):
        gathering.add(_layer_of(config))
    elif isinstance(config, Mapping):
        gathering.add(read_mapping(config, "given"))
    elif config is not None:
        gathering.add_source(config)
    gathering.add(read_mapping(given or {}, "given"))
    return gathering.finish()


def _layer_of(config: TrainConfig) -> Layer:
    """The layer of a config: the values that are not defaults, or all of them if it is settled."""
    given = {name: getattr(config, name) for name in keys()}
    said = {name: SourcedValue(v, "given") for name, v in given.items() if v != keys()[name].default}
    if None in (given[name] for name in SETTLED):
        return Layer(values=said)
    return Layer(values={name: SourcedValue(v, "default: settled", firm=False) for name, v in given.items()} | said)


def with_trainer(loaded: LoadedConfig, trainer: str) -> LoadedConfig:
    """The same run under another trainer. What was decided for the first trainer is unset, to be decided again."""
    undecided = {name: None for name, key in keys().items() if key.optional and not loaded.said(name)}
    config = msgspec.structs.replace(loaded.config, **undecided, trainer=trainer)
    sources = loaded.sources | dict.fromkeys(undecided, "default") | {"trainer": f"the same run under {trainer}"}
    return msgspec.structs.replace(loaded, config=config, sources=sources)


class _Gathering(msgspec.Struct):
    """Layers put over one another, with their notes and problems."""

    values: dict[str, SourcedValue] = msgspec.field(
        default_factory=lambda: {name: SourcedValue(key.default, "default", firm=False) for name, key in keys().items()}
    )
    known: Scope = msgspec.field(default_factory=lambda: Scope(_defaults()))
    notes: list[str] = msgspec.field(default_factory=list)
    problems: list[Problem] = msgspec.field(default_factory=list)
    files: list[str] = msgspec.field(default_factory=list)
    foreign: set[str] = msgspec.field(default_factory=set)
    program: tuple[str, str] | None = None  # the trainer of the first file in a program's format; the file
    look_at_data: bool = True
    confined: bool = False  # look for data only in this folder
    model: str | None = None  # traced in place of the config's own
    of_model: dict[str, SourcedValue] = msgspec.field(default_factory=dict)  # set by the last whole model
    weights: str | None = None  # the path in init_from

    def add_source(self, source: ConfigSource) -> None:
        if source == STDIN:
            source = _from_stdin()
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
        self._name_nanogpts_model(layer, name)

    def _name_nanogpts_model(self, layer: Layer, name: str) -> None:
        """Set model_type to gpt2 for a model in nanoGPT's own format, whatever the program's default."""
        sized = not layer.values.keys().isdisjoint(("n_layer", "n_head", "n_embd"))
        said = {"trainer", "model_type"} & layer.values.keys() or self.values["model_type"].where != "default"
        if sized and not said and PurePosixPath(name).suffix.lower() in files.NANOGPT:
            self.values["model_type"] = SourcedValue("gpt2", f"default: {name} is nanoGPT's", firm=False)

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

    def take(self, loaded: LoadedConfig) -> None:
        """Continue from a config that was loaded before."""
        self.values = {
            name: SourcedValue(getattr(loaded.config, name), where, loaded.said(name))
            for name, where in loaded.sources.items()
        }
        self.notes, self.files = list(loaded.notes), list(loaded.files)
        self.foreign = set(loaded.foreign)

    def add_override(self, name: str, text: str, where: str) -> None:
        name = name.replace("-", "_")
        if name in keys():
            self.add(Layer(values={name: SourcedValue(parse_text(keys()[name], text), where)}))
        elif name in self.known.foreign:
            self.notes.append(f"{where}: a key of the fork only; skipped")
        else:
            self.problems += unknown_keys([(name, where)])

    def add(self, layer: Layer) -> None:
        if layer.is_model:
            for name, said in self.of_model.items():
                if self.values[name] is said:
                    self.values[name] = SourcedValue(keys()[name].default, "default", firm=False)
        self.notes.extend(layer.notes)
        self.problems.extend(layer.problems)
        self.known.take(layer)
        for name, said in layer.values.items():
            if isinstance(said.value, UnknownValue) and said.value.needs_running and not keys()[name].needed:
                self.notes.append(f"{said.where}: {name} is skipped: {said.value.reason}")
            else:
                unset = said.value in (None, UNSET) and keys()[name].optional
                self.values[name] = SourcedValue(None, f"default: unset in {said.where}", firm=False) if unset else said
        if layer.is_model:
            self.of_model = {name: self.values[name] for name in layer.values}

    def finish(self) -> LoadedConfig:
        if self.model is not None and self.model.endswith(files.JSON) and self.program is None:
            self.program = "hf", self.model
        if self.program is not None and self.values["trainer"].where == "default":
            program, name = self.program
            self.values["trainer"] = SourcedValue(program, f"default: {name} is in {program}'s format", firm=False)
        self._take_weights()
        self._choose_program()
        apply_recipe(self.values)
        apply_defaults(self.values)
        told, wrong = apply_lengths(self.values, confined=self.confined)
        self.notes += told
        self.problems += wrong
        if self.model is not None:
            self._take_model(self.model)
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
        foreign = tuple(sorted({*self.foreign, *self.known.changing_a_step()}))
        return LoadedConfig(
            TrainConfig(**values), sources, self.notes + notes, self.files, self.model, self.weights, foreign
        )

    def _take_model(self, model: str) -> None:
        """Unset the keys that a traced model decides itself, then set those that its config.json states."""
        is_json = model.endswith(files.JSON)
        decided = [*OF_THE_MODEL, *DECIDED_WITH_IT, *([] if is_json else ["checkpoint_layers"])]
        unused = [name for name in decided if self.values[name].firm and self.values[name].where != model]
        if unused:
            self.notes.append(f"Not used, because the traced model decides it: {', '.join(unused)}")
        for name in decided:
            self.values[name] = SourcedValue(keys()[name].default, MODELS_OWN, firm=False)
        if is_json:
            self.values |= {key: SourcedValue(value, model) for key, value in files.shape_of_model(Path(model)).items()}

    def _take_weights(self) -> None:
        """Override the shape with that of the model at the path in `init_from`."""
        named = self.values["init_from"].value
        if not isinstance(named, str) or named in INITS or self.confined or not files.exists(named):
            return
        try:
            shape = shape_of(Path(named))
        except InputError as error:
            self.problems.extend(error.problems)
            return
        source, block = f"init_from = {named!r}", self.values["block_size"]
        longest = shape["block_size"]
        if isinstance(block.value, int) and block.value > longest and block.firm:
            allowed = f"at most {longest}, which it was trained with"
            self.problems.append(
                Problem(block.where, f"block_size is too long for {source}", str(block.value), allowed)
            )
        shape["block_size"] = min(block.value, longest) if isinstance(block.value, int) else longest
        for key, value in shape.items():
            said = self.values[key]
            if said.firm and said.value != value:
                self.notes.append(f"{said.where}: {key} = {said.value} is replaced by {value}, from {source}")
            self.values[key] = SourcedValue(value, source)
        self.weights = named
        self.values["init_from"] = SourcedValue("scratch", "default", firm=False)
        if not self.values["trainer"].firm:
            self.values["trainer"] = SourcedValue("oomph", source)

    def _choose_program(self) -> None:
        """Take oomph train for adapters on nanoGPT's model, which nanoGPT has not, if no program is set."""
        method, trainer = self.values["method"], self.values["trainer"]
        if method.value == "lora" and trainer.value == "nanogpt" and not trainer.firm:
            self.values["trainer"] = SourcedValue("oomph", f"default: nanoGPT has no adapters ({method.where})", False)

    def _look_at_data(self) -> None:
        """Fill in unset keys with what nanoGPT would find in the dataset's folder."""
        name = self.values["dataset"].value
        if not isinstance(name, str) or not name:
            return
        if self.confined and not files.is_plain_name(name):
            return
        folders = [] if self.confined else [Path(file).parent for file in self.files]
        found = files.look_at_dataset(name, [Path(), *folders, *(folder.parent for folder in folders)])
        if not found.values and self.values["dataset"].firm:
            found = files.known_dataset(name)
        self.notes.extend(found.notes)
        for key, said in found.values.items():
            from_scratch = self.values["init_from"].value == "scratch"
            if self.values[key].where == "default" and (key != "vocab_size" or from_scratch):
                self.values[key] = said


def _from_stdin() -> Pasted:
    """Standard input, up to the largest size of a config."""
    return Pasted.named(sys.stdin.read(files.MAX_TEXT_BYTES))


def _defaults() -> dict[str, object]:
    """The names a config file starts with: nanoGPT's defaults, and `__name__`."""
    named = {
        name: UnknownValue("it is not set") if key.default is None else key.default for name, key in keys().items()
    }
    return {**named, "__name__": "__main__"}
