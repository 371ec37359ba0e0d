"""`oomph compare`: runs side by side, who wins at what, and why."""

from __future__ import annotations

from oomph.cli.arguments import VerbParser, add_output
from oomph.cli.output import DONE, draw, show


def run(argv: list[str]) -> int:
    """Read, compare, print."""
    options, overrides = _parser().parse(argv)
    from oomph.runs.compare import compare

    found = compare(options.runs, options.gpu, overrides=overrides)
    from oomph.report.compare import document, picture

    if options.svg:
        draw(options.svg, [picture(found)])
    show(options, found.to_dict, lambda: document(found))
    return DONE


def _parser() -> VerbParser:
    parser = VerbParser(
        "compare",
        "Two or more runs side by side: settings, speed, losses at the same step, tokens, FLOPs and hours; who wins at "
        "what, why, and what cannot be compared. --key=value tells what no log does, of all of them.",
        keys=True,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a log or a run's folder each; - for standard input")
    parser.add_argument("--gpu", metavar="NAME", help="the card of runs whose logs name none")
    add_output(parser, "the comparison as JSON", svg="write plots of losses and throughput there too")
    return parser
