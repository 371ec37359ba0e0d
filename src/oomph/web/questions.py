"""The page's questions as types: decoded strictly, and turned into configs and devices."""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from oomph import config as configs
from oomph import devices
from oomph.config import (
    KEYS,
    PRESETS,
    LoadedConfig,
    Override,
    Pasted,
    describe_keys,
    nanochat,
)
from oomph.config.reading import fine_tuning, hugging_face
from oomph.config.reading.files import MAX_TEXT_BYTES
from oomph.devices import Device
from oomph.errors import InputError, Problem, nearest
from oomph.planning.plan import choose_device
from oomph.predict.cost import PRICE_CURRENCY
from oomph.units import parse_count

Setting = int | float | bool | str | None
Settings = Annotated[dict[str, Setting], Meta(description="config keys and their values, over the config's own")]
MAX_AMOUNT = 1e15
Amount = Annotated[float, Meta(ge=1e-9, le=MAX_AMOUNT)]
Name = Annotated[str, Meta(max_length=200)]
ConfigText = Annotated[str, Meta(max_length=MAX_TEXT_BYTES, description="a config, read and never run")]
MAX_LOG = 8 * 2**20  # characters of a pasted log
MAX_COMPARED = 16  # runs


class DeviceQuestion(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A config on a device: what `oomph plan` takes."""

    config: ConfigText | None = None
    filename: Annotated[Name, Meta(description="of the config: its suffix tells what the text leaves open")] | None = (
        None
    )
    preset: Annotated[Name, Meta(description="a name of /api/presets, laid under the config")] | None = None
    gpu: Annotated[Name, Meta(description="a card as people write it; absent: this machine's")] | None = None
    gpu_mib: Annotated[Amount, Meta(description="memory of a card that oomph does not know")] | None = None
    gpu_tflops: Annotated[Amount, Meta(description="its dense half-precision peak")] | None = None
    gpu_gbs: Annotated[Amount, Meta(description="its memory bandwidth, GB/s")] | None = None
    gpu_watts: Annotated[Amount, Meta(description="its power limit")] | None = None
    trainer: Annotated[Name, Meta(description="the program that runs")] | None = None
    set: Settings = {}
    reserve_mib: Annotated[float, Meta(ge=0, le=1e9, description="kept free for other programs")] = 0.0

    def run(self, changes: Settings | None = None) -> tuple[LoadedConfig, Device]:
        """The requested config and device. Raises `InputError` with the problems of both."""
        try:
            loaded = self.loaded(changes)
        except InputError as error:
            problems = list(error.problems)
            try:
                self.device(configs.load())
            except InputError as other:
                problems += other.problems
            raise InputError(problems) from None
        return loaded, self.device(loaded)

    def loaded(self, changes: Settings | None = None) -> LoadedConfig:
        """The requested config with `changes` over it. Raises `InputError` with every problem."""
        overrides = as_overrides(self.set, "set")
        if self.trainer is not None:
            overrides.append(("trainer", self.trainer, "trainer"))
        return configs.load(self.sources(), overrides + as_overrides(changes or {}, "changes"), confined=True)

    def sources(self) -> list[str | Pasted]:
        """The preset, then the text that overrides it."""
        found: list[str | Pasted] = []
        if self.preset is not None:
            found.append(known_preset(self.preset))
        if self.config is not None:
            found.append(Pasted.named(self.config, self.filename))
        return found

    def read_as(self) -> str | None:
        """The format that the text was read in, in words; None where there is no text."""
        return None if self.config is None else _format(Pasted.named(self.config, self.filename))

    def device(self, loaded: LoadedConfig) -> Device:
        """The requested card, by name or by its figures; this machine's device if none is."""
        numbers = {"mib": self.gpu_mib, "tflops": self.gpu_tflops, "gbs": self.gpu_gbs, "watts": self.gpu_watts}
        if any(value is not None for value in numbers.values()):
            return choose_device(devices.custom(self.gpu, **numbers), loaded.config)
        if self.gpu is not None and not self.gpu.strip():
            raise InputError(Problem("gpu", "names no card", found=repr(self.gpu), allowed="a name of /api/gpus"))
        return choose_device(self.gpu or own_device(loaded.config.device), loaded.config)


class PlanQuestion(DeviceQuestion, kw_only=True, forbid_unknown_fields=True):
    """What `/api/plan` and `/api/report` take."""

    step_ms: Annotated[Amount, Meta(description="a measured step time in place of the predicted")] | None = None
    watts: Annotated[Amount, Meta(description="one card's draw, measured")] | None = None
    price_kwh: Annotated[float, Meta(ge=0, le=1e9, description="of electricity, in `currency`")] | None = None
    price_hour: Annotated[float, Meta(ge=0, le=1e9, description="of a rented card, in `currency`")] | None = None
    currency: Annotated[str, Meta(min_length=1, max_length=10)] = PRICE_CURRENCY


class MomentQuestion(PlanQuestion, kw_only=True, forbid_unknown_fields=True):
    """What `/api/moment` takes: a plan, and one operation of its step."""

    at: Annotated[int, Meta(ge=0, le=10**9, description="the operation, counted as the timeline counts them")]


class FitQuestion(DeviceQuestion, kw_only=True, forbid_unknown_fields=True):
    """What `/api/fit` takes."""

    tokens: Annotated[Amount | Name, Meta(description="to train on: a number, or as people write it, 3.68B")] | None = (
        None
    )
    hours: Annotated[Amount, Meta(description="the run may take")] | None = None
    largest: Annotated[bool, Meta(description="the largest model instead")] = False

    def tokens_asked(self) -> float | None:
        """`tokens` as a number. Raises `InputError`."""
        if not isinstance(self.tokens, str):
            return self.tokens
        found = parse_count(self.tokens)
        if found is None or not 0 < found <= MAX_AMOUNT:
            raise InputError(Problem("tokens", "not a number of tokens", repr(self.tokens), "such as 3.68B or 500M"))
        return float(found)


class ConfigQuestion(DeviceQuestion, kw_only=True, forbid_unknown_fields=True):
    """What `/api/config` takes: the config with some keys changed, as a file."""

    changes: Settings = {}
    format: Annotated[Literal["py", "toml"], Meta(description="of the file")] = "py"


class ExplainQuestion(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What `/api/explain` takes."""

    text: Annotated[str, Meta(max_length=MAX_LOG, description="a log, nvidia-smi's screen or an error message")]
    config: ConfigText | None = None
    filename: Name | None = None
    gpu: Name | None = None
    set: Settings = {}
    fixes: Annotated[bool, Meta(description="look for better settings too, which takes seconds")] = True


class CompareQuestion(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What `/api/compare` takes."""

    runs: Annotated[list[Name], Meta(min_length=2, max_length=MAX_COMPARED, description="names from /api/runs")]
    gpu: Name | None = None


def own_device(kind: str) -> Device:
    """This machine's device. Uses only CPU rates measured before, because measuring would make the page wait."""
    return devices.calibrated(devices.detect(kind, measure=False))


def as_overrides(values: dict[str, Setting], where: str) -> list[Override]:
    """Settings as --key=value overrides. Raises `InputError` for unknown keys, and for a value that is not text
    if the key takes text: as an override it would pass."""
    kinds = {key.name: key for key in describe_keys()}
    problems = []
    for name, value in values.items():
        key, place = kinds.get(name), f"{where}.{name[:60]}"
        if key is None:
            problems.append(Problem(place, f"unknown key {name[:60]!r}", nearest=nearest(name[:60], KEYS)))
        elif key.kind is str and not isinstance(value, str) and not (value is None and key.optional):
            problems.append(Problem(place, f"{name} is not valid", found=repr(value), allowed=key.allowed))
    if problems:
        raise InputError(problems[:20])
    return [(key, "None" if value is None else str(value), f"{where}.{key}") for key, value in values.items()]


def preset_names() -> dict[str, tuple[str, ...]]:
    """The presets for a form, by group."""
    return {"GPT-2": PRESETS, "Hugging Face": tuple(hugging_face.known_models()), "nanochat": nanochat.PRESETS}


def known_preset(name: str) -> str | Pasted:
    """The preset or known model of that name. A name from outside must never become a path."""
    if name in PRESETS or nanochat.depth_of(name) is not None:
        return name
    if (model := hugging_face.find_known(name)) is not None:
        where, content = model
        return Pasted(where, json.dumps(content))
    names = [each for group in preset_names().values() for each in group]
    raise InputError(
        Problem("preset", "unknown preset", repr(name), "a name of /api/presets", nearest=nearest(name, names))
    )


def _format(config: Pasted) -> str:
    suffix = PurePosixPath(config.name).suffix.lower()
    if suffix == ".json":
        content = json.loads(config.text)
        tuning = "a config of fine-tuning" if fine_tuning.is_config(content) else "JSON of config keys"
        return "a Hugging Face config.json" if hugging_face.is_model(content) else tuning
    names = {".toml": "TOML", ".yaml": "a config of fine-tuning", ".yml": "a config of fine-tuning"}
    return names.get(suffix, "a nanoGPT config")


_TYPE_NAMES = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
    "object": "an object",
    "array": "a list",
}
_TYPE = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_SIZE = re.compile(r"Expected `(str|array)` of length (<=|>=) (\d+)")
_RANGE = re.compile(r"Expected `(?:int|float)` (<=|>=|<|>) (\S+)")
_FIELD = re.compile(r"Object (contains unknown|missing required) field `([^`]*)`")
_SIGNS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than"}
_UNITS = {"str": "characters", "array": "entries"}


def as_problem(message: str) -> Problem:
    """The problem in a message of msgspec, such as "Expected `float`, got `str` - at `$.hours`"."""
    what, _, place = message.partition(" - at ")
    where = place.strip("`").removeprefix("$").strip(".").replace("[...]", "") or "body"
    if found := _TYPE.fullmatch(what):
        return Problem(where, "is of another kind", _type_names(found[2]), _type_names(found[1]))
    if found := _SIZE.fullmatch(what):
        wrong = "is too long" if found[2] == "<=" else "is too short"
        return Problem(where, wrong, allowed=f"{_SIGNS[found[2]]} {int(found[3]):,} {_UNITS[found[1]]}")
    if found := _RANGE.fullmatch(what):
        return Problem(where, "is out of range", allowed=f"{_SIGNS[found[1]]} {found[2]}")
    if found := _FIELD.fullmatch(what):
        inside = "" if where == "body" else f"{where}."
        wrong = "is no field here" if found[1].startswith("contains") else "is missing"
        return Problem(f"{inside}{found[2][:100]}", wrong)
    return Problem(where, what[:300])


def _type_names(kinds: str) -> str:
    return " or ".join(_TYPE_NAMES.get(kind, kind) for kind in kinds.split(" | "))
