"""`oomph fit`: the best setting that fits the card, at the same effective batch."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from oomph import config as configs
from oomph.cli.arguments import VerbParser
from oomph.cli.output import Line, emit, emit_json, gather
from oomph.cli.plan import add_device, add_source, gather_device, keys_help, positive
from oomph.config import LoadedConfig
from oomph.devices import Device
from oomph.errors import InputError, Problem
from oomph.fitting.answer import check_tokens, fit
from oomph.fitting.result import Fit, Option

EVERY_CARD = "all"


def run(argv: list[str]) -> int:
    """Fit, print, write where asked, and say with the exit code whether something fits."""
    parser = _parser()
    if "--help" in argv or "-h" in argv:
        parser.epilog = keys_help()
    options, loaded, device = _asked(parser, argv)
    line = Line()
    try:
        if device is None:
            return _every_card(options, loaded, line)
        found = fit(
            loaded,
            device,
            reserve_mib=options.reserve_mib,
            tokens=options.tokens,
            hours=options.hours,
            largest=options.largest,
            progress=_trying(line),
        )
    finally:
        line.clear()
    chosen = _option(options, found)
    from oomph.report.fit_summary import is_yes, summarise_fit

    if options.json:
        emit_json(found.to_dict())
    elif options.markdown:
        from oomph.report.fit_markdown import fit_to_markdown

        emit(fit_to_markdown(summarise_fit(found)))
    else:
        from oomph.report.fit_terminal import fit_to_text

        emit(fit_to_text(summarise_fit(found)))
    if options.write:
        _write(options, found, chosen)
    return 0 if is_yes(found) else 1


def _asked(parser: VerbParser, argv: list[str]) -> tuple[argparse.Namespace, LoadedConfig, Device | None]:
    """The options, the config and the device; no device for every card. Raises with all that is wrong."""
    problems: list[Problem] = []
    parsed = gather(problems, lambda: parser.parse(argv, problems))
    if parsed is None:
        raise InputError(problems)
    options, overrides = parsed
    loaded = gather(problems, lambda: configs.load(options.sources, overrides))
    device = None
    if options.gpu != EVERY_CARD:
        device = gather_device(problems, options, loaded)
    if loaded is not None:
        gather(problems, lambda: check_tokens(loaded, options.tokens))
    problems += _problems(options)
    if problems or loaded is None:
        raise InputError(problems)
    return options, loaded, device


def _trying(line: Line) -> Callable[[str], None]:
    """Says what is being tried, and since when the search runs."""
    start = time.monotonic()
    return lambda what: line.show(f"{time.monotonic() - start:.0f} s  trying {what}")


def _every_card(options: argparse.Namespace, loaded: LoadedConfig, line: Line) -> int:
    from oomph.fitting.cards import which_cards

    limits = {"reserve_mib": options.reserve_mib, "tokens": options.tokens, "hours": options.hours}
    found = which_cards(loaded, **limits, progress=_trying(line))
    line.clear()
    if options.json:
        emit_json(found.to_dict())
    elif options.markdown:
        from oomph.report.fit_markdown import cards_to_markdown

        emit(cards_to_markdown(found))
    else:
        from oomph.report.fit_terminal import cards_to_text

        emit(cards_to_text(found))
    return 0 if found.fitting else 1


def _problems(options: argparse.Namespace) -> Iterator[Problem]:
    """What can be told to be wrong before the search."""
    if options.gpu == EVERY_CARD:
        for name, given in (("--largest", options.largest), ("--write", options.write)):
            if given:
                yield Problem(name, "needs one card", found="--gpu all", allowed="the name of a card")
    if not options.write:
        for name, given in (("--option", options.option is not None), ("--overwrite", options.overwrite)):
            if given:
                yield Problem(name, "says how to write an option", allowed="--write FILE beside it")
        return
    from oomph.fitting.write import check_target

    try:
        check_target(Path(options.write), options.overwrite)
    except InputError as error:
        yield from error.problems


def _option(options: argparse.Namespace, found: Fit) -> Option | None:
    """The option to write: the one asked for by its number, or the best."""
    if options.option is None:
        return found.chosen
    if not 1 <= options.option <= len(found.options):
        raise InputError(
            Problem("--option", "no such option", str(options.option), f"a number from 1 to {len(found.options)}")
        )
    chosen: Option = found.options[options.option - 1]
    return chosen


def _write(options: argparse.Namespace, found: Fit, chosen: Option | None) -> None:
    if chosen is None:
        print(f"{options.write} is not written: nothing fits", file=sys.stderr)
        return
    from oomph.fitting.write import write_config

    held = write_config(Path(options.write), found, chosen)
    told = f"option {found.options.index(chosen) + 1}"
    if not chosen.fits:
        told += ", which does not fit"
    if chosen.kind != "same" and not found.seeks_a_model:
        which = "another training than" if chosen.kind == "different" else "nearly, not quite, the training that"
        told += f"; it is {which} you asked for, {chosen.name}: {chosen.effect}"
    if held:
        values = ", ".join(f"{key} = {getattr(chosen.plan.config, key)}" for key in held)
        told += f"; as before, though worked out from what has changed: {values}"
    print(f"wrote {options.write}: {told}", file=sys.stderr)


def _parser() -> VerbParser:
    parser = VerbParser(
        "fit",
        "The best setting that fits the card at the same effective batch, and what every other option would buy.\n"
        "Without CONFIG, but with --tokens or --hours: a model and a run proposed from nothing.",
    )
    add_source(parser)
    add_device(parser)
    parser.add_argument("--tokens", type=amount, metavar="N", help="how many to train on, such as 10B")
    parser.add_argument("--hours", type=positive, metavar="H", help="how long the run may take")
    parser.add_argument(
        "--largest", action="store_true", help="the largest model instead, with the config's batch and tokens"
    )
    parser.add_argument("--write", metavar="FILE", help="write the best option there, as a .py or .toml config")
    parser.add_argument("--option", type=place, metavar="N", help="with --write: that option instead of the best")
    parser.add_argument("--overwrite", action="store_true", help="with --write: replace a file that is there")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="every option as JSON")
    output.add_argument("--markdown", action="store_true", help="the report as Markdown")
    return parser


def place(text: str) -> int:
    """An option's number, as the table counts them."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, found {text!r}")
    return int(text)


def amount(text: str) -> float:
    """A number of tokens as people write it: 10B, 3.68B, 524_288."""
    from oomph.config.values import count

    value = count(text)
    return float(value) if value is not None and value > 0 else positive(text)
