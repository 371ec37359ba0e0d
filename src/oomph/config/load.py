"""A `TrainConfig` from every source people have, each value with the place it came from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from oomph.config import dataset, files
from oomph.config.keys import keys
from oomph.config.layer import Known, Layer, unknown_keys
from oomph.config.presets import PRESETS, apply_init_from, preset
from oomph.config.schema import TrainConfig
from oomph.config.validate import check
from oomph.config.values import Said, Unreadable, parse_text
from oomph.errors import InputError, Problem

MAX_PROBLEMS = 100  # more than anybody mends at once
Override = tuple[str, str, str]  # key, value as written, where: ("batch_size", "8", "--batch_size=8")


class Pasted(NamedTuple):
    """A config that somebody pasted: text under a name, and no file."""

    name: str
    text: str


Source = str | os.PathLike[str] | Pasted


class LoadedConfig(msgspec.Struct, frozen=True):
    """A config and its history."""

    config: TrainConfig
    sources: dict[str, str]  # every key -> "default", "config/run.py:12", "--batch_size=8", ...
    notes: list[str] = msgspec.field(default_factory=list)  # what was passed over or decided, with its line
    files: list[str] = msgspec.field(default_factory=list)  # the files read, as the user named them

    def said(self, key: str) -> bool:
        """Did anybody give this key a value?"""
        return not self.sources[key].startswith("default")

    def data_roots(self) -> list[Path]:
        """Where data/NAME is looked for: here, and beside the config files and their folders."""
        folders = [Path(file).parent for file in self.files]
        return [Path(), *folders, *(folder.parent for folder in folders)]


def load(
    sources: Source | Sequence[Source] = (), overrides: Sequence[Override] = (), *, confined: bool = False
) -> LoadedConfig:
    """The config that defaults, presets, files and overrides make, later over earlier.

    `confined` is for configs from strangers: their dataset is looked up in ./data by its plain name alone. Raises
    `InputError` with every problem found in all of them.
    """
    gathering = _Gathering(confined=confined)
    for source in [sources] if isinstance(sources, str | os.PathLike | Pasted) else sources:
        gathering.add_source(source)
    for key, text, where in overrides:
        gathering.add_override(key, text, where)
    return gathering.finish()


def from_dict(values: Mapping[str, Any], where: str = "given") -> LoadedConfig:
    """The config of a mapping from keys to values."""
    from oomph.config.documents import read_mapping

    gathering = _Gathering()
    gathering.add(read_mapping(values, where))
    return gathering.finish()


def as_loaded(config: LoadedConfig | TrainConfig | Mapping[str, Any] | Source | None) -> LoadedConfig:
    """Whatever the Python API is handed, as a `LoadedConfig`. A `TrainConfig` is checked and taken at its word."""
    if isinstance(config, LoadedConfig):
        return config
    if isinstance(config, TrainConfig):
        given = {key.name: getattr(config, key.name) for key in keys().values()}
        gathering = _Gathering(look_at_data=False)
        changed = {name: Said(v, "given") for name, v in given.items() if v != keys()[name].default}
        gathering.add(Layer(values=changed))
        return gathering.finish()
    if config is None:
        return load()
    return from_dict(config) if isinstance(config, Mapping) else load([config])


def with_trainer(loaded: LoadedConfig, trainer: str) -> LoadedConfig:
    """The same run under another program. What was decided for the first one is left to be decided again."""
    undecided = {name: None for name, key in keys().items() if key.optional and not loaded.said(name)}
    config = msgspec.structs.replace(loaded.config, **undecided, trainer=trainer)
    sources = loaded.sources | dict.fromkeys(undecided, "default") | {"trainer": f"the same run under {trainer}"}
    return LoadedConfig(config, sources, loaded.notes, loaded.files)


@dataclass
class _Gathering:
    """Layers put over one another, with everything they had to say."""

    values: dict[str, Said] = field(
        default_factory=lambda: {name: Said(key.default, "default", firm=False) for name, key in keys().items()}
    )
    known: Known = field(default_factory=lambda: Known(_defaults()))
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    our_format: str | None = None  # the first file in oomph's own format
    look_at_data: bool = True
    confined: bool = False  # look for data below this folder alone

    def add_source(self, source: Source) -> None:
        name = source.name if isinstance(source, Pasted) else os.fspath(source)
        if name in PRESETS and not isinstance(source, Pasted):
            self.add(preset(name))
            return
        try:
            if isinstance(source, Pasted):
                layer = files.read_text(source.text, name, self.known)
            else:
                layer = files.read(Path(name), name, self.known)
        except InputError as error:
            self.problems.extend(error.problems)
            return
        self.files.append(name)
        if layer.ours and self.our_format is None:
            self.our_format = name
        self.add(layer)

    def add_override(self, name: str, text: str, where: str) -> None:
        name = name.replace("-", "_")
        if name in keys():
            self.add(Layer(values={name: Said(parse_text(keys()[name], text), where)}))
        elif name in self.known.foreign:
            self.notes.append(f"{where}: a key of the fork alone; passed over")
        else:
            self.problems += unknown_keys([(name, where)])

    def add(self, layer: Layer) -> None:
        self.notes.extend(layer.notes)
        self.problems.extend(layer.problems)
        self.known.take(layer)
        for name, said in layer.values.items():
            if isinstance(said.value, Unreadable) and said.value.needs_running and not keys()[name].needed:
                self.notes.append(f"{said.where}: {name} is passed over: {said.value.reason}")
            else:
                unsaid = said.value is None and keys()[name].optional
                self.values[name] = Said(None, "default", firm=False) if unsaid else said

    def finish(self) -> LoadedConfig:
        if self.our_format is not None and self.values["trainer"].where == "default":
            self.values["trainer"] = Said("oomph", f"default: {self.our_format} is in oomph's own format", firm=False)
        if self.look_at_data:
            self._look_at_data()
        notes, problems = apply_init_from(self.values)
        sound, found = check(self.values)
        self.problems += problems + found
        if self.problems:
            raise InputError(self.problems[:MAX_PROBLEMS])
        values: dict[str, Any] = dict(sound)
        sources = {name: said.where for name, said in self.values.items()}
        return LoadedConfig(TrainConfig(**values), sources, self.notes + notes, self.files)

    def _look_at_data(self) -> None:
        """What nanoGPT would find in the data's folder, for keys that nobody set."""
        name = self.values["dataset"].value
        if not isinstance(name, str) or not name:
            return
        if self.confined and not dataset.is_plain(name):
            return
        folders = [] if self.confined else [Path(file).parent for file in self.files]
        found = dataset.look(name, [Path(), *folders, *(folder.parent for folder in folders)])
        self.notes.extend(found.notes)
        for key, said in found.values.items():
            from_scratch = self.values["init_from"].value == "scratch"
            if self.values[key].where == "default" and (key != "vocab_size" or from_scratch):
                self.values[key] = said


def _defaults() -> dict[str, object]:
    """The names a config file may use: nanoGPT's defaults, and that it is run as the main program."""
    named = {name: Unreadable("it is not said") if key.default is None else key.default for name, key in keys().items()}
    return {**named, "__name__": "__main__"}
