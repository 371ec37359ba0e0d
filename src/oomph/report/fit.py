"""The report of a fit: the ranked options, best first in sight, and why; and of the cards that would do."""

from __future__ import annotations

import msgspec

from oomph.config import TrainConfig, usual_loss_chunk
from oomph.fitting.cards import CardOption, Cards
from oomph.fitting.propose import MAKES_ROOM
from oomph.fitting.result import Fit, Option
from oomph.fitting.verdict import PATCH, WHY_SAFE
from oomph.report import document as doc
from oomph.report.plan import METHOD_NAMES, heading, memory_bar
from oomph.units import count, counted

SECTIONS = {
    "same": "fits, and the training is the same",
    "nearly": "fits, and the training is nearly the same",
    "different": "fits, but is another training: the last resort",
    "no": "does not fit",
}
PROGRAMS = {
    "nanogpt": "nanoGPT", "patched": "patched", "oomph": "oomph", "hf": "Trainer", "torch": "loop",
    "nanochat": "nanochat",
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
SHOWN, MODELS = 5, 2  # options on one screen; cards are twice as many
THIN = "* fits by less than the prediction may miss, or only by giving cached memory back"
UNKNOWN = "–"
MANY_HOURS = 1000  # from which a tenth is no longer shown


def document(fit: Fit) -> doc.Document:
    """The report of a fit: verdict, memory now and at its best, the first options; in detail all of them, and why."""
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
    parts += [options_table(fit, _first(fit))] if fit.options else []
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
    """The options on one screen: the best, and those next to it in rank."""
    ranked = sorted(range(len(fit.options)), key=lambda index: (index != fit.best, index))
    return set(ranked[: MODELS if fit.seeks_a_model else SHOWN])


def options_table(fit: Fit, first: set[int], fitting_only: bool = False) -> doc.Table:
    """The options by kind, those that are not among the `first` in detail alone."""
    titles = SECTIONS | {"different": "models that fit"} if fit.seeks_a_model else SECTIONS
    groups: dict[str, list[doc.Row]] = {title: [] for title in titles.values()}
    for index, option in enumerate(fit.options):
        if option.fits or not fitting_only:
            groups[titles[option.kind if option.fits else "no"]].append(_row(fit, index, index not in first))
    return doc.Table(OPTIONS, tuple((title, tuple(rows)) for title, rows in groups.items() if rows))


def _row(fit: Fit, index: int, detail: bool) -> doc.Row:
    option, best = fit.options[index], index == fit.best
    cells = (
        f"{'★' if best else '✓' if option.fits else '✗'} {index + 1}",  # counted from 1, as `--option` takes it
        describe_model(option) if fit.seeks_a_model else describe(option),
        PROGRAMS["patched" if option.patched else option.trainer],
        f"{option.sequences:,}",  # to an optimizer step
        f"{option.plan.memory.total_mib:,.0f}",
        f"{option.saved_mib:,.0f}" if not fit.proposed else UNKNOWN,
        UNKNOWN if option.tokens_per_s is None else f"{option.tokens_per_s:,.0f}",
        _hours(option.hours),
        option.reason,
    )
    return doc.Row(cells, "good" if best else "plain" if option.fits else "dim", detail=detail)


def describe(option: Option | CardOption) -> str:
    """An option in few words: the batch, and what else is new."""
    config = option.plan.config
    said = [word for key, word in _words(config).items() if key in option.changes]
    if "method" in option.changes:
        said.remove(_words(config)["adapter_dtype"])
    if config.trainer == "oomph" and config.loss_chunk != usual_loss_chunk(config):  # oomph's own default needs no word
        said.append(f"loss by {config.loss_chunk}" if config.loss_chunk else "loss at once")
    return ", ".join([f"{config.batch_size} × {config.gradient_accumulation_steps}", *said])


def _words(config: TrainConfig) -> dict[str, str]:
    """What is said of each key where it is new."""
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
    """Which cards would do: of each memory size the fastest; in detail all of them."""
    rows: list[doc.Row] = []
    sizes: set[int] = set()
    for card in cards.fitting:
        again = card.device.memory_mib in sizes
        sizes.add(card.device.memory_mib)
        rows.append(_card_row(card, again or len(sizes) > 2 * SHOWN))
    parts: list[doc.Part] = [doc.Verdict(cards.verdict, "yes" if rows else "no")]
    parts += [doc.Table(CARDS, (("", tuple(rows)),))] if rows else []
    parts += [doc.Text(f"{THIN}.")] if any(card.margin for card in cards.fitting) else []
    return doc.Document(tuple(parts), "every card, not only the fastest of each memory size")


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
