"""`--write`: an option as a config file that runs as it is."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from textwrap import wrap

from oomph import config as configs
from oomph.config import LoadedConfig, TrainConfig
from oomph.errors import InputError, Problem
from oomph.files import write_whole
from oomph.fitting.edit import entry, restate, set_key
from oomph.fitting.result import Fit, Option
from oomph.fitting.space import changes_between

FORMATS = (".py", ".toml")


def write_config(path: Path, fit: Fit, option: Option) -> None:
    """Write the option there: the user's file with the changed lines changed, where it is of the same format; a new
    file with every setting that is not a default otherwise. All or nothing."""
    if path.suffix not in FORMATS:
        found = path.suffix or "no suffix"
        raise InputError(Problem(str(path), "a config of unknown format", found, "a .py or .toml file"))
    toml = path.suffix == ".toml"
    own = _own_file(fit.loaded, path.suffix)
    text = _fresh(fit, option, toml) if own is None else own.read_text(encoding="utf-8-sig")
    before, wanted = _read(text, path, option), option.plan.config
    for key, value in option.changes.items():
        if getattr(_read(text, path, option), key) != value:  # a value may follow from one changed already
            text = set_key(text, toml, key, value)
    for _ in wanted.__struct_fields__:  # each time the first key that is still not right: others may follow from it
        left = changes_between(_read(text, path, option), wanted)
        if not left:
            break
        key, value = next(iter(left.items()))
        text = set_key(text, toml, key, value)
    else:
        what = f"{', '.join(left)} cannot be set in a copy of {own}"
        raise InputError(Problem(str(path), what, allowed="a file that sets each key once, at the top level"))
    write_whole(path, restate(text, toml, before, wanted).encode())


def _own_file(loaded: LoadedConfig, suffix: str) -> Path | None:
    """The last of the user's files, where it is of that format."""
    if not loaded.files:
        return None
    last = Path(loaded.files[-1])
    return last if last.suffix == suffix else None


def _fresh(fit: Fit, option: Option, toml: bool) -> str:
    """A new file: why, then every key that somebody set or the fit chose."""
    reasons = fit.why if fit.proposed else ()
    lines = [f"# {fit.verdict}."]
    for reason in reasons:
        lines += [f"# {line}" for line in wrap(f"- {reason}.", 110, subsequent_indent="  ")]
    config, plain = option.plan.config, TrainConfig()
    for key in config.__struct_fields__:
        value = getattr(config, key)
        said = key in option.changes or fit.loaded.said(key)
        if said and value is not None and value != getattr(plain, key):
            lines.append(entry(key, value, toml))
    return "\n".join(lines) + "\n"


def _read(text: str, path: Path, option: Option) -> TrainConfig:
    """What the text means where it is to stand: read back from a file beside it, settled on the same device."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".oomph-", suffix=path.suffix)
    except OSError as error:
        raise InputError(
            Problem(str(path), "cannot be written", found=error.strerror, allowed="a path in a folder that exists")
        ) from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
        return configs.settle(configs.load([name]), option.plan.device).config
    finally:
        Path(name).unlink(missing_ok=True)
