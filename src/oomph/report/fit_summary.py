"""What a report of a fit says, before anyone decides how it looks: sections of options, each with its figures."""

from __future__ import annotations

import msgspec

from oomph.config import TrainConfig, usual_loss_chunk
from oomph.fitting.cards import CardOption, Cards
from oomph.fitting.patch import PATCH, WHY_SAFE
from oomph.fitting.propose import MAKES_ROOM, layers
from oomph.fitting.result import Fit, Option
from oomph.report.summary import summarise
from oomph.units import count

SECTIONS = {
    "same": "fits, and the training is the same",
    "nearly": "fits, and the training is nearly the same",
    "different": "fits, but is another training: the last resort",
    "no": "does not fit",
}
PROGRAMS = {"nanogpt": "nanoGPT", "patched": "patched", "oomph": "oomph"}
HEADINGS = ("", "option", "program", "batch", "MiB", "saved", "tokens/s", "hours", "advice")
CARD_HEADINGS = ("card", "MiB", "program", "as", "needs", "tokens/s", "hours", "rent, USD")
THIN = "* fits by less than the prediction may miss, or only by giving cached memory back."
UNKNOWN = "–"
MANY_HOURS = 1000  # from which a tenth is no longer shown


class Line(msgspec.Struct, frozen=True):
    """One option as a row."""

    number: int  # counted from 1, as `--option` takes it
    option: str
    program: str
    batch: str  # sequences to an optimizer step
    total: str
    saved: str
    tokens_per_s: str
    hours: str
    advice: str
    effect: str
    fits: bool
    best: bool

    def cells(self) -> tuple[str, ...]:
        """The row, with its mark."""
        mark = "★" if self.best else "✓" if self.fits else "✗"
        figures = (self.batch, self.total, self.saved, self.tokens_per_s, self.hours)
        return (f"{mark} {self.number}", self.option, self.program, *figures, self.advice)


class Section(msgspec.Struct, frozen=True):
    """Options of one kind."""

    title: str
    lines: tuple[Line, ...]


class FitSummary(msgspec.Struct, frozen=True):
    """A report in words and numbers."""

    verdict: str
    good: bool
    title: str
    setting: str
    device: str
    sections: tuple[Section, ...]
    why: tuple[str, ...]
    effects: tuple[str, ...]
    patch: tuple[str, str] | None  # the lines, and why they are safe
    evaluated: str
    notes: tuple[str, ...]


def summarise_fit(fit: Fit) -> FitSummary:
    """The report of a fit."""
    plan = summarise([fit.now])
    lines = [(_section(option), _line(fit, index, option)) for index, option in enumerate(fit.options)]
    sections = [
        Section(title, tuple(line for key, line in lines if key == name))
        for name, title in _titles(fit).items()
        if any(key == name for key, _ in lines)
    ]
    return FitSummary(
        verdict=fit.verdict,
        good=is_yes(fit),
        title=plan.title,
        setting=plan.setting,
        device=plan.device,
        sections=tuple(sections),
        why=fit.why,
        effects=tuple(_effects(fit)),
        patch=(PATCH, WHY_SAFE) if any(option.patched and option.fits for option in fit.options) else None,
        evaluated=f"{fit.evaluated:,} settings weighed; every one shown is simulated in full on this card",
        notes=fit.now.notes,
    )


def is_yes(fit: Fit) -> bool:
    """Whether something fits, in time, that was asked for: the same training, or a model that was to be found."""
    chosen = fit.chosen
    if chosen is None:
        return False
    in_time = fit.hours_limit is None or (chosen.hours is not None and chosen.hours <= fit.hours_limit)
    return in_time and (chosen.kind == "same" or fit.seeks_a_model)


def describe(option: Option | CardOption) -> str:
    """An option in few words: the batch, and what else is new."""
    config = option.plan.config
    said = [word for key, word in _words(config).items() if key in option.changes]
    if config.trainer == "oomph" and config.loss_chunk != usual_loss_chunk(config):  # oomph's own default needs no word
        said.append(f"loss by {config.loss_chunk}" if config.loss_chunk else "loss at once")
    return ", ".join([f"{config.batch_size} × {config.gradient_accumulation_steps}", *said])


def _words(config: TrainConfig) -> dict[str, str]:
    """What is said of each key where it is new."""
    return {
        "n_layer": layers(config.n_layer),
        "n_embd": f"width {config.n_embd}",
        "block_size": f"block {config.block_size}",
        "compile": "compiled" if config.compile else "not compiled",
        "checkpoint_layers": f"{config.checkpoint_layers} block{'s' * (config.checkpoint_layers != 1)} checkpointed",
        "optimizer": config.optimizer,
        "optimizer_loop": f"{config.optimizer_loop} optimizer",
        "dtype": config.dtype or "",
        "autocast": "autocast" if config.autocast else "bfloat16 throughout",
        "expandable_segments": "expandable segments" if config.expandable_segments else "fixed segments",
    }


def describe_model(option: Option) -> str:
    """A model in few words: its size, the batch, and what else makes room for it."""
    config = option.plan.config
    size = f"{layers(config.n_layer)} × {config.n_embd}, {count(option.plan.model.params_nanogpt)}"
    said = [word for key, word in _words(config).items() if key in option.changes and key in MAKES_ROOM]
    return ", ".join([size, f"{config.batch_size} × {config.gradient_accumulation_steps}", *said])


def _titles(fit: Fit) -> dict[str, str]:
    return SECTIONS | {"different": "models that fit"} if fit.seeks_a_model else SECTIONS


def _section(option: Option) -> str:
    return option.kind if option.fits else "no"


def _line(fit: Fit, index: int, option: Option) -> Line:
    return Line(
        number=index + 1,
        option=describe_model(option) if fit.seeks_a_model else describe(option),
        program=PROGRAMS["patched" if option.patched else option.trainer],
        batch=f"{option.sequences:,}",
        total=f"{option.plan.memory.total_mib:,.0f}",
        saved=f"{option.saved_mib:,.0f}" if not fit.proposed else UNKNOWN,
        tokens_per_s=UNKNOWN if option.tokens_per_s is None else f"{option.tokens_per_s:,.0f}",
        hours=_hours(option.hours),
        advice=option.reason,
        effect=option.effect,
        fits=option.fits,
        best=index == fit.best,
    )


def _hours(hours: float | None) -> str:
    return UNKNOWN if hours is None else f"{hours:,.1f}" if hours < MANY_HOURS else f"{hours:,.0f}"


def _effects(fit: Fit) -> list[str]:
    """What options that are not the same do to the training; rounding alone needs no line each."""
    lines = []
    for index, option in enumerate(fit.options):
        if option.kind != "same":
            lines.append(f"{index + 1}: {option.effect}")
    return lines


def card_rows(cards: Cards, every: bool = False) -> list[tuple[str, ...]]:
    """Cards that would do: of each memory the fastest, or all of them."""
    shown: list[CardOption] = []
    for card in cards.fitting:
        if every or not any(card.device.memory_mib == other.device.memory_mib for other in shown):
            shown.append(card)
    return [_card_row(card) for card in shown]


def cards_note(cards: Cards) -> str:
    """What a star beside a card's need means; empty where none has one."""
    return THIN if any(card.margin for card in cards.fitting) else ""


def _card_row(card: CardOption) -> tuple[str, ...]:
    plan, time, rent = card.plan, card.plan.time, card.rent
    return (
        card.device.name,
        f"{card.device.usable_mib:,}",
        PROGRAMS["patched" if card.patched else plan.config.trainer],
        describe(card),
        f"{plan.memory.total_mib:,.0f}{'*' * bool(card.margin)}",
        UNKNOWN if time is None else f"{time.tokens_per_s:,.0f}",
        _hours(time.hours if time else None),
        UNKNOWN if rent is None else f"{rent[0]:,.0f} to {rent[1]:,.0f}",
    )
