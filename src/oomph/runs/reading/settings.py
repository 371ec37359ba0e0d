"""Settings in a log: the config file that nanoGPT echoes, "Overriding: …", a printed dict, the command line."""

from __future__ import annotations

import re

from oomph.config.expression import parse_text
from oomph.config.schema import keys
from oomph.runs.reading.builder import Builder

_ASSIGNMENT = re.compile(r"^\s*(?:Overriding: )?([a-z][a-z0-9_]{1,40}) ?= ?(\S.{0,400})$")
_ARGUMENT = re.compile(r"--([a-z][a-z0-9_-]{1,40})[= ](\"[^\"]*\"|'[^']*'|\S{1,200})")
_ITEM = re.compile(r"['\"]([a-z][a-z0-9_]{1,40})['\"]: ('[^']{0,200}'|\"[^\"]{0,200}\"|[^,}\s]{1,40})")
_TORCH = re.compile(
    r"(?:\btorch(?: version)?[ =:]{1,3}|PyTorch (?:version:? )?)v?(\d\.\d{1,2}(?:\.\d{1,2})?(?:\+\w{1,8})?)\b"
)
_WORKERS = re.compile(r"--nproc[_-]per[_-]node[= ](\d{1,4})\b")
_NODES = re.compile(r"--nnodes[= ](\d{1,4})\b")


def assignment(builder: Builder, line: str) -> None:
    """`key = value`, as in a config file, for a known config key."""
    match = _ASSIGNMENT.match(line)
    if match is None or match[1] not in keys():
        return
    key, text = match[1], match[2]
    if line.lstrip().startswith("Overriding: "):  # nanoGPT prints strings without quotes here
        value: object = parse_text(keys()[key], text.strip())
    else:
        value = _value(builder, text)
    if value is None or not builder.setting(key, value):
        builder.cannot_read(f"a value of {key}", line)
    elif line.lstrip().startswith("Overriding: "):
        builder.event("config", line)


def _value(builder: Builder, text: str) -> object:
    """The value of an expression that may use earlier settings by name; None if it cannot be evaluated."""
    import ast

    from oomph.config.expression import ExpressionError, UndecidableError, evaluate, parse

    known = {name: setting.value for name, setting in builder.run.settings.items()}
    try:
        body = parse(text).body
        if len(body) == 1 and isinstance(body[0], ast.Expr):
            return evaluate(body[0].value, {**_defaults(), **known})
    except (ExpressionError, UndecidableError):
        pass
    return None


def _defaults() -> dict[str, object]:
    return {name: key.default for name, key in keys().items() if key.default is not None}


def printed_dict(builder: Builder, line: str) -> None:
    """A config printed as a Python dict or a JSON object."""
    for key, text in _ITEM.findall(line):
        if key in keys() and text not in ("None", "null"):
            text = {"true": "True", "false": "False"}.get(text, text)
            builder.setting(key, parse_text(keys()[key], text))


def command(builder: Builder, line: str) -> None:
    """The command that started the run: `python train.py config/x.py --batch_size=8`."""
    if "=" not in line:
        return
    builder.event("config", line)
    for name, text in _ARGUMENT.findall(line):
        key = name.replace("-", "_")
        if key in keys() and not builder.setting(key, parse_text(keys()[key], text)):
            builder.cannot_read(f"a value of {key}", line)
    if workers := _WORKERS.search(line):
        nodes = _NODES.search(line)
        builder.setting("world_size", int(workers[1]) * (int(nodes[1]) if nodes else 1))


def config_file(builder: Builder, line: str) -> None:
    """nanoGPT is about to echo a config file."""
    builder.program("nanogpt")
    builder.event("config", line)


def torch_version(builder: Builder, line: str) -> None:
    if match := _TORCH.search(line):
        builder.setting("torch_version", match[1])


READERS = (
    ("Overriding config with ", config_file),
    ("=", assignment),
    ("train.py ", command),
    ("base_train ", command),
    ("'batch_size':", printed_dict),
    ('"batch_size":', printed_dict),
    ("orch", torch_version),
)
