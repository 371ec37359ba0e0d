"""`oomph train`: the plan, the run, and how the two compare."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from oomph import config as configs
from oomph.cli.arguments import VerbParser, add_source, need_torch, positive, whole
from oomph.cli.output import DONE, FAILED, INTERRUPTED, NO, WRONG_INPUT, emit_json
from oomph.devices.cpu_rates import is_shared, let_threads_sleep
from oomph.errors import InputError, Problem

if TYPE_CHECKING:
    from oomph.training.start import Options

AGAIN = 75  # sysexits.h's EX_TEMPFAIL: stopped by SIGUSR1, or by Slurm, with a checkpoint; to be restarted


def run(argv: list[str]) -> int:
    """Train; the exit code says how it ended."""
    try:
        options, overrides = _parser().parse(argv)
        sources, resume = _what_to_resume(options)
        loaded = configs.load(sources, overrides)
    except InputError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return WRONG_INPUT  # the first rank of this machine has the same command, and reports it
        raise
    need_torch("train")
    if is_shared():
        let_threads_sleep(os.environ)  # before torch is imported
    from oomph.training.errors import DoesNotFitError, LostRankError, OtherRankError, TrainingError
    from oomph.training.run import train
    from oomph.training.start import Options

    asked = Options(
        resume=resume,
        force=options.force,
        overwrite=options.overwrite,
        keep=options.keep,
        save_minutes=options.save_minutes,
        order=options.order,
        weights=options.weights,
        tensorboard=options.tensorboard,
        trackio=options.trackio,
        export=options.export,
        quiet=options.json or options.quiet,
    )
    if options.find_lr:
        return _find_lr(loaded, asked)
    try:
        result = train(loaded, asked)
    except OtherRankError:
        return FAILED  # the other rank says why
    except LostRankError as error:
        if error.tells:
            _complain(error)
        return FAILED
    except DoesNotFitError as error:
        _complain(error)
        return NO
    except TrainingError as error:
        _complain(error)
        return FAILED
    if options.json and os.environ.get("RANK", "0") == "0":
        emit_json(result.to_dict())
    if result.again:
        return AGAIN
    return INTERRUPTED if result.interrupted else DONE


def _find_lr(loaded: configs.LoadedConfig, asked: Options) -> int:
    from oomph.training.errors import TrainingError
    from oomph.training.find_lr import asked_keys, find_lr, lines

    try:
        found = find_lr(loaded, asked)
    except TrainingError as error:
        _complain(error)
        return FAILED
    print("\n".join(lines(found, asked_keys(loaded))))
    return DONE


def _complain(error: Exception) -> None:
    with suppress(OSError):  # the terminal was closed: the lines are in log.txt
        print(f"ERROR: {error}", file=sys.stderr, flush=True)


def _what_to_resume(options: argparse.Namespace) -> tuple[list[str], bool | str]:
    """The configs, and what to resume: with --resume a run's folder or checkpoint among the configs; else a mistake."""
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


def _parser() -> VerbParser:
    parser = VerbParser(
        "train", "Train a GPT: nanoGPT's configs, data and checkpoints, in less memory, exactly resumable.", keys=True
    )
    add_source(parser)
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in out_dir, or with the folder or checkpoint named"
    )
    parser.add_argument(
        "--find_lr", action="store_true", help="train a minute at rising learning rates and propose one; no run"
    )
    parser.add_argument("--force", action="store_true", help="train although the plan says that it does not fit")
    parser.add_argument("--overwrite", action="store_true", help="start over in a folder that holds a run")
    parser.add_argument(
        "--weights", metavar="PATH", help="initial weights: a checkpoint, or Hugging Face's safetensors"
    )
    parser.add_argument(
        "--order",
        choices=("random", "epochs"),
        help="of the data: random windows, as nanoGPT draws"
        " them, or shuffled epochs without repetition; default random",
    )
    parser.add_argument("--keep", type=whole, metavar="N", help="checkpoints kept; default 2")
    parser.add_argument(
        "--save_minutes", type=positive, metavar="M", help="a checkpoint at least this often; default 15"
    )
    for name, what in (
        ("tensorboard", "write event files in out_dir/tensorboard (needs oomph[track])"),
        ("trackio", "log to trackio, which keeps all on this machine (needs trackio)"),
        ("export", "at the end, the weights for Hugging Face's GPT-2"),
    ):
        parser.add_argument(f"--{name}", action="store_true", default=None, help=what)
        parser.add_argument(
            f"--no_{name}", dest=name, action="store_false", default=None, help="not any more, in a resumed run"
        )
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--json", action="store_true", help="print result.json at the end, and nothing else")
    return parser
