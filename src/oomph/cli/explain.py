"""`oomph explain`: what happened in a run, why, and what would help."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import IO, TYPE_CHECKING

from oomph.cli.arguments import VerbParser, add_output, positive
from oomph.cli.output import DONE, INTERRUPTED, NO, draw, emit, show
from oomph.config import Override, is_model
from oomph.errors import InputError, Problem
from oomph.runs.reading.reader import STDIN, override

if TYPE_CHECKING:
    from oomph.runs.explain import Explanation
    from oomph.runs.follow import Follower

SAID_ONCE = ("time.step", "time.left", "time.mfu", "memory.predicted", "memory.headroom")
LEAST_STEPS = 10  # enough to know the pace
MARKS = {"error": "✗", "warning": "!", "info": "·"}


def run(argv: list[str]) -> int:
    """Read, explain, print."""
    options, overrides = _parser().parse(argv)
    if not options.files:
        allowed = "a log, an nvidia-smi screen, an error message, a config, a run's folder, or - for standard input"
        raise InputError(Problem("oomph explain", "nothing to read", allowed=allowed))
    if options.follow:
        return _follow(options, overrides)
    from oomph.runs.explain import explain

    found = explain(options.files, options.gpu, overrides=overrides, with_fixes=not options.no_fixes)
    from oomph.report.explain import document, pictures

    if options.svg:
        draw(options.svg, pictures(found))
    show(options, found.to_dict, lambda: document(found), then=_next(options, overrides, found))
    return DONE


def _next(options: argparse.Namespace, overrides: list[Override], found: Explanation) -> tuple[str, str] | None:
    """The command that shows more: with the run's config, or all that fits."""
    files = list(options.files)
    card = ["--gpu", options.gpu] if options.gpu else []
    card += [f"--{key}={text}" for key, text, _ in overrides]
    if found.finding("log.unknown") is not None:
        return None
    if found.plan is None:
        if not found.run.ooms:
            return None
        missing = [] if options.gpu or found.measured.inference.card.device else ["--gpu", "NAME"]
        config = ["CONFIG"] if found.measured.inference.config is None else []
        return shlex.join(["oomph", "explain", *files, *config, *card, *missing]), "adds what it needs, and exact fixes"
    configs = [file for file in files if file.endswith((".py", ".toml", ".json", ".yaml")) or is_model(file)]
    if configs and (found.run.ooms or found.plan.memory.fits is False):
        trainer = found.measured.inference.settings.get("trainer")
        told = [f"--trainer={trainer.value}"] if trainer is not None and trainer.how == "inferred" else []
        return shlex.join(["oomph", "fit", *configs, *card, *told]), "every setting that fits, and writes it"
    return None


def _follow(options: argparse.Namespace, overrides: list[Override]) -> int:
    """Watch a growing log until the run is over or the user stops; returns 1 if the run ended or is going badly."""
    if len(options.files) != 1 or options.files[0] == STDIN or options.json or options.markdown or options.svg:
        allowed = "one log that grows, and no --json, --markdown or --svg"
        raise InputError(Problem("--follow", "watches one file", found=" ".join(options.files), allowed=allowed))
    from oomph.devices.nvml import sampler
    from oomph.runs.follow import Follower

    follower = Follower(options.files[0], sampler())
    try:
        follow(follower, options.gpu, overrides, options.every)
    except KeyboardInterrupt:
        emit("no longer watching; the run is left alone\n")
        return INTERRUPTED
    return NO if follower.watcher.failing else DONE


def follow(
    follower: Follower,
    gpu: str | None = None,
    overrides: Sequence[Override] = (),
    every_s: float = 2.0,
    file: IO[str] | None = None,
) -> None:
    """Print what changes until the run is over."""
    out = file or sys.stdout
    override(follower.builder, overrides)
    introduced = False
    _say(out, "info", f"watching {follower.run.name}; Ctrl-C leaves it alone")
    if not follower.path.exists():
        _say(out, "warning", f"{follower.path} does not exist yet: waiting for it")
    while True:
        for notice in follower.look():
            _say(out, notice.severity, notice.text)
        if not introduced and (follower.run.steps.count >= LEAST_STEPS or follower.ended is not None):
            introduced = True
            _introduce(out, follower, gpu, overrides)
        if follower.ended is not None:
            _say(out, "error" if follower.run.ooms else "info", follower.ended)
            return
        follower.clock.sleep(every_s)


def _introduce(out: IO[str], follower: Follower, gpu: str | None, overrides: Sequence[Override]) -> None:
    """Print the run's figures once there are enough of them, and everything that is wrong."""
    from oomph.runs.explain import explain

    override(follower.builder, overrides)  # again: new lines of the log may have replaced them
    found = explain(follower.run, gpu, with_fixes=False)
    for finding in found.findings:
        if finding.severity != "info" or finding.id in SAID_ONCE:
            text = f" {finding.text}" if finding.severity != "info" else ""
            _say(out, finding.severity, f"{finding.title}.{text}")


def _say(out: IO[str], severity: str, text: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {MARKS[severity]} {text}", file=out, flush=True)


def _parser() -> VerbParser:
    parser = VerbParser(
        "explain",
        "What happened in a run, and why: from its log, nvidia-smi, an out-of-memory message or a memory snapshot, "
        "in any mix. Config files and --key=value tell what the log does not.",
        keys=True,
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="what there is of one run; - for standard input")
    parser.add_argument("--gpu", metavar="NAME", help="the card, where nothing names it")
    parser.add_argument("--no_fixes", action="store_true", help="do not look for better settings, which takes seconds")
    parser.add_argument("--follow", action="store_true", help="watch a log that grows, and say when something turns")
    parser.add_argument("--every", type=positive, default=2.0, metavar="S", help="with --follow: seconds between looks")
    add_output(parser, "every finding and fix as JSON", svg="write the plots and the memory picture there too")
    return parser
