"""`--write`: an option as a config file that runs as it is."""

from __future__ import annotations

import codecs
import os
import tempfile
from pathlib import Path
from textwrap import wrap

import msgspec

from oomph import config as configs
from oomph.config import LoadedConfig, TrainConfig
from oomph.config.shape import OF_THE_MODEL
from oomph.errors import InputError, Problem
from oomph.files import write_whole
from oomph.fitting.edit import entry, restate, set_key
from oomph.fitting.result import Fit, KeyValue, Option
from oomph.fitting.space import changes_between

FORMATS = (".py", ".toml")


def write_config(path: Path, fit: Fit, option: Option) -> tuple[str, ...]:
    """Write the option there: the user's file with only the changed lines edited, if it is of the same format; else a
    new file with every setting that is not a default. All or nothing.

    Returns the keys that the file computed from changed ones, and that are now written as the numbers they had.
    """
    check_target(path, overwrite=True)
    toml = path.suffix == ".toml"
    own = _own_file(fit.loaded, path.suffix)
    text, habits = (_fresh(fit, option, toml), PLAIN) if own is None else _own_text(own)
    before, wanted = _read(text, path, option), option.plan.config
    set_keys: list[str] = []
    while left := _still_wrong(text, path, option):
        key, value = next(iter(left.items()))  # one at a time: others may follow from it
        if set_keys.count(key) > 1:
            what = f"{', '.join(left)} cannot be set in a copy of {own}"
            raise InputError(Problem(str(path), what, allowed="a file that sets each key once, at the top level"))
        # The second time not through a variable of the file, which another key may share.
        through_variable = key in option.changes and key not in set_keys
        text = set_key(text, toml, key, value, wanted.trainer, through_variable)
        set_keys.append(key)
    _replace(path.resolve(), habits.encode(restate(text, toml, before, wanted)))
    return tuple(dict.fromkeys(key for key in set_keys if getattr(before, key) == getattr(wanted, key)))


def _still_wrong(text: str, path: Path, option: Option) -> dict[str, KeyValue]:
    """The option's values for keys that differ in the text. Half edited, it may not be a valid config (a new number
    of heads that does not divide the old width): then the keys are compared one by one, as stated."""
    wanted = option.plan.config
    try:
        return changes_between(_read(text, path, option), wanted)
    except InputError:
        stated = configs.stated_values(text, path.name)
        defaults = {key: getattr(TrainConfig(), key) for key in option.changes if key not in stated}
        given = {key: value for key, value in (defaults | stated).items() if value is not None}
        left = {key: getattr(wanted, key) for key, value in given.items() if value != getattr(wanted, key)}
        if not left:
            raise
        return left


def _replace(path: Path, content: bytes) -> None:
    """Write the file; an existing one keeps its permissions."""
    mode = path.stat().st_mode & 0o777 if path.exists() else None
    write_whole(path, content)
    if mode is not None:
        path.chmod(mode)


def check_target(path: Path, overwrite: bool = False) -> None:
    """Raise if no config can be written there; better before a search than after it."""
    problems = []
    if not overwrite and not path.is_dir() and (path.exists() or path.is_symlink()):
        problems.append(Problem(str(path), "is there already", allowed="another name, or --overwrite"))
    if path.suffix not in FORMATS:
        found = path.suffix or "no suffix"
        problems.append(Problem(str(path), "a config of unknown format", found, "a .py or .toml file"))
    if path.is_dir():
        problems.append(Problem(str(path), "cannot be written", "a folder", "a file"))
    elif not path.parent.is_dir():
        problems.append(Problem(str(path), "cannot be written", f"no folder {path.parent}", "a folder that exists"))
    elif not os.access(path.parent, os.W_OK):
        problems.append(Problem(str(path), "cannot be written", f"{path.parent} may not be written to"))
    if problems:
        raise InputError(problems)


class Habits(msgspec.Struct, frozen=True):
    """The encoding details of a file, kept so that only edited lines change."""

    crlf: bool = False
    mark: bool = False  # a byte order mark in front

    def encode(self, text: str) -> bytes:
        """The text as bytes, encoded like the file."""
        ended = text.replace("\n", "\r\n") if self.crlf else text
        return (codecs.BOM_UTF8 if self.mark else b"") + ended.encode()


PLAIN = Habits()


def _own_text(path: Path) -> tuple[str, Habits]:
    """The user's file with plain line endings, and its habits. A file with mixed line endings keeps each as it is."""
    data = path.read_bytes()
    text = data.decode("utf-8-sig")
    crlf = text.count("\r\n") == text.count("\n") > 0
    return text.replace("\r\n", "\n") if crlf else text, Habits(crlf, data.startswith(codecs.BOM_UTF8))


def _own_file(loaded: LoadedConfig, suffix: str) -> Path | None:
    """The last of the user's files, if it is of that format."""
    if not loaded.files:
        return None
    last = Path(loaded.files[-1])
    return last if last.suffix == suffix else None


def _fresh(fit: Fit, option: Option, toml: bool) -> str:
    """A new file: the reason, then every key that the user set or the fit chose."""
    reasons = fit.why if fit.proposed else ()
    lines = [f"# {line}" for line in wrap(f"{_headline(fit, option)}.", 118)]
    if fit.loaded.model is not None:
        lines.append(f"# The model is traced: give --model {fit.loaded.model} beside this file.")
    for reason in reasons:
        lines += [f"# {line}" for line in wrap(f"- {reason}.", 110, subsequent_indent="  ")]
    config = option.plan.config
    lines += [entry(key, getattr(config, key), toml, config.trainer) for key in _stated(fit, option, toml)]
    return "\n".join(lines) + "\n"


def _stated(fit: Fit, option: Option, toml: bool) -> list[str]:
    """The lines of a new file: the program and its model if the format implies another, then what was set or chosen
    and is not their default."""
    config, plain = option.plan.config, TrainConfig(trainer="oomph" if toml else "nanogpt")
    which = {key: getattr(config, key) for key in ("trainer", "model_type")}
    defaults = configs.from_dict(which).config
    keys = [key for key, value in which.items() if value != getattr(plain, key)]
    for key in config.__struct_fields__:
        said = key in option.changes or fit.loaded.said(key)
        said = said and (fit.loaded.model is None or key not in OF_THE_MODEL)
        if said and key not in which and getattr(config, key) not in (None, getattr(defaults, key)):
            keys.append(key)
    return keys


def _headline(fit: Fit, option: Option) -> str:
    """The file's first comment: the verdict for the best option; for another one, that option and its result."""
    if option is fit.chosen:
        return fit.verdict
    memory = option.plan.memory
    fares = "fits" if option.fits else "does not fit"
    need = f"{memory.total_mib:,.0f} MiB on {option.plan.cards}"
    return f"Option {fit.options.index(option) + 1} of oomph fit, {option.name}: {need}, {fares}; {option.effect}"


def _read(text: str, path: Path, option: Option) -> TrainConfig:
    """The config in the text: read back from a temporary file beside the target, settled on the same device."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".oomph-", suffix=path.suffix)
    except OSError as error:
        raise InputError(
            Problem(str(path), "cannot be written", found=error.strerror, allowed="a path in a folder that exists")
        ) from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
        return configs.settle(configs.load([name], model=option.plan.traced), option.plan.device).config
    except InputError as error:  # the user knows only the target's name
        raise InputError(_renamed(problem, name, path) for problem in error.problems) from None
    finally:
        Path(name).unlink(missing_ok=True)


def _renamed(problem: Problem, temporary: str, path: Path) -> Problem:
    """The problem with the target's name in place of the temporary file's."""

    def told(text: str) -> str:
        return text.replace(temporary, str(path)).replace(Path(temporary).name, path.name)

    found = told(problem.found) if problem.found is not None else None
    return problem._replace(where=told(problem.where), what=told(problem.what), found=found)
