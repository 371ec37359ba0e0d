"""`oomph train`: the plan first, then the run, then the one held against the other."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from oomph import config as configs
from oomph.cli.arguments import VerbParser
from oomph.cli.plan import add_source, keys_help, positive
from oomph.errors import InputError, Problem

NO, FAILED, INTERRUPTED = 1, 3, 130


def run(argv: list[str]) -> int:
    """Train; the exit code says how it ended."""
    parser = _parser()
    if "--help" in argv or "-h" in argv:
        parser.epilog = keys_help()
    options, overrides = parser.parse(argv)
    sources, resume = _what_to_resume(options)
    loaded = configs.load(sources, overrides)
    need_torch()
    from oomph.training.failure import DoesNotFitError, TrainingError
    from oomph.training.run import Options, train

    asked = Options(
        resume=resume,
        force=options.force,
        overwrite=options.overwrite,
        keep=int(options.keep),
        save_minutes=options.save_minutes,
        order=options.order,
        weights=options.weights,
        tensorboard=options.tensorboard,
        export=options.export,
        quiet=options.json or options.quiet,
    )
    try:
        result = train(loaded, asked)
    except DoesNotFitError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return NO
    except TrainingError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return FAILED
    if options.json and os.environ.get("RANK", "0") == "0":
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(result.to_dict()), indent=2).decode())
    return INTERRUPTED if result.interrupted else 0


def _what_to_resume(options: argparse.Namespace) -> tuple[list[str], bool | str]:
    """A run's folder or checkpoint among the configs is what --resume goes on with; without it, a mistake."""
    runs = [name for name in options.sources if Path(name).is_dir()]
    sources = [name for name in options.sources if name not in runs]
    if options.resume and not runs:
        runs = [name for name in sources if name.endswith(".pt")]
        sources = [name for name in sources if name not in runs]
    if len(runs) > 1:
        raise InputError(Problem("oomph train", "more than one run to resume", found=", ".join(runs), allowed="one"))
    if runs and not options.resume:
        raise InputError(Problem(runs[0], "this is a folder", allowed="a config; --resume goes on with a run's folder"))
    return sources, runs[0] if runs else options.resume


def need_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise InputError(Problem("oomph train", "needs torch", allowed="after: pip install 'oomph[train]'"))


def _parser() -> VerbParser:
    parser = VerbParser(
        "train", "Train a GPT: nanoGPT's configs, data and checkpoints, in less memory, exactly resumable."
    )
    add_source(parser)
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in out_dir, or with the folder or checkpoint named"
    )
    parser.add_argument("--force", action="store_true", help="train though the plan says that it does not fit")
    parser.add_argument("--overwrite", action="store_true", help="begin anew in a folder that holds a run")
    parser.add_argument("--weights", metavar="PATH", help="first weights: a checkpoint, or Hugging Face's safetensors")
    parser.add_argument(
        "--order",
        choices=("random", "epochs"),
        default="random",
        help="of the data: random windows, as nanoGPT draws"
        " them, or shuffled epochs without repetition; default %(default)s",
    )
    parser.add_argument("--keep", type=positive, default=2, metavar="N", help="checkpoints kept; default %(default)s")
    parser.add_argument(
        "--save_minutes", type=positive, default=15, metavar="M", help="a checkpoint at least this often; default 15"
    )
    parser.add_argument("--tensorboard", action="store_true", help="write event files too, in out_dir/tensorboard")
    parser.add_argument("--export", action="store_true", help="at the end, the weights for Hugging Face's GPT-2")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--json", action="store_true", help="print result.json at the end, and nothing else")
    return parser
