"""`oomph plan`: what a training run needs, before it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from oomph import config as configs
from oomph import devices
from oomph.cli.arguments import VerbParser
from oomph.cli.output import emit, emit_json, gather
from oomph.config import LoadedConfig
from oomph.devices import Device
from oomph.errors import InputError, Problem
from oomph.planner import Plan, plan
from oomph.predict.cost import POWER_SHARE, PRICE_CURRENCY, PRICE_PER_KWH

OTHER_TRAINER = {"nanogpt": "oomph", "oomph": "nanogpt"}


def run(argv: list[str]) -> int:
    """Plan, print, and say with the exit code whether the chosen trainer fits."""
    parser = _parser()
    if "--help" in argv or "-h" in argv:
        parser.epilog = keys_help()
    problems: list[Problem] = []
    options, overrides = parser.parse(argv, problems)
    loaded = gather(problems, lambda: configs.load(options.sources, overrides))
    device = gather_device(problems, options, loaded)
    if problems or loaded is None or device is None:
        raise InputError(problems)
    make = _planner(options, device)
    asked = make(loaded)
    if options.snapshot:
        _write_snapshot(options.snapshot, asked)
    if options.svg or not options.json:
        others = [] if options.model else [OTHER_TRAINER[loaded.config.trainer]]
        _report(options, [asked, *(make(configs.with_trainer(loaded, trainer)) for trainer in others)])
    if options.json:
        emit_json(asked.to_dict())
    return 1 if asked.memory.fits is False else 0


def _planner(options: argparse.Namespace, device: Device) -> Callable[[LoadedConfig], Plan]:
    def make(loaded: LoadedConfig) -> Plan:
        return plan(
            loaded,
            device,
            reserve_mib=options.reserve_mib,
            step_ms=options.step_ms,
            watts=options.watts,
            price_kwh=options.price_kwh,
            price_hour=options.price_hour,
            currency=options.currency,
            model=options.model,
        )

    return make


def _report(options: argparse.Namespace, plans: list[Plan]) -> None:
    from oomph.report.summary import summarise

    summary = summarise(plans)
    if options.svg:
        from oomph.files import write_whole
        from oomph.report.svg import to_svg

        write_whole(Path(options.svg), to_svg(summary, plans).encode())
    if options.markdown:
        from oomph.report.markdown import to_markdown

        emit(to_markdown(summary))
    elif not options.json:
        from oomph.report.terminal import to_text

        emit(to_text(summary))
    if options.svg:
        print(f"wrote {options.svg}", file=sys.stderr)


def _write_snapshot(path: str, asked: Plan) -> None:
    if asked.device.kind == "cpu":
        raise InputError(
            Problem("--snapshot", "is a picture of a GPU's memory", found=asked.device.name, allowed="--gpu NAME")
        )
    from oomph.predict.allocator_timeline import trace
    from oomph.step import snapshot

    snapshot.write(trace(asked.steps, expandable_segments=asked.config.expandable_segments), Path(path))
    print(f"wrote {path}: open it at pytorch.org/memory_viz", file=sys.stderr)
    memory = asked.memory
    if memory.capacity_mib is not None and (memory.fits is False or memory.retries):
        room = f"{asked.device.name} has {memory.capacity_mib:,.0f} MiB for a process"
        then = "an out-of-memory error ends the run" if memory.fits is False else "cached memory is given back"
        print(f"it shows a card with room for everything; {room}, and there {then}", file=sys.stderr)


def gather_device(problems: list[Problem], options: argparse.Namespace, loaded: LoadedConfig | None) -> Device | None:
    """The device, or None with its problems added to the others; of a number that was wrong already no more is said."""
    if any(problem.what.startswith("argument --gpu_") for problem in problems):
        return None
    return gather(problems, lambda: device_from(options, loaded or configs.as_loaded(None)))


def device_from(options: argparse.Namespace, loaded: LoadedConfig) -> Device:
    """The device the options name, by name or by numbers, or the machine's own."""
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
    return devices.calibrated(devices.detect(loaded.config.device))


def _parser() -> VerbParser:
    parser = VerbParser("plan", "What a training run needs: memory, time, money; nanoGPT and oomph train side by side.")
    add_source(parser)
    add_device(parser)
    parser.add_argument(
        "--model",
        metavar="FILE.py:FUNCTION",
        help="a model of your own, traced in place of nanoGPT's (this runs the file), or a Hugging Face config.json",
    )
    parser.add_argument("--step_ms", type=positive, metavar="MS", help="a measured step time instead of the predicted")
    parser.add_argument(
        "--watts",
        type=positive,
        metavar="W",
        help=f"the card's measured draw; default {POWER_SHARE} of its rated power",
    )
    parser.add_argument(
        "--price_kwh", type=positive, metavar="PRICE", help=f"of electricity; default {PRICE_PER_KWH} {PRICE_CURRENCY}"
    )
    parser.add_argument("--price_hour", type=positive, metavar="PRICE", help="of a rented card, an hour")
    parser.add_argument("--currency", default=PRICE_CURRENCY, help="of those prices; default %(default)s")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="the plan of the chosen trainer as JSON")
    output.add_argument("--markdown", action="store_true", help="the report as Markdown")
    parser.add_argument("--svg", metavar="FILE", help="write the memory picture there too")
    parser.add_argument("--snapshot", metavar="FILE", help="write the predicted timeline as a PyTorch memory snapshot")
    return parser


def add_source(parser: VerbParser) -> None:
    """The config: presets and files, later over earlier."""
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="CONFIG",
        help="a preset (gpt2, gpt2-medium, gpt2-large, gpt2-xl), a nanoGPT .py file (read, never run), a .toml file, "
        "a Hugging Face config.json or a nanoGPT checkpoint; several are laid over each other",
    )


def add_device(parser: VerbParser) -> None:
    """The card: by name, or by numbers."""
    parser.add_argument(
        "--gpu", metavar="NAME", help="a card as people or nvidia-smi write it; without it, this machine's"
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
