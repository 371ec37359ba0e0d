"""`oomph plan`: what a training run needs, before it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from oomph import config as configs
from oomph.cli.arguments import (
    VerbParser,
    add_device,
    add_model,
    add_output,
    add_source,
    command,
    gather_device,
    positive,
)
from oomph.cli.output import DONE, NO, draw, gather, show
from oomph.config import LoadedConfig, Override
from oomph.config.sharing import untimed_keys
from oomph.devices import Device
from oomph.errors import InputError, Problem
from oomph.planning.plan import Plan, other_trainer, plan, without_returned_logits
from oomph.planning.refusals import check_options
from oomph.planning.scaling import scaling
from oomph.predict.cost import POWER_SHARE, PRICE_CURRENCY, PRICE_PER_KWH

if TYPE_CHECKING:
    from oomph.report.document import Document


def run(argv: list[str]) -> int:
    """Plan and print; the exit code says whether the chosen trainer fits."""
    problems: list[Problem] = []
    options, overrides = _parser().parse(argv, problems)
    loaded = gather(problems, lambda: configs.load(options.sources, overrides, model=options.model))
    gather(problems, lambda: check_options(price_kwh=options.price_kwh, currency=options.currency))
    device = gather_device(problems, options, loaded, measure=False)
    if problems or loaded is None or device is None:
        raise InputError(problems)
    unmeasured = device.kind == "cpu"  # `plan` measures this CPU, which takes seconds, once nothing can be wrong
    asked = _planner(options, None if unmeasured else device)(loaded)
    plans, other = [asked], other_trainer(asked.config)
    if (options.svg or not options.json) and not options.model and other is not None:
        plans.append(_planner(options, asked.device)(configs.with_trainer(loaded, other)))
    if options.snapshot:
        _write_snapshot(options.snapshot, asked)
    if options.svg:
        from oomph.report.plan import picture, scaling_picture

        scale = scaling(asked)
        draw(options.svg, [picture(plans), *([scaling_picture(scale)] if scale else [])])
    show(options, asked.to_dict, lambda: _document(options, plans), _next(options, overrides, asked))
    return NO if asked.memory.fits is False else DONE


def _document(options: argparse.Namespace, plans: list[Plan]) -> Document:
    from oomph.report.plan import document, summarise

    full = options.all or options.markdown
    summary = summarise(plans, without_returned_logits(plans[0]) if full else None, brief=not full)
    return document(plans, summary, scaling(plans[0]) if full else ())


def _next(options: argparse.Namespace, overrides: list[Override], asked: Plan) -> tuple[str, str] | None:
    """The command to type after a plan; none where a search has no time to go by."""
    if untimed_keys(asked.config):
        return None
    if asked.memory.fits is False:
        return command("fit", options, overrides), "looks for settings that fit"
    is_run = options.model is None or options.model.endswith(".json")  # a check runs no Python file
    if options.gpu is None and options.gpu_mib is None and is_run:
        return command("check", options, overrides), "runs a few steps for real"
    return command("fit", options, overrides), "looks for faster settings"


def _planner(options: argparse.Namespace, device: Device | None) -> Callable[[LoadedConfig], Plan]:
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
        )

    return make


def _write_snapshot(path: str, asked: Plan) -> None:
    if asked.device.kind == "cpu":
        raise InputError(
            Problem("--snapshot", "is a picture of a GPU's memory", found=asked.device.name, allowed="--gpu NAME")
        )
    from oomph.predict.allocator.replay import record
    from oomph.step.snapshot import read as snapshot

    snapshot.write(record(asked.steps, expandable_segments=asked.config.expandable_segments), Path(path))
    print(f"wrote {path}: open it at pytorch.org/memory_viz", file=sys.stderr)
    memory = asked.memory
    if memory.capacity_mib is not None and (memory.fits is False or memory.retries):
        room = f"{asked.device.name} has {memory.capacity_mib:,.0f} MiB for a process"
        then = "an out-of-memory error ends the run" if memory.fits is False else "cached memory is given back"
        print(f"it shows a card with room for everything; {room}, and there {then}", file=sys.stderr)


def _parser() -> VerbParser:
    parser = VerbParser(
        "plan", "What a training run needs: memory, time, money; nanoGPT and oomph train side by side.", keys=True
    )
    add_source(parser)
    add_device(parser)
    add_model(parser)
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
    add_output(parser, "the plan of the chosen trainer as JSON")
    parser.add_argument("--svg", metavar="FILE", help="write pictures there: memory, and how several cards scale")
    parser.add_argument("--snapshot", metavar="FILE", help="write the predicted timeline as a PyTorch memory snapshot")
    return parser
