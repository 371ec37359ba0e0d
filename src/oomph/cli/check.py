"""`oomph check`: a minute of the real run, compared with the plan."""

from __future__ import annotations

import argparse
import sys

from oomph import config as configs
from oomph.checking.check import STEPS, Check, check
from oomph.cli.arguments import VerbParser, add_output, add_source, command
from oomph.cli.output import DONE, FAILED, NO, StatusLine, gather, show
from oomph.devices import ratios
from oomph.errors import InputError, Problem
from oomph.training.errors import DoesNotFitError


def run(argv: list[str]) -> int:
    """Run a few steps, print what they took; returns 1 if memory ran out, 3 if they failed for another reason."""
    problems: list[Problem] = []
    options, overrides = _parser().parse(argv, problems)
    loaded = gather(problems, lambda: configs.load(options.sources, overrides, model=options.model))
    if problems or loaded is None:
        raise InputError(problems)
    if options.save:
        ratios.load()  # an unwritable file is reported before the run, not after it
    line = StatusLine()
    try:
        result = check(loaded, steps=options.steps, force=options.force, tell=line.show)
    except DoesNotFitError as error:
        print(f"ERROR: {error}; --force tries it all the same", file=sys.stderr)
        return NO
    finally:
        line.clear()
    from oomph.report.check import document

    then = None
    if result.ratios is not None and not options.save:
        then = (command("check", options, overrides, "--save"), "keeps this for later plans")
    show(options, result.to_dict, lambda: document(result), then)
    if options.save:
        _save(result)
    return NO if result.out_of_memory else FAILED if result.failure else DONE


def _save(result: Check) -> None:
    if result.ratios is None:
        why = "the run did not end well" if result.failure else "other programs had the CPU"
        print(f"nothing was kept: {why}", file=sys.stderr)
        return
    path = ratios.save(result.plan.device, result.plan.config.compile, result.ratios)
    print(f"kept in {path}: later plans for {result.plan.device.name} use it", file=sys.stderr)
    if result.ratios.time is None:
        print("the steps' time was not kept: it is too far from the prediction to be the device's", file=sys.stderr)


def _parser() -> VerbParser:
    parser = VerbParser(
        "check",
        "Really run a few optimizer steps of a config on this machine, and hold the plan against them.\n"
        "Nothing is written: no checkpoint, no log. The device is the config's (--device=cpu, cuda, cuda:1).",
        keys=True,
    )
    add_source(parser)
    parser.add_argument(
        "--steps", type=_steps, default=STEPS, metavar="N", help="timed, after a first one; default %(default)s"
    )
    parser.add_argument(
        "--model", metavar="CONFIG.json", help="a Hugging Face config of any other causal model, traced and run"
    )
    parser.add_argument("--save", action="store_true", help="keep what was found: later plans for this device use it")
    parser.add_argument("--force", action="store_true", help="try what the plan says does not fit")
    add_output(parser, "print the result as JSON, and nothing else", markdown=False)
    return parser


def _steps(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 10,000, found {text!r}")
    return int(text)
