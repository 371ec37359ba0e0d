"""`oomph compare`: runs side by side, who wins at what, and why."""

from __future__ import annotations

import sys
from pathlib import Path

from oomph.cli.arguments import VerbParser
from oomph.cli.explain import picture
from oomph.cli.output import emit, emit_json
from oomph.cli.plan import keys_help


def run(argv: list[str]) -> int:
    """Read, compare, print."""
    parser = _parser()
    if "--help" in argv or "-h" in argv:
        parser.epilog = keys_help()
    options, overrides = parser.parse(argv)
    from oomph.runs.compare import compare

    found = compare(options.runs, options.gpu, overrides=overrides)
    if options.svg:
        from oomph.files import write_whole
        from oomph.report.compare_svg import comparison_to_svg

        write_whole(Path(options.svg), comparison_to_svg(found).encode())
        print(f"wrote {options.svg}", file=sys.stderr)
    if options.json:
        emit_json(found.to_dict())
        return 0
    from oomph.report.compare_summary import summarise_comparison

    summary = summarise_comparison(found)
    if options.markdown:
        from oomph.report.compare_markdown import comparison_to_markdown

        emit(comparison_to_markdown(summary))
    else:
        from oomph.report.compare_terminal import comparison_to_text

        emit(comparison_to_text(summary))
    return 0


def _parser() -> VerbParser:
    parser = VerbParser(
        "compare",
        "Two or more runs side by side: settings, speed, losses at the same step, tokens, FLOPs and hours; who wins at "
        "what, why, and what cannot be compared. --key=value tells what no log does, of all of them.",
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a log or a run's folder each; - for standard input")
    parser.add_argument("--gpu", metavar="NAME", help="the card of runs whose logs name none")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="the comparison as JSON")
    output.add_argument("--markdown", action="store_true", help="the report as Markdown")
    parser.add_argument(
        "--svg", type=picture, metavar="FILE.svg", help="write plots of losses and throughput there too"
    )
    return parser
