"""`oomph fit`: the best setting that fits the card, at the same effective batch."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

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
    whole,
)
from oomph.cli.output import DONE, NO, StatusLine, gather, show
from oomph.config import LoadedConfig, Override
from oomph.devices import Device
from oomph.errors import InputError, Problem
from oomph.fitting.fit import check_tokens, fit
from oomph.fitting.result import Fit, Option

EVERY_CARD = "all"
ANY_MODEL = "Qwen/Qwen3-0.6B"  # stands for every known model while options are checked
FOR_A_LARGE_MODEL = {"batch_size": "1", "block_size": "2048", "checkpoint_layers": "all"}  # unless set


def run(argv: list[str]) -> int:
    """Fit, print, write if requested; the exit code says whether something fits."""
    options, overrides, loaded, device = _asked(_parser(), argv)
    line = StatusLine()
    try:
        if options.gpus:
            return _few_cards(options, loaded, device, line)
        if device is None:
            return _every_card(options, loaded, line)
        if options.flags or options.longest:
            return _by_flags(options, overrides, device)
        if _seeks_a_known_model(options, overrides):
            return _known_models(options, overrides, device)
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
    from oomph.report.fit import document

    show(options, found.to_dict, lambda: document(found), _next(options, overrides, found))
    if options.write:
        _write(options, found, chosen)
    return DONE if found.is_yes else NO


def _next(options: argparse.Namespace, overrides: list[Override], found: Fit) -> tuple[str, str] | None:
    """The command to type after a fit."""
    if found.best is None or options.write:
        return None
    how = [f"--{name}={value:g}" for name in ("tokens", "hours") if (value := getattr(options, name)) is not None]
    how += ["--largest"] if options.largest else []
    return command("fit", options, overrides, *how, "--write", "fits.py"), f"writes option {found.best + 1}"


def _asked(
    parser: VerbParser, argv: list[str]
) -> tuple[argparse.Namespace, list[Override], LoadedConfig, Device | None]:
    """The options, keys, config and device; no device means every card. Raises with every problem."""
    problems: list[Problem] = []
    parsed = gather(problems, lambda: parser.parse(argv, problems))
    if parsed is None:
        raise InputError(problems)
    options, overrides = parsed
    sources = [ANY_MODEL] if _seeks_a_known_model(options, overrides) else options.sources
    loaded = gather(problems, lambda: configs.load(sources, overrides, model=options.model))
    if loaded is not None:
        gather(problems, lambda: check_tokens(loaded, options.tokens))
    problems += _problems(options)
    if options.gpus and options.gpu:
        problems.append(Problem("--gpus", "says which cards, as --gpu does", options.gpus, "one of the two"))
    options.gpu = options.gpu or options.gpus
    device = gather_device(problems, options, loaded) if options.gpu != EVERY_CARD else None
    if problems or loaded is None:
        raise InputError(problems)
    return options, overrides, loaded, device


def _trying(line: StatusLine) -> Callable[[str], None]:
    """A function that shows what is being tried, and for how long the search has run."""
    start = time.monotonic()
    return lambda what: line.show(f"{time.monotonic() - start:.0f} s  trying {what}")


def _seeks_a_known_model(options: argparse.Namespace, overrides: list[Override]) -> bool:
    """Whether the largest model for a method of fine-tuning is requested, without a named model."""
    asked = bool(options.largest) and not options.sources and options.model is None
    return asked and any(key == "method" for key, _, _ in overrides)


def _known_models(options: argparse.Namespace, overrides: list[Override], device: Device) -> int:
    from oomph.fitting.models import which_models
    from oomph.report.flags import models_document

    given = {key for key, _, _ in overrides}
    usual = [(key, value, f"--largest: {key}={value}") for key, value in FOR_A_LARGE_MODEL.items() if key not in given]
    found = which_models(
        lambda name: configs.load([name], [*usual, *overrides]), device, reserve_mib=options.reserve_mib
    )
    show(options, found.to_dict, lambda: models_document(found))
    return DONE if found.fitting else NO


def _by_flags(options: argparse.Namespace, overrides: list[Override], device: Device) -> int:
    """Print what each flag does, or the longest context."""
    from oomph.fitting.flags import longest_context, what_flags_do
    from oomph.report.flags import context_document, flags_document

    def changed(keys: Mapping[str, str]) -> LoadedConfig:
        return configs.load(options.sources, [*overrides, *((key, value, f"--{key}") for key, value in keys.items())])

    if options.longest:
        context = longest_context(changed, device, reserve_mib=options.reserve_mib)
        show(options, context.to_dict, lambda: context_document(context))
        return DONE if context.plan is not None else NO
    found = what_flags_do(changed, device, reserve_mib=options.reserve_mib)
    show(options, found.to_dict, lambda: flags_document(found))
    return DONE if found.now.memory.fits is not False else NO


def _every_card(options: argparse.Namespace, loaded: LoadedConfig, line: StatusLine) -> int:
    from oomph.fitting.cards import which_cards

    limits = {"reserve_mib": options.reserve_mib, "tokens": options.tokens, "hours": options.hours}
    found = which_cards(loaded, **limits, progress=_trying(line))
    line.clear()
    from oomph.report.fit import cards_document

    show(options, found.to_dict, lambda: cards_document(found))
    return DONE if found.fitting else NO


def _few_cards(options: argparse.Namespace, loaded: LoadedConfig, device: Device | None, line: StatusLine) -> int:
    from oomph.fitting.several import few_cards

    limits = {"tokens": options.tokens, "hours": options.hours, "usd": options.usd, "reserve_mib": options.reserve_mib}
    found = few_cards(loaded, cards=None if device is None else [device], **limits, progress=_trying(line))
    line.clear()
    from oomph.report.fit import few_document

    show(options, found.to_dict, lambda: few_document(found))
    return DONE if found.fitting else NO


def _problems(options: argparse.Namespace) -> Iterator[Problem]:
    """Problems that can be found before the search."""
    if options.gpu == EVERY_CARD or options.gpus:
        for name, given in (("--largest", options.largest), ("--write", options.write)):
            if given:
                where = f"--gpus {options.gpus}" if options.gpus else "--gpu all"
                yield Problem(name, "needs one card", found=where, allowed="the name of a card")
    if options.usd is not None and not options.gpus:
        yield Problem("--usd", "limits how many cards", allowed="--gpus all, or --gpus with the name of a card")
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
    """The option to write: the one requested by number, or the best."""
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
        keys=True,
    )
    add_source(parser)
    add_device(parser)
    add_model(parser)
    parser.add_argument("--tokens", type=amount, metavar="N", help="how many to train on, such as 10B")
    parser.add_argument("--hours", type=positive, metavar="H", help="how long the run may take")
    parser.add_argument(
        "--gpus", metavar="NAME", help="how few cards of this kind would do, or of each kind that is rented: all"
    )
    parser.add_argument("--usd", type=positive, metavar="USD", help="with --gpus: what renting them may cost")
    parser.add_argument(
        "--largest",
        action="store_true",
        help="the largest model instead, with the config's batch and tokens; with --method and no CONFIG: of those "
        "known by name",
    )
    parser.add_argument(
        "--flags", action="store_true", help="what each flag of a transformers run saves and costs, by itself"
    )
    parser.add_argument(
        "--longest", action="store_true", help="the longest context (block_size) of the config as it is"
    )
    parser.add_argument("--write", metavar="FILE", help="write the best option there, as a .py or .toml config")
    parser.add_argument("--option", type=whole, metavar="N", help="with --write: that option instead of the best")
    parser.add_argument("--overwrite", action="store_true", help="with --write: replace a file that is there")
    add_output(parser, "every option as JSON")
    return parser


def amount(text: str) -> float:
    """A number of tokens as people write it: 10B, 3.68B, 524_288."""
    from oomph.units import parse_count

    value = parse_count(text)
    return float(value) if value is not None and value > 0 else positive(text)
