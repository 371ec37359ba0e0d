"""The arguments of a verb: its own options, shared ones, and any config key, as in nanoGPT.

`VerbParser` parses; the `add_…` functions add options that several verbs have; the rest turns them into values.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any, NoReturn

from oomph import config as configs
from oomph import devices
from oomph.cli.output import gather
from oomph.config import KEYS, LoadedConfig, Override
from oomph.devices import Device
from oomph.errors import InputError, Problem, nearest


class VerbParser(argparse.ArgumentParser):
    """argparse, with `InputError` for errors and no abbreviations."""

    def __init__(self, verb: str, description: str, epilog: str = "", keys: bool = False) -> None:
        """`keys`: the verb takes config keys too, and its help lists them."""
        self._lists_keys = keys
        super().__init__(
            prog=f"oomph {verb}",
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._problems: list[Problem] | None = None  # collects wrong values instead of raising

    def format_help(self) -> str:
        if self._lists_keys:
            self.epilog = keys_help()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise InputError(self._problem(message))

    def _problem(self, message: str) -> Problem:
        return Problem(self.prog, message, allowed=f"what {self.prog} --help lists")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """As in argparse, but with `problems` a wrong value is added there and the option is left unset."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            if self._problems is None:
                raise
            self._problems.append(self._problem(str(error)))
            return action.default

    def options(self) -> set[str]:
        """The names of this verb's own options, without dashes."""
        return {option.lstrip("-") for action in self._actions for option in action.option_strings}

    def parse(
        self, argv: Sequence[str], problems: list[Problem] | None = None
    ) -> tuple[argparse.Namespace, list[Override]]:
        """The verb's own options, and the config keys among the arguments.

        Unknown names and wrong values are added to `problems`, for a caller who has more to find; else they are raised.
        """
        rest, overrides, found = split_keys(argv, self.options())
        if found and problems is None:
            raise InputError(found)
        if problems is not None:
            problems.extend(found)
        self._problems = problems
        options = self.parse_intermixed_args(rest)  # `a.toml --resume b.toml`: files before and after options
        return options, [*overrides, *_counted_cards(options, overrides)]


def _counted_cards(options: argparse.Namespace, overrides: Sequence[Override]) -> list[Override]:
    """The number of cards in `--gpu 8xH100`, times `--nodes`, as config keys; the option keeps the card's name."""
    named = getattr(options, "gpu", None)
    if not isinstance(named, str):
        return []
    name, count = devices.split_count(named)
    if count is None or any(key == "world_size" for key, *_ in overrides):
        return []
    options.gpu = name
    said = next((value for key, value, _ in reversed(overrides) if key == "nodes"), None)
    world, nodes = devices.all_cards(count, int(said) if said and said.isdecimal() else None)
    found = [("world_size", str(world), f"--gpu {named}")]
    return found if said is not None or nodes == 1 else [*found, ("nodes", str(nodes), f"--gpu {named}")]


def split_keys(argv: Sequence[str], own: set[str]) -> tuple[list[str], list[Override], list[Problem]]:
    """The verb's own arguments, `--key=value` or `--key value` for config keys, and problems with the rest."""
    rest: list[str] = []
    overrides: list[Override] = []
    problems: list[Problem] = []
    position = 0
    while position < len(argv):
        argument = argv[position]
        position += 1
        if not argument.startswith("--") or argument == "--":
            rest.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        if name in own:
            rest.append(f"--{name}{equals}{value}")
        elif name not in KEYS:
            known = [f"--{key}" for key in (*sorted(own), *KEYS)]
            problems.append(
                Problem(argument, f"unknown option or config key '{name}'", nearest=nearest(f"--{name}", known))
            )
            position += not equals and _is_value(argv, position)
        elif equals:
            overrides.append((name, value, argument))
        elif _is_value(argv, position):
            overrides.append((name, argv[position], f"{argument} {argv[position]}"))
            position += 1
        else:
            problems.append(Problem(argument, "needs a value", allowed=f"--{name}=VALUE"))
    return rest, overrides, problems


def _is_value(argv: Sequence[str], position: int) -> bool:
    return position < len(argv) and not argv[position].startswith("--")


# --- options shared by several verbs -----------------------------------------------------------------


def add_source(parser: VerbParser) -> None:
    """Add the config: presets and files, later ones override earlier ones."""
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="CONFIG",
        help="a preset (gpt2, gpt2-medium, gpt2-large, gpt2-xl, nanochat-d20), a nanoGPT .py file (read, never run), "
        "a .toml or .yaml file, a Hugging Face model (its name, config.json or folder), a nanoGPT checkpoint, or - for "
        "standard input; several are laid "
        "over each other",
    )


def add_device(parser: VerbParser) -> None:
    """Add the card: by name, or by numbers."""
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="a card as people or nvidia-smi write it, several in each of --nodes as 8xH100 or 4090x4; without it, "
        "this machine's",
    )
    parser.add_argument("--gpu_mib", type=positive, metavar="MIB", help="its memory, for a card oomph does not know")
    parser.add_argument("--gpu_tflops", type=positive, metavar="TFLOPS", help="its dense half-precision peak")
    parser.add_argument("--gpu_gbs", type=positive, metavar="GB/S", help="its memory bandwidth")
    parser.add_argument("--gpu_watts", type=positive, metavar="W", help="its power limit")
    parser.add_argument(
        "--reserve_mib",
        type=not_negative,
        default=0.0,
        metavar="MIB",
        help="kept free for the desktop and other programs",
    )


def add_model(parser: VerbParser) -> None:
    """Add a model to trace."""
    parser.add_argument(
        "--model",
        metavar="FILE.py:FUNCTION",
        help="a model of your own, traced in place of the config's (this runs the file), or a Hugging Face config.json",
    )


def add_output(parser: VerbParser, json: str, *, markdown: bool = True, svg: str = "", everything: bool = True) -> None:
    """Add how the answer is shown: one screen by default. `json` and `svg` describe those outputs."""
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help=json)
    if markdown:
        output.add_argument("--markdown", action="store_true", help="the report as Markdown")
    if everything:
        output.add_argument("--all", action="store_true", help="every detail, not one screen")
    if svg:
        parser.add_argument("--svg", type=svg_file, metavar="FILE.svg", help=svg)


def command(verb: str, options: argparse.Namespace, overrides: Sequence[Override], *more: str) -> str:
    """A command for the same config and card, to type next."""
    named = [(name, value) for name, value in vars(options).items() if name.startswith("gpu") and value is not None]
    given = [part for name, value in named for part in (f"--{name}", f"{value:g}" if type(value) is float else value)]
    given += ["--model", options.model] if getattr(options, "model", None) else []
    keys = [f"--{key}={value}" for key, value, _ in overrides]
    return shlex.join(["oomph", verb, *options.sources, *given, *keys, *more])


def need_torch(verb: str) -> None:
    """Raises `InputError` if torch is not installed."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise InputError(Problem(f"oomph {verb}", "needs torch; try: pip install 'oomph[train]'"))


def gather_device(
    problems: list[Problem], options: argparse.Namespace, loaded: LoadedConfig | None, measure: bool = True
) -> Device | None:
    """The device, or None with its problems added to the others.

    Skipped if a --gpu_* value was rejected. This CPU is not measured, which takes seconds, if anything is wrong.
    """
    if any(problem.what.startswith("argument --gpu_") for problem in problems):
        return None
    measure = measure and not problems
    return gather(problems, lambda: _device(options, loaded or configs.as_loaded(None), measure))


def _device(options: argparse.Namespace, loaded: LoadedConfig, measure: bool = True) -> Device:
    """The device the options name, by name or by numbers, or this machine's own."""
    given = {
        "mib": options.gpu_mib,
        "tflops": options.gpu_tflops,
        "gbs": options.gpu_gbs,
        "watts": options.gpu_watts,
    }
    numbers = [f"--gpu_{name}={value:g}" for name, value in given.items() if value is not None]
    named = [f"--gpu {options.gpu}"] if options.gpu is not None else []
    elsewhere = loaded.config.device.partition(":")[0] in ("cpu", "mps")
    if elsewhere and (named or numbers):
        where = loaded.sources.get("device", "device")
        what = f"device is {loaded.config.device}, but a GPU is named too"
        raise InputError(Problem(where, what, found=" ".join(named + numbers), allowed="one of the two"))
    if options.gpu is not None and not options.gpu.strip():
        raise InputError(Problem("--gpu", "names no card", found="''", allowed="a name, as oomph gpus lists them"))
    if any(value is not None for value in given.values()):
        return devices.custom(options.gpu, **given)
    if options.gpu:
        return devices.calibrated(devices.find(options.gpu))
    return devices.calibrated(devices.detect(loaded.config.device, measure))


def keys_help() -> str:
    """Every config key with its default and meaning."""
    lines = ["config keys, each as --key=value:"]
    for whose, heading in (("nanogpt", "nanoGPT's"), ("oomph", "ours")):
        lines.append(f"\n {heading}")
        lines += [
            f"  {key.name:<28} {key.default!s:<12} {key.description}"
            for key in configs.describe_keys()
            if key.whose == whose
        ]
    return "\n".join(lines)


# --- values -------------------------------------------------------------------------------------------


def positive(text: str) -> float:
    """A number above zero."""
    value = not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"must be above 0, found {text}")
    return value


def not_negative(text: str) -> float:
    """A finite number of at least zero."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, found {text!r}") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 0, found {text}")
    return value


def whole(text: str) -> int:
    """A whole number of at least one."""
    if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, found {text!r}")
    return int(text)


def svg_file(text: str) -> str:
    """A file that a picture is written to."""
    if not text.lower().endswith(".svg"):
        raise argparse.ArgumentTypeError(f"must be a file whose name ends in .svg, found {text!r}")
    return text


def torch_device(asked: str | None) -> str:
    """The torch device that --device names, by default CUDA if available. Raises `InputError` if there is none."""
    import torch

    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked is None:
        return "cuda" if cards else "cpu"
    there = ["cpu", *(["cuda", *(f"cuda:{card}" for card in range(cards))] if cards else [])]
    there += ["mps"] if torch.backends.mps.is_available() else []
    if asked not in there:
        raise InputError(Problem("--device", f"{asked} is not there", allowed=", ".join(there)))
    return asked
