"""`oomph check`: a minute of the real run, held against the plan."""

from __future__ import annotations

import argparse
import sys

from oomph import config as configs
from oomph.checking import Check, DoesNotFitError, check
from oomph.checking.run import STEPS
from oomph.cli.arguments import VerbParser
from oomph.cli.output import Line, emit, emit_json, gather
from oomph.cli.plan import add_source, keys_help
from oomph.devices import ratios
from oomph.errors import InputError, Problem

NO, FAILED = 1, 3


def run(argv: list[str]) -> int:
    """Run a few steps, print what they took; 1 where memory ran out, 3 where they failed for another reason."""
    parser = _parser()
    if "--help" in argv or "-h" in argv:
        parser.epilog = keys_help()
    problems: list[Problem] = []
    options, overrides = parser.parse(argv, problems)
    if options.steps < 1:
        problems.append(Problem("--steps", "too few", found=str(options.steps), allowed="at least 1"))
    loaded = gather(problems, lambda: configs.load(options.sources, overrides))
    if problems or loaded is None:
        raise InputError(problems)
    if options.save:
        ratios.load()  # a file that cannot be added to is found out before the minute, not after it
    line = Line()
    try:
        result = check(loaded, steps=options.steps, force=options.force, tell=line.show)
    except DoesNotFitError as error:
        print(f"ERROR: {error}; --force tries it all the same", file=sys.stderr)
        return NO
    finally:
        line.clear()
    if options.json:
        emit_json(result.to_dict())
    else:
        from oomph.report.check_terminal import to_text

        emit(to_text(result))
    if options.save:
        _save(result)
    elif result.ratios is not None and not options.json:
        print("--save keeps this for later plans on this device", file=sys.stderr)
    return NO if result.out_of_memory else FAILED if result.failure else 0


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
    )
    add_source(parser)
    parser.add_argument(
        "--steps", type=_steps, default=STEPS, metavar="N", help="timed, after a first one; default %(default)s"
    )
    parser.add_argument("--save", action="store_true", help="keep what was found: later plans for this device use it")
    parser.add_argument("--force", action="store_true", help="try what the plan says does not fit")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")
    return parser


def _steps(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 10,000, found {text!r}")
    return int(text)
