"""`oomph explain`: what happened in a run, why, and what would be better."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from oomph.cli.arguments import VerbParser
from oomph.cli.output import emit, emit_json
from oomph.cli.plan import keys_help, positive
from oomph.config import Override
from oomph.errors import InputError, Problem
from oomph.runs.reader import STDIN

DONE, FAILING, INTERRUPTED = 0, 1, 130


def run(argv: list[str]) -> int:
    """Read, explain, print."""
    parser = _parser()
    if "--help" in argv or "-h" in argv:
        parser.epilog = keys_help()
    options, overrides = parser.parse(argv)
    if not options.files:
        allowed = "a log, an nvidia-smi screen, an error message, a config, a run's folder, or - for standard input"
        raise InputError(Problem("oomph explain", "nothing to read", allowed=allowed))
    if options.follow:
        return _follow(options, overrides)
    from oomph.runs.explain import explain

    found = explain(options.files, options.gpu, overrides=overrides, with_fixes=not options.no_fixes)
    if options.svg:
        from oomph.files import write_whole
        from oomph.report.explain_svg import explanation_to_svg

        write_whole(Path(options.svg), explanation_to_svg(found).encode())
        print(f"wrote {options.svg}", file=sys.stderr)
    if options.json:
        emit_json(found.to_dict())
        return DONE
    from oomph.report.explain_summary import summarise_explanation

    summary = summarise_explanation(found)
    if options.markdown:
        from oomph.report.explain_markdown import explanation_to_markdown

        emit(explanation_to_markdown(summary))
    else:
        from oomph.report.explain_terminal import explanation_to_text

        emit(explanation_to_text(summary))
    return DONE


def _follow(options: argparse.Namespace, overrides: list[Override]) -> int:
    """Watch a growing log until the run is over or the user leaves; 1 where it ended, or stands, badly."""
    if len(options.files) != 1 or options.files[0] == STDIN or options.json or options.markdown or options.svg:
        allowed = "one log that grows, and no --json, --markdown or --svg"
        raise InputError(Problem("--follow", "watches one file", found=" ".join(options.files), allowed=allowed))
    from oomph.report.explain_follow import follow
    from oomph.runs.follow import Follower
    from oomph.runs.nvml import sampler

    follower = Follower(options.files[0], sampler())
    try:
        follow(follower, options.gpu, overrides, options.every)
    except KeyboardInterrupt:
        emit("no longer watching; the run is left alone\n")
        return INTERRUPTED
    return FAILING if follower.watch.failing else DONE


def picture(text: str) -> str:
    """A file that a picture is written to."""
    if not text.lower().endswith(".svg"):
        raise argparse.ArgumentTypeError(f"must be a file whose name ends in .svg, found {text!r}")
    return text


def _parser() -> VerbParser:
    parser = VerbParser(
        "explain",
        "What happened in a run, and why: from its log, nvidia-smi, an out-of-memory message or a memory snapshot, "
        "in any mix. Config files and --key=value tell what the log does not.",
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="what there is of one run; - for standard input")
    parser.add_argument("--gpu", metavar="NAME", help="the card, where nothing names it")
    parser.add_argument("--no_fixes", action="store_true", help="do not look for better settings, which takes seconds")
    parser.add_argument("--follow", action="store_true", help="watch a log that grows, and say when something turns")
    parser.add_argument("--every", type=positive, default=2.0, metavar="S", help="with --follow: seconds between looks")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="every finding and fix as JSON")
    output.add_argument("--markdown", action="store_true", help="the report as Markdown")
    parser.add_argument(
        "--svg", type=picture, metavar="FILE.svg", help="write the plots and the memory picture there too"
    )
    return parser
