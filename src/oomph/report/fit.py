"""The report of a fit: the ranked options, the best on the first screen, and why; and of the cards that are enough."""

from __future__ import annotations

import msgspec

from oomph.config import TrainConfig, usual_loss_chunk
from oomph.fitting.cards import CardOption, Cards
from oomph.fitting.propose import MAKES_ROOM
from oomph.fitting.result import Fit, Option
from oomph.fitting.search import is_safe
from oomph.fitting.several import CardsOption, FewCards
from oomph.fitting.verdict import PATCH, WHY_SAFE, name_of
from oomph.report import document as doc
from oomph.report.heading import METHOD_NAMES, SHARINGS, heading
from oomph.report.plan import memory_bar
from oomph.units import count, counted

SECTIONS = {
    "same": "fits, and the training is the same",
    "nearly": "fits, and the training is nearly the same",
    "different": "fits, but is another training: the last resort",
    "no": "does not fit",
}
PROGRAMS = {
    "nanogpt": "nanoGPT", "patched": "patched", "oomph": "oomph", "hf": "Trainer", "trl": "SFT", "torch": "loop",
    "nanochat": "nanochat", "torchtune": "torchtune", "litgpt": "litgpt", "torchtitan": "torchtitan",
    "unsloth": "Unsloth",
}  # fmt: skip
OPTIONS = (
    doc.Column("", words=True),
    doc.Column("option", words=True),
    doc.Column("program", words=True),
    doc.Column("batch", spare=3, detail=True),
    doc.Column("MiB"),
    doc.Column("saved", spare=2, detail=True),
    doc.Column("tokens/s"),
    doc.Column("hours"),
    doc.Column("advice", words=True),
)
CARDS = (
    doc.Column("card", words=True),
    doc.Column("MiB"),
    doc.Column("program", words=True),
    doc.Column("as", words=True),
    doc.Column("needs"),
    doc.Column("tokens/s"),
    doc.Column("hours"),
    doc.Column("rent, USD", spare=1),
)
LINES, MODEL_LINES, LETTERS = 6, 7, 22  # of the options on one screen, and letters in a line of them
CARDS_SHOWN = 10  # on one screen
THIN = "* fits by less than the prediction may miss, or only by giving cached memory back"
UNKNOWN = "–"
MANY_HOURS = 1000  # from here on without decimals


def document(fit: Fit) -> doc.Document:
    """The report of a fit: verdict, memory now and of the best option, the first options; in detail all, and why."""
    bars = [] if fit.seeks_a_model else [memory_bar(fit.now)]
    if fit.chosen is not None and (fit.chosen.changes or not bars):
        bars.append(msgspec.structs.replace(memory_bar(fit.chosen.plan), program=f"option {(fit.best or 0) + 1}"))
    about = heading(fit.now)
    parts: list[doc.Part] = [
        doc.Verdict(fit.verdict, "yes" if fit.is_yes else "no"),
        msgspec.structs.replace(about, shown="detail"),
        doc.Title(about.text, about.lines[1:], shown="short"),
    ]
    parts += [doc.Bars(tuple(bars), shown="short")] if bars else []
    parts += [options_table(fit, _first(fit)), *_star(fit)] if fit.options else []
    parts += doc.sentence_list("why", fit.why)
    parts += doc.sentence_list("what changes in the training", tuple(_effects(fit)))
    if any(option.patched and option.fits for option in fit.options):
        parts.append(doc.Code("the two-line patch for nanoGPT", PATCH, WHY_SAFE, shown="detail"))
    parts += doc.sentence_list("to know", fit.now.notes)
    weighed = f"{fit.evaluated:,} settings weighed; every one shown is simulated in full on this card."
    parts.append(doc.Text(weighed, shown="detail"))
    hidden = len(fit.options) - len(_first(fit))
    more = (
        f"{counted(hidden, 'more option')}, why, and what each changes" if hidden else "why, and what there is to know"
    )
    return doc.Document(tuple(parts), more)


def _first(fit: Fit) -> set[int]:
    """The options on one screen: the best, then the others of its kind by rank, as far as there is room."""
    chosen = fit.chosen
    alike = [
        index
        for index, option in enumerate(fit.options)
        if chosen is None or (option.fits and option.kind == chosen.kind)
    ]
    shown: set[int] = set()
    left = MODEL_LINES if fit.seeks_a_model else LINES
    for index in sorted(alike, key=lambda index: (index != fit.best, index)):
        text = describe_model(fit.options[index]) if fit.seeks_a_model else describe(fit.options[index])
        left -= -(-len(text) // LETTERS)
        if left < 0 and shown:
            break
        shown.add(index)
    return shown


def _star(fit: Fit) -> list[doc.Part]:
    """What the star and the percentages stand for."""
    chosen = fit.chosen
    if chosen is None or fit.seeks_a_model:
        return []
    program = name_of(chosen)
    fits = "surely fits" if is_safe(chosen.plan) else "fits, if not surely"
    if chosen.kind != "same":
        star = f"{fits}, and changes the training least"
    elif not chosen.changes:
        star = f"your settings: no others that surely fit {program} are clearly faster"
    else:
        star = f"the fastest that {fits} {'without touching' if program == fit.now.program else 'under'} {program}"
    unsure = " ? fits, not surely." if any(_mark(option) == "?" for option in fit.options) else ""
    return [doc.Text(f"★ {star}.{unsure} %: tokens/s against ★.")]


def options_table(fit: Fit, first: set[int], fitting_only: bool = False) -> doc.Table:
    """The options by kind; only those in `first` outside the details."""
    titles = SECTIONS | {"different": "models that fit"} if fit.seeks_a_model else SECTIONS
    groups: dict[str, list[doc.Row]] = {title: [] for title in titles.values()}
    for index, option in enumerate(fit.options):
        if option.fits or not fitting_only:
            groups[titles[option.kind if option.fits else "no"]].append(_row(fit, index, index not in first))
    return doc.Table(OPTIONS, tuple((title, tuple(rows)) for title, rows in groups.items() if rows))


def _row(fit: Fit, index: int, detail: bool) -> doc.Row:
    option, best = fit.options[index], index == fit.best
    cells = (
        f"{'★' if best else _mark(option)} {index + 1}",  # counted from 1, as `--option` takes it
        describe_model(option) if fit.seeks_a_model else describe(option),
        PROGRAMS["patched" if option.patched else option.trainer],
        f"{option.sequences:,}",  # per optimizer step
        f"{option.plan.memory.total_mib:,.0f}",
        f"{option.saved_mib:,.0f}" if not fit.proposed else UNKNOWN,
        UNKNOWN if option.tokens_per_s is None else f"{option.tokens_per_s:,.0f}",
        _hours(option.hours),
        option.reason,
    )
    return doc.Row(cells, "good" if best else "plain" if option.fits else "dim", detail=detail)


def _mark(option: Option) -> str:
    if not option.fits:
        return "✗"
    return "✓" if is_safe(option.plan) else "?"


def describe(option: Option | CardOption) -> str:
    """An option in few words: the batch, and what else is new."""
    config = option.plan.config
    new = option.changes.keys() - ({"adapter_dtype"} if "method" in option.changes else set())
    said = [word for key, word in _words(config).items() if key in new]
    if config.trainer == "oomph" and config.loss_chunk != usual_loss_chunk(config):  # oomph's default is not shown
        said.append(f"loss by {config.loss_chunk}" if config.loss_chunk else "loss at once")
    return ", ".join([f"{config.batch_size} × {config.gradient_accumulation_steps}", *said])


def _words(config: TrainConfig) -> dict[str, str]:
    """How each changed key is described."""
    return {
        "n_layer": counted(config.n_layer, "layer"),
        "n_embd": f"width {config.n_embd}",
        "block_size": f"block {config.block_size}",
        "compile": "compiled" if config.compile else "not compiled",
        "checkpoint_layers": f"{counted(config.checkpoint_layers, 'block')} checkpointed",
        "method": METHOD_NAMES.get(config.method, "all weights"),
        "lora_rank": f"rank {config.lora_rank}",
        "adapter_dtype": f"adapters in {config.adapter_dtype}",
        "optimizer": config.optimizer,
        "optimizer_loop": f"{config.optimizer_loop} optimizer",
        "dtype": config.dtype or "",
        "autocast": "autocast" if config.autocast else "bfloat16 throughout",
        "expandable_segments": "expandable segments" if config.expandable_segments else "fixed segments",
        "parallel": config.parallel or "none",
        "reshard_after_forward": "not resharded" if config.reshard_after_forward == "false" else "resharded",
    }


def describe_model(option: Option) -> str:
    """A model in few words: its size, the batch, and what else makes room for it."""
    config = option.plan.config
    size = f"{counted(config.n_layer, 'layer')} × {config.n_embd}, {count(option.plan.model.params_nanogpt)}"
    said = [word for key, word in _words(config).items() if key in option.changes and key in MAKES_ROOM]
    return ", ".join([size, f"{config.batch_size} × {config.gradient_accumulation_steps}", *said])


def _hours(hours: float | None) -> str:
    return UNKNOWN if hours is None else f"{hours:,.1f}" if hours < MANY_HOURS else f"{hours:,.0f}"


def _effects(fit: Fit) -> list[str]:
    """What the options do to the training; those that do the same share a line."""
    effects: dict[str, list[str]] = {}
    for index, option in enumerate(fit.options):
        effects.setdefault(option.effect, []).append(str(index + 1))
    return [f"{', '.join(numbers)}: {effect}" for effect, numbers in effects.items()]


def cards_document(cards: Cards) -> doc.Document:
    """Which cards are enough: the fastest of each memory size; in detail all of them."""
    rows: list[doc.Row] = []
    sizes: set[int] = set()
    for card in cards.fitting:
        again = card.device.memory_mib in sizes
        sizes.add(card.device.memory_mib)
        rows.append(_card_row(card, again or len(sizes) > CARDS_SHOWN))
    parts: list[doc.Part] = [doc.Verdict(cards.verdict, "yes" if rows else "no")]
    parts += [doc.Table(CARDS, (("", tuple(rows)),))] if rows else []
    parts += [doc.Text(f"{THIN}.")] if any(card.margin for card in cards.fitting) else []
    return doc.Document(tuple(parts), "every card, not only the fastest of each memory size")


FEW = (
    doc.Column("cards", words=True),
    doc.Column("as", words=True),
    doc.Column("needs"),
    doc.Column("tokens/s"),
    doc.Column("hours"),
    doc.Column("USD"),
)


def few_document(found: FewCards) -> doc.Document:
    """How few cards are enough: the fewest and the cheapest kinds; in detail all, and those that come close."""
    rows = [_few_row(option, at >= CARDS_SHOWN) for at, option in enumerate(found.fitting)]
    parts: list[doc.Part] = [doc.Verdict(found.verdict, "yes" if rows else "no")]
    parts += [doc.Table(FEW, (("", tuple(rows)),))] if rows else []
    near = [_few_row(option, bool(rows)) for option in found.options if not option.does]
    parts += [doc.Table(FEW, (("over a limit", tuple(near)),))] if near else []
    return doc.Document(tuple(parts), "every kind of card, and those over a limit")


def _few_row(option: CardsOption, detail: bool) -> doc.Row:
    config, time = option.plan.config, option.plan.time
    reshards = " not resharded" if config.reshard_after_forward == "false" else ""
    shared = f"{SHARINGS[config.parallel]}{reshards}, " if config.parallel in SHARINGS else ""
    checkpointed = ", checkpointed" if config.checkpoint_layers else ""
    cells = (
        f"{option.cards} × {option.device.name}",
        f"{shared}{config.batch_size} × {config.gradient_accumulation_steps}{checkpointed}",
        f"{option.plan.memory.total_mib:,.0f}",
        UNKNOWN if time is None else f"{time.tokens_per_s:,.0f}",
        _hours(time.hours if time else None),
        UNKNOWN if option.usd is None else f"{option.usd:,.0f}",
    )
    return doc.Row(cells, detail=detail)


def _card_row(card: CardOption, detail: bool) -> doc.Row:
    plan, time, rent = card.plan, card.plan.time, card.rent
    cells = (
        card.device.name,
        f"{card.device.usable_mib:,}",
        PROGRAMS["patched" if card.patched else plan.config.trainer],
        describe(card),
        f"{plan.memory.total_mib:,.0f}{'*' * bool(card.margin)}",
        UNKNOWN if time is None else f"{time.tokens_per_s:,.0f}",
        _hours(time.hours if time else None),
        UNKNOWN if rent is None else f"{rent[0]:,.0f} to {rent[1]:,.0f}",
    )
    return doc.Row(cells, detail=detail)
